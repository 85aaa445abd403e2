"""Baselines and scales: closed forms."""

from itertools import product

import pytest
import torch

from grpo.objective.advantage import (
    center_by_group_mean,
    center_by_moving_average,
    leave_one_out,
    scale_by_batch_std,
    scale_by_group_std,
)
from grpo.objective.base import Objective, assign_credit, chain
from grpo.types import Rollouts

# E[A_i | y_i = 1] of a binary reward under the population z-score.
EXPECTED_ADVANTAGE = {
    (2, 0.1): 0.9000,
    (2, 0.5): 0.5000,
    (2, 0.9): 0.1000,
    (4, 0.25): 1.2338,
    (4, 0.75): 0.4113,
    (8, 0.1): 2.0949,
    (8, 0.5): 0.9278,
}


def advantages(objective: Objective, *groups: list[float]) -> list[float]:
    """Returns one advantage per rollout of groups with the given rewards."""
    reward = torch.tensor([value for group in groups for value in group])
    index = [number for number, group in enumerate(groups) for _ in group]
    rollouts = Rollouts(
        group=torch.tensor(index),
        reward=reward,
        outcome=reward,
        mask=torch.ones(len(reward), 2, dtype=torch.bool),
        behavior_logp=torch.zeros(len(reward), 2),
    )
    credit, _ = assign_credit(objective, rollouts, objective.init(), torch.Generator())
    return credit.advantage[:, 0].tolist()


def test_the_mean_baseline_by_hand():
    # group 1: mean 2; group 2: mean 5
    assert advantages(center_by_group_mean(), [1.0, 3.0], [4.0, 5.0, 6.0]) == [-1, 1, -1, 0, 1]


def test_leave_one_out_is_the_centered_reward_times_g_over_g_minus_1():
    # r - mean of the others: 0 - 3, 2 - 2, 4 - 1
    assert advantages(leave_one_out(), [0.0, 2.0, 4.0]) == [-3, 0, 3]
    centered = advantages(center_by_group_mean(), [0.0, 2.0, 4.0])
    assert advantages(leave_one_out(), [0.0, 2.0, 4.0]) == [1.5 * value for value in centered]


def test_a_group_of_one_has_no_advantage_over_the_others():
    assert advantages(leave_one_out(), [1.0], [2.0, 5.0]) == [0, -3, 3]


@pytest.mark.parametrize(("ddof", "expected"), [(0, 1.0), (1, 0.5**0.5)])
def test_two_rollouts_give_plus_and_minus_one_and_ddof_changes_it_by_sqrt_2(
    ddof: int, expected: float
):
    objective = chain(center_by_group_mean(), scale_by_group_std(ddof=ddof, epsilon=0.0))
    assert advantages(objective, [1.0, 0.0]) == pytest.approx([expected, -expected])


@pytest.mark.parametrize(("size", "rate"), EXPECTED_ADVANTAGE)
def test_the_expected_z_score_of_a_success_matches_its_closed_form(size: int, rate: float):
    """Enumerates every outcome of the other rollouts."""
    objective = chain(center_by_group_mean(), scale_by_group_std(epsilon=0.0))
    total = 0.0
    for others in product([0.0, 1.0], repeat=size - 1):
        probability = rate ** sum(others) * (1 - rate) ** (size - 1 - sum(others))
        if sum(others) < size - 1:
            total += probability * advantages(objective, [1.0, *others])[0]
    assert total == pytest.approx(EXPECTED_ADVANTAGE[size, rate], abs=5e-5)


def test_the_expected_leave_one_out_advantage_of_a_success_is_1_minus_p_at_any_size():
    """RLOO's scale does not depend on the group's size: why mixed sizes use it (U18)."""
    for size, rate in product([2, 4, 6], [0.1, 0.5, 0.75]):
        total = 0.0
        for others in product([0.0, 1.0], repeat=size - 1):
            probability = rate ** sum(others) * (1 - rate) ** (size - 1 - sum(others))
            total += probability * advantages(leave_one_out(), [1.0, *others])[0]
        assert total == pytest.approx(1 - rate, abs=1e-6)


def test_the_batch_deviation_is_shared_by_all_groups():
    objective = chain(center_by_group_mean(), scale_by_batch_std(epsilon=0.0))
    # centered -1, 1, -3, 3: population deviation sqrt(5)
    assert advantages(objective, [0.0, 2.0], [0.0, 6.0]) == pytest.approx(
        [value / 5**0.5 for value in (-1, 1, -3, 3)]
    )


def test_the_moving_average_starts_at_0_and_is_carried_in_the_state():
    objective = center_by_moving_average(decay=0.5)
    rollouts = Rollouts(
        group=torch.tensor([0, 0]),
        reward=torch.tensor([1.0, 3.0]),
        outcome=torch.tensor([1.0, 3.0]),
        mask=torch.ones(2, 1, dtype=torch.bool),
        behavior_logp=torch.zeros(2, 1),
    )
    first, state = assign_credit(objective, rollouts, objective.init(), torch.Generator())
    second, _ = assign_credit(objective, rollouts, state, torch.Generator())
    assert first.advantage[:, 0].tolist() == [1.0, 3.0]  # nothing seen yet
    assert second.advantage[:, 0].tolist() == [-1.0, 1.0]  # m = 1, corrected by 1 - 0.5


def test_a_link_with_state_stands_in_a_chain_once():
    with pytest.raises(ValueError, match="once"):
        chain(center_by_moving_average(), center_by_moving_average())


def test_rloo_is_unbiased_on_a_softmax_bandit():
    """G3: the mean gradient is p (r - E r) within 4 standard errors."""
    generator = torch.Generator().manual_seed(0)
    logits, reward = torch.randn(6, generator=generator), torch.rand(6, generator=generator)
    probability = logits.softmax(0)
    arms = torch.multinomial(probability, 8 * 4000, replacement=True, generator=generator)
    rollouts = Rollouts(
        group=torch.arange(4000).repeat_interleave(8),
        reward=reward[arms],
        outcome=reward[arms],
        mask=torch.ones(len(arms), 1, dtype=torch.bool),
        behavior_logp=torch.zeros(len(arms), 1),
    )
    credit, _ = assign_credit(leave_one_out(), rollouts, {}, generator)
    score = torch.nn.functional.one_hot(arms, 6) - probability
    by_group = (credit.advantage * score).view(4000, 8, 6).mean(dim=1)
    expected = probability * (reward - probability @ reward)
    error = by_group.std(dim=0) / 4000**0.5
    assert ((by_group.mean(dim=0) - expected).abs() < 4 * error).all()
