"""The judge of reasoning-gym: the family's own `score_answer`."""

from functools import cache
from typing import Any

import reasoning_gym

from grpo.rewards.base import Task


def score_answer(answer: str, task: Task) -> float:
    """Returns reasoning-gym's score of an answer, in [0, 1]."""
    return float(_judge(task.family).score_answer(answer, task.entry))


@cache
def _judge(family: str) -> Any:
    """Returns a data set of the family; only its judge is used, entries carry the difficulty."""
    return reasoning_gym.create_dataset(family, size=1, seed=0)
