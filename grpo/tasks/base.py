"""What a task gives: tables of prompts, disjoint between training and evaluation."""

from typing import NamedTuple

import pandas as pd


class PromptTables(NamedTuple):
    """Frames under the schemas PROMPTS, PROMPTS and WARMUP."""

    train: pd.DataFrame
    eval: pd.DataFrame
    warmup: pd.DataFrame


def shares(total: int, parts: int) -> list[int]:
    """Returns `total` split into near-equal shares."""
    return [total // parts + (index < total % parts) for index in range(parts)]
