"""Judges, one file each, found by its name: what rollouts are worth."""

import sys

from grpo.rewards.base import Judge
from grpo.runtime.lookup import import_part, part_names


def judge_names() -> tuple[str, ...]:
    """Returns every reward.judge."""
    return part_names(sys.modules[__name__])


def find_judge(name: str) -> Judge:
    """Returns the judge of a name that `judge_names` lists."""
    module = import_part(sys.modules[__name__], name)
    return next(each for each in vars(module).values() if isinstance(each, Judge))
