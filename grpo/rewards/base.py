"""The interface of judges: their description, what they read and what they return."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import UInt8
from numpy.typing import NDArray

from grpo.schema import LANGUAGE_TAG, DirectoryBase, HubBase, Machine, S3Base, Strict

FRAMES_PER_CLIP = 8
ROLLOUTS_PER_CALL = 16  # of a Viewer or Reader
ROLLOUTS_PER_SHARD = 128  # that one job judges


@dataclass(frozen=True, kw_only=True)
class Task:
    """A judge's view of a prompt: family, text, answer and the task's own entry."""

    family: str
    prompt: str
    answer: str
    entry: dict[str, object]

    @property
    def source(self) -> str:
        """The prompt without the tag of a language: "forty-two" of ">>fi<< forty-two"."""
        return LANGUAGE_TAG.sub("", self.prompt, count=1)


class Part(NamedTuple):
    """The score of a part of a text, such as one line of a worked solution."""

    end: int  # characters of the text up to the end of the part: it ends with text[end - 1]
    score: float  # raw


class Scored(NamedTuple):
    """The result of a judge that scores parts: one score of the rollout, and those of its parts."""

    score: float  # raw
    parts: Sequence[Part]  # in the order of the text


class View(NamedTuple):
    """The result for one of the rollouts that are judged together."""

    text: str  # for display: the text that was recognized in an image, or the raw score
    score: float  # the judge's raw score
    parts: Sequence[Part] = ()  # of a judge that scores parts


class Unjudged(NamedTuple):
    """The result without a score for one of the rollouts that are judged together."""

    detail: str  # the reason
    # failed: by the judge. unanswered: the judge's server is down. These two are not trained on.
    # unparsable, timed_out: by the policy, whose rollout has the score 0.
    status: Literal["failed", "unanswered", "unparsable", "timed_out"] = "failed"


AnswerJudge = Callable[[str, Task], float]  # text of the answer -> raw score
PartJudge = Callable[[str, Task], Scored]  # whole text of the rollout -> raw scores
# Judges several rollouts together, in the process that calls it. Media are images
# [row, channel, height, width] or clips [row, channel, frame, height, width].
Viewer = Callable[[NDArray[np.uint8], Sequence[Task]], Sequence[View | Unjudged]]
Reader = Callable[[Sequence[str], Sequence[Task]], Sequence[View | Unjudged]]
# Scores many texts as one corpus: score by name, e.g. chrf and bleu.
CorpusScorer = Callable[[Sequence[str], Sequence[Task]], dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class JudgeInputs:
    """Inputs of a judge's constructor."""

    where: str  # the path of the judge's parameters, for messages
    model: DirectoryBase | HubBase | S3Base | None  # its parameter `model`
    data: Path  # the folder of directories that `model` names
    machine: Machine
    answer_pattern: str | None = None  # the parameter `reward.answer_pattern`
    takes_messages: bool = False  # whether prompts and rollouts are messages of a chat
    settings: Strict | None = None  # its parameter `settings`, of the type Judge.settings


@dataclass(frozen=True, kw_only=True)
class Judge:
    """The description of a judge in its file, which has the name of the parameter `judge`.

    Raises:
      ValueError: If it scores parts of something other than a text, or the rollouts of a call do
        not divide those of a shard.
    """

    reads: Literal["text", "media", "simulation"]  # the part of a rollout that is judged
    # A Viewer for media, an AnswerJudge for texts and simulations (whose verdict is a text), or a
    # PartJudge or Reader for texts.
    load: Callable[[JudgeInputs], AnswerJudge | PartJudge | Viewer | Reader]
    needs_model: bool = False  # whether the parameter `model` is required
    # Whether it is a Reader: of the whole texts of several rollouts, in the process that samples
    # and without a time limit, as a model needs it. An AnswerJudge gets the answer of one rollout.
    reads_together: bool = False
    # Whether this Reader runs in a process of its own if `reward.timeout_seconds` is stated. That
    # process is a fork, so it must not use a GPU.
    may_fork: bool = False
    rollouts_per_call: int = ROLLOUTS_PER_CALL  # of a Viewer or Reader; divides ROLLOUTS_PER_SHARD
    settings: type[Strict] | None = None  # of the parameter `settings`, required then; None: none
    # Whether it is a PartJudge, or a Reader whose views have parts.
    scores_parts: bool = False
    needs_task: str | None = None  # required task.kind; None: any with such rollouts
    task_settings: Mapping[str, str] = field(default_factory=dict)  # required ones of the task
    needs_columns: frozenset[str] = frozenset()  # required in the entry of every prompt
    # Of the texts of a family in an evaluation, where the mean over texts is not the metric.
    score_corpus: CorpusScorer | None = None

    def __post_init__(self) -> None:
        if self.scores_parts and self.reads != "text":
            raise ValueError(f"scores_parts needs a judge that reads text, got {self.reads!r}")
        if ROLLOUTS_PER_SHARD % self.rollouts_per_call:
            raise ValueError(
                f"rollouts_per_call must divide {ROLLOUTS_PER_SHARD}, got {self.rollouts_per_call}"
            )


def take_frames(
    media: UInt8[np.ndarray, "row channel *shape"],
) -> UInt8[np.ndarray, "row frame channel height width"]:
    """Returns up to FRAMES_PER_CLIP evenly spaced frames, first and last included.

    Args:
      media: Images [row, channel, height, width], which give one frame, or clips
        [row, channel, frame, height, width].
    """
    if media.ndim == 4:
        return media[:, None]
    frames = media.shape[2]
    chosen = np.linspace(0, frames - 1, min(frames, FRAMES_PER_CLIP)).round().astype(int)
    return media[:, :, chosen].swapaxes(1, 2)
