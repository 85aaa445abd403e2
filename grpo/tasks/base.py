"""The interface of tasks: parameters and tables of prompts."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import pandas as pd

from grpo.errors import ParameterError
from grpo.modalities.modality import TextWarmup
from grpo.schema import PARAMS, Strict

PromptKind = Literal["text", "caption", "scene", "image"]  # the kind of a prompt


class PromptTables(NamedTuple):
    """Tables of the schemas PROMPTS, PROMPTS and WARMUP."""

    train: pd.DataFrame
    eval: pd.DataFrame
    warmup: pd.DataFrame


@dataclass(frozen=True, kw_only=True)
class TaskInputs:
    """Inputs of a task besides its own parameters."""

    seed: int
    data: Path  # the folder of files that parameters name
    warmup: Any  # policy.base.warmup; None for an imported base
    takes_messages: bool  # whether a prompt may be a list of chat messages


class Task(Strict):
    """The section `task`. Each file of this folder defines one task and is named as its kind."""

    prompt_kinds: ClassVar[tuple[PromptKind, ...]]  # the kinds of its prompts

    kind: str

    @abstractmethod
    def make_prompts(self, inputs: TaskInputs) -> PromptTables:
        """Returns disjoint prompts of training and evaluation, and solutions for a warm-up.

        Raises:
          ParameterError: If the parameters cannot be satisfied.
          ArtifactError: If a file of prompts is broken.
        """

    def files(self) -> Iterator[tuple[str, str]]:
        """Yields the files below data/ with the prompts, as pairs of parameter and path."""
        yield from ()


def shares(total: int, parts: int) -> list[int]:
    """Splits `total` into nearly equal shares."""
    return [total // parts + (index < total % parts) for index in range(parts)]


def require_pairs(inputs: TaskInputs, kind: str) -> None:
    """Raises ParameterError if the warm-up asks for a mix of solutions, which the task has not."""
    if isinstance(inputs.warmup, TextWarmup):
        raise ParameterError(
            f"{PARAMS}: policy.base.warmup.answer_mark is unknown with task.kind {kind}, so are "
            "worked_fraction and wrong_fraction; remove them"
        )


def as_solutions(prompts: pd.DataFrame) -> pd.DataFrame:
    """Returns prompts with their answers as a table of schema WARMUP."""
    columns = ["prompt_id", "family", "prompt", "solution"]
    return prompts.rename(columns={"answer": "solution"})[columns]
