"""Judges of rollouts, one file each, named as `reward.judge`."""

import sys

from grpo.rewards.base import Judge
from grpo.runtime.lookup import import_part, part_names


def judge_names() -> tuple[str, ...]:
    """Returns all values of reward.judge."""
    return part_names(sys.modules[__name__])


def find_judge(name: str) -> Judge:
    """Returns the judge of a name in `judge_names`."""
    module = import_part(sys.modules[__name__], name)
    return next(each for each in vars(module).values() if isinstance(each, Judge))
