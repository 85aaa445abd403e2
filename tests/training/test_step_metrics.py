"""Where along a rollout the signal was: against counting by hand, and against updates.csv."""

import math

import torch
from torch import Tensor

from grpo.training.batches import Batch
from grpo.training.metrics import Tally, step_metrics, update_metrics
from grpo.types import Credit, Rollouts


def rollouts_of(mask: Tensor, group: list[int], reward: list[float]) -> Rollouts:
    value = torch.tensor(reward)
    return Rollouts(
        group=torch.tensor(group),
        reward=value,
        outcome=value,
        mask=mask,
        behavior_logp=torch.zeros(mask.shape),
    )


def batch_of(rollouts: Rollouts, rows: list[int], advantage: list[float], weight: float) -> Batch:
    kept = torch.tensor(rows)
    part = rollouts.select(kept)
    mask = part.mask.float()
    credit = Credit(advantage=torch.tensor(advantage)[:, None] * mask, weight=weight * mask)
    return Batch(rows=kept, rollouts=part, credit=credit)


def test_one_step_per_group_is_counted_by_hand():
    """Groups 7 and 9 have noise in the second step, group 3 in the last; group 9 has no weight."""
    mask = torch.zeros(6, 4, dtype=torch.bool)
    mask[:4, 1] = mask[4:, 3] = True
    rollouts = rollouts_of(mask, [7, 7, 9, 9, 3, 3], [0.0, 1.0, 0.5, 0.5, 0.0, 0.5])
    batches = [
        batch_of(rollouts, [4, 5], [-1.0, 2.0], 0.5),
        batch_of(rollouts, [0, 1], [-3.0, 3.0], 0.5),
        batch_of(rollouts, [2, 3], [0.0, 0.0], 0.0),
    ]
    second, last = step_metrics(rollouts, batches)
    assert (second.step, second.rollouts, second.trained_rollouts) == (1, 4, 2)
    assert second.reward_std_within == 0.25  # of 0.5 and 0
    assert (second.advantage_mean, second.advantage_abs_mean) == (0.0, 3.0)
    assert (last.step, last.rollouts, last.trained_rollouts) == (3, 2, 2)
    assert last.reward_std_within == 0.25
    assert (last.advantage_mean, last.advantage_abs_mean) == (0.5, 1.5)


def test_where_only_one_rollout_of_a_group_goes_on_there_is_no_spread():
    rollouts = rollouts_of(torch.tensor([[True, True], [True, False]]), [0, 0], [1.0, 0.0])
    first, second = step_metrics(rollouts, [batch_of(rollouts, [0, 1], [1.0, -1.0], 0.0)])
    assert (first.reward_std_within, second.reward_std_within) == (0.5, None)
    assert (second.rollouts, second.trained_rollouts, second.advantage_mean) == (1, 0, None)


def test_with_noise_in_every_step_the_spread_is_that_of_the_update():
    torch.manual_seed(0)
    group = torch.arange(5).repeat_interleave(4).tolist()
    rollouts = rollouts_of(torch.ones(20, 3, dtype=torch.bool), group, torch.rand(20).tolist())
    batch = batch_of(rollouts, list(range(20)), [1.0] * 20, 1.0)
    of_update = update_metrics(batch, Tally(), update=0, grad_norm=0.0, audit=None)
    for each in step_metrics(rollouts, [batch]):
        assert each.reward_std_within is not None
        assert math.isclose(each.reward_std_within, of_update.reward_std_within, rel_tol=1e-12)
