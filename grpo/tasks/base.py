"""What a task is: its parameters, and the tables of prompts that it makes of them."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import pandas as pd

from grpo.schema import Strict

Asked = Literal["text", "caption", "scene"]  # what a prompt is


class PromptTables(NamedTuple):
    """Frames under the schemas PROMPTS, PROMPTS and WARMUP."""

    train: pd.DataFrame
    eval: pd.DataFrame
    warmup: pd.DataFrame


@dataclass(frozen=True, kw_only=True)
class TaskInputs:
    """What a task may read beside its own parameters."""

    seed: int
    data: Path  # where parameters name files in
    warmup: Any  # policy.base.warmup; None: the base is imported
    takes_messages: bool  # whether a prompt may be a list of chat messages


class Task(Strict):
    """The section `task`. Each file of this folder has one of its own, and is named as its kind."""

    asks: ClassVar[tuple[Asked, ...]]  # what its prompts may be read as

    kind: str

    @abstractmethod
    def make_prompts(self, inputs: TaskInputs) -> PromptTables:
        """Returns prompts of training and evaluation, disjoint, and solutions for a warm-up.

        Raises:
          ParameterError: If they cannot be made as the parameters say.
          ArtifactError: If a file of theirs is broken.
        """

    def files(self) -> Iterator[tuple[str, str]]:
        """Yields the files below data/ that prompts are made from: parameter and path."""
        yield from ()


def shares(total: int, parts: int) -> list[int]:
    """Returns `total` split into near-equal shares."""
    return [total // parts + (index < total % parts) for index in range(parts)]
