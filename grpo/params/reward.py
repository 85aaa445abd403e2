"""Typed parameters of judges and rewards."""

import math
import re
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field, field_validator

from grpo.errors import ParameterError
from grpo.schema import DirectoryBase, Fraction, HubBase, NonNegative, S3Base, Strict, Timeout

MEDIA_JUDGES = ("ocr", "moving_ocr", "clip", "pickscore")  # of what was drawn
MODEL_JUDGES = ("clip", "pickscore")
SIMULATOR = "simulator"  # whose verdict needs no reading
JudgeModel = Annotated[DirectoryBase | HubBase | S3Base, Field(discriminator="source")]
Finite = Annotated[float, Field(allow_inf_nan=False)]


def judges_of(judged: Literal["text", "media", "simulation"]) -> tuple[str, ...]:
    """Returns the judges that read what rollouts of a modality are."""
    others = {"media": MEDIA_JUDGES, "simulation": (SIMULATOR,)}
    if judged != "text":
        return others[judged]
    known: tuple[str, ...] = get_args(Reward.model_fields["judge"].annotation)
    return tuple(each for each in known if each not in (*MEDIA_JUDGES, SIMULATOR))


class Reward(Strict):
    """Outcome 1 if the judge's score reaches `threshold`; what the judge has no use for is null."""

    @field_validator("answer_pattern")
    @classmethod
    def _has_one_group(cls, pattern: str | None) -> str | None:
        if pattern is None:
            return None
        try:
            groups = re.compile(pattern).groups
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"must be a regular expression: {error}") from None
        if groups != 1:
            raise ValueError("must have exactly one group, the answer")
        return pattern

    @field_validator("score_range")
    @classmethod
    def _rises(cls, ends: tuple[float, float] | None) -> tuple[float, float] | None:
        if ends is not None and ends[0] >= ends[1]:
            raise ValueError("must rise from its first number to its second")
        if ends is not None and not math.isfinite(ends[1] - ends[0]):
            raise ValueError("must be of a finite width")
        return ends

    judge: Literal["reasoning_gym", "math", "ocr", "moving_ocr", "clip", "pickscore", "simulator"]
    model: JudgeModel | None  # of MODEL_JUDGES
    score_range: tuple[Finite, Finite] | None  # raw scores that count as 0 and as 1; null: 0, 1
    answer_pattern: str | None  # of judges of text: group 1 of its last match is the answer
    threshold: Fraction
    maximize: Literal["outcome", "score"]  # what the reward is, before it is shaped
    unfinished_penalty: NonNegative  # taken off a rollout that hit the step limit
    timeout_seconds: Timeout | None  # of judges of text, per rollout


def check_reward(reward: Reward, path: Path) -> None:
    """Raises ParameterError unless the judge has what it needs, and nothing else is stated.

    Args:
      path: Of the parameter file, for the message.
    """
    has_model = reward.judge in MODEL_JUDGES
    reads_text = reward.judge in judges_of("text")
    needs = {
        "model": has_model,
        "answer_pattern": reads_text,
        "timeout_seconds": reads_text,
    }
    if has_model or reward.judge == SIMULATOR:  # others may state how their scores are mapped
        needs["score_range"] = has_model
    for name, value in reward.model_dump(include=set(needs)).items():
        if needs[name] == (value is None):
            rule = "must be stated" if needs[name] else "must be null"
            raise ParameterError(
                f"{path}: reward.{name} {rule} with reward.judge {reward.judge}, got {value!r}"
            )
