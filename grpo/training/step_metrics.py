"""Where along a rollout the signal was: the columns of steps.csv."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo.training.batches import Batch
from grpo.types import Rollouts


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """What a round's rollouts had at one step; a row of steps.csv."""

    step: int  # a token's place in the response, or a denoising step's in the schedule
    rollouts: int  # that could be trained here: a denoising step has noise
    reward_std_within: float | None  # mean over their groups, ddof=0; None: no group of two
    trained_rollouts: int
    advantage_mean: float | None  # over trained rollouts; None: there are none
    advantage_abs_mean: float | None


def step_metrics(rollouts: Rollouts, batches: Sequence[Batch]) -> list[StepMetrics]:
    """Returns a row per step that any rollout has, in order; steps of no rollout are left out."""
    mask = rollouts.mask.double()
    spread = _spread_within(rollouts.reward.double(), rollouts.group, mask)
    trained, signed, absolute = (torch.zeros_like(mask[0]) for _ in range(3))
    for batch in batches:
        is_trained = (batch.credit.weight != 0).double()
        advantage = batch.credit.advantage.double() * is_trained
        trained += is_trained.sum(dim=0)
        signed += advantage.sum(dim=0)
        absolute += advantage.abs().sum(dim=0)
    return [
        StepMetrics(
            step=step,
            rollouts=int(mask[:, step].sum()),
            reward_std_within=_number(spread[step]),
            trained_rollouts=int(trained[step]),
            advantage_mean=_number(signed[step] / trained[step]),
            advantage_abs_mean=_number(absolute[step] / trained[step]),
        )
        for step in mask.any(dim=0).nonzero().flatten().tolist()
    ]


def _spread_within(reward: Tensor, group: Tensor, mask: Tensor) -> Tensor:
    """Returns the deviation of reward within groups at each step; NaN where none has two.

    Args:
      mask: Shape [rollout, step], as 0 and 1.
    """
    index = group.unique(return_inverse=True)[1]
    empty = mask.new_zeros(int(index.max()) + 1, mask.shape[1])
    size = empty.index_add(0, index, mask)
    mean = empty.index_add(0, index, mask * reward[:, None]) / size
    squares = empty.index_add(0, index, mask * (reward[:, None] - mean[index]) ** 2)
    return torch.where(size > 1, (squares / size).sqrt(), torch.nan).nanmean(dim=0)


def _number(value: Tensor) -> float | None:
    return None if value.isnan() else float(value)
