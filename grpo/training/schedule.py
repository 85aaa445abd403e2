"""Learning rates by update: the schedules of `transformers`."""

from collections.abc import Callable
from typing import Literal

import torch
from transformers import get_scheduler

# A function from the index of an update, counted from the base policy, to its learning rate.
LearningRate = Callable[[int], float]
ScheduleKind = Literal["constant", "linear", "cosine"]
NAMES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}


def schedule_learning_rate(
    kind: ScheduleKind, highest: float, *, warmup_updates: int, total_updates: int
) -> LearningRate:
    """Returns the learning rate of `transformers.get_scheduler` as a function of the update.

    With w = `warmup_updates`, N = `total_updates` and p = (u - w) / (N - w), update u has the
    learning rate `highest` times u / w if u < w; from then on times 1 (constant), 1 - p (linear) or
    (1 + cos(pi p)) / 2 (cosine). So a warm-up starts at 0, and a decay would reach 0 at update N.
    """
    optimizer = torch.optim.SGD([torch.zeros((), requires_grad=True)], lr=highest)
    schedule = get_scheduler(
        NAMES[kind],
        optimizer,
        num_warmup_steps=warmup_updates,
        num_training_steps=total_updates,
    )
    (factor,) = schedule.lr_lambdas
    return lambda update: highest * float(factor(update))
