"""Improvements on a first answer in the reward and in the advantage: closed forms."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.objective.advantage import add_improvement, scale_by_improvement
from grpo.objective.algorithms import group_revision, grpo
from grpo.objective.base import Objective, chain
from grpo.objective.weight import average_over_rollouts
from grpo.types import Rollouts
from tests.objective.batches import credit_of, ragged_rollouts


def one_group(reward: list[float], improvement: list[float]) -> Rollouts:
    """Returns a group of rollouts of one step."""
    value = torch.tensor(reward)
    return Rollouts(
        group=torch.zeros(len(value), dtype=torch.long),
        reward=value,
        outcome=value,
        mask=torch.ones(len(value), 1, dtype=torch.bool),
        behavior_logp=torch.zeros(len(value), 1),
        improvement=torch.tensor(improvement),
    )


def advantages(objective: Objective, rollouts: Rollouts) -> list[float]:
    """Returns the advantage of each rollout."""
    return credit_of(objective, rollouts).advantage[:, 0].tolist()


def test_the_published_factor_moves_the_sum_of_advantages_and_recentering_restores_it():
    # (1.4, -1, .6, -.5) sums to .5; minus .125 each
    given_group = one_group([1.0, -1.0, 0.5, -0.5], [0.4, 0.0, 0.2, 0.0])
    published = advantages(scale_by_improvement(), given_group)
    assert published == pytest.approx([1.4, -1.0, 0.6, -0.5])
    assert sum(published) == pytest.approx(0.5)
    repaired = advantages(scale_by_improvement(center="group"), given_group)
    assert repaired == pytest.approx([1.275, -1.125, 0.475, -0.625])


def test_the_improvement_adds_to_the_reward_by_its_weight():
    given_group = one_group([1.0, 0.0], [0.25, 0.5])
    assert advantages(add_improvement(4.0), given_group) == [2.0, 2.0]


@settings(deadline=None, max_examples=40)
@given(rollouts=ragged_rollouts(), weight=st.floats(0, 10))
def test_without_any_improvement_it_is_grpo(rollouts: Rollouts, weight: float):
    """Exactly in the published form, on ragged groups."""
    unimproved = replace(rollouts, improvement=torch.zeros(len(rollouts.mask)))
    expected = credit_of(grpo(), unimproved)
    published = credit_of(group_revision(weight), unimproved)
    assert torch.equal(published.advantage, expected.advantage)
    assert torch.equal(published.weight, expected.weight)
    centered = credit_of(group_revision(weight, center="group"), unimproved)
    # The mean of a group's advantages is 0 up to rounding.
    torch.testing.assert_close(centered.advantage, expected.advantage, rtol=1e-5, atol=1e-6)


@settings(deadline=None, max_examples=40)
@given(rollouts=ragged_rollouts(), seed=st.integers(0, 99))
def test_recentered_advantages_of_a_group_sum_to_zero(rollouts: Rollouts, seed: int):
    generator = torch.Generator().manual_seed(seed)
    improved = replace(rollouts, improvement=torch.rand(len(rollouts.mask), generator=generator))
    credit = credit_of(group_revision(center="group"), improved)
    for group in rollouts.group.unique():
        advantage = credit.advantage[rollouts.group == group][:, 0]
        assert float(advantage.double().sum()) == pytest.approx(0.0, abs=1e-4)


def test_wrong_settings_and_missing_improvements_are_refused():
    with pytest.raises(ValueError, match="add_improvement needs a finite weight >= 0, got -1"):
        add_improvement(-1.0)
    bare = replace(one_group([1.0, 0.0], [0.0, 0.0]), improvement=None)
    for link in (add_improvement(), scale_by_improvement()):
        with pytest.raises(ValueError, match=r"needs Rollouts\.improvement"):
            credit_of(chain(link, average_over_rollouts()), bare)
