"""Rollouts without steps are in no statistic: they change no other rollout's credit."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo.objective.advantage import (
    center_by_group_mean,
    leave_one_out,
    rollout_advantage,
    scale_by_batch_std,
    scale_by_group_std,
)
from grpo.objective.algorithms import grpo, rloo
from grpo.objective.base import Objective, assign_credit, chain
from grpo.training.batches import plan_batches
from grpo.types import ActionChunks, Credit, Rollouts, StepNoise
from tests.objective.batches import credit_of, ragged_rollouts, with_parts
from tests.objective.every_link import EVERY, NAMED

FEW = settings(max_examples=6, deadline=None)
BROKEN_REWARD = st.sampled_from([0.0, 1.0, -3.0, 1e30, float("nan"), float("inf")])


def with_every_field(rollouts: Rollouts, seed: int) -> Rollouts:
    """Returns rollouts of which every link finds what it needs."""
    generator = torch.Generator().manual_seed(seed)
    mask = rollouts.mask
    noise = StepNoise(*(torch.rand(mask.shape, generator=generator) + 0.1 for _ in range(3)))
    phase = torch.randint(5, mask.shape, generator=generator)
    action = torch.randn(*mask.shape, 2, generator=generator)
    return replace(
        rollouts,
        reference_logp=rollouts.behavior_logp - 0.1,
        improvement=torch.rand(len(mask), generator=generator),
        noise=noise,
        variant=torch.randint(2, (len(mask),), generator=generator),
        chunks=ActionChunks(
            torch.where(mask, phase, -1), action, mask[..., None].expand(action.shape)
        ),
        parts=with_parts(rollouts, seed).parts,
    )


def add_broken(
    rollouts: Rollouts, place: int, reward: float, number: int
) -> tuple[Rollouts, Tensor]:
    """Returns rollouts with broken ones of the same group behind row `place`, and the old rows."""
    count = len(rollouts.mask)
    rows = torch.cat([torch.arange(place + 1), torch.full((number,), place)])
    rows = torch.cat([rows, torch.arange(place + 1, count)])
    is_old = torch.ones(len(rows), dtype=torch.bool)
    is_old[place + 1 : place + 1 + number] = False
    more = rollouts.select(rows)
    value = torch.where(is_old, more.reward, reward)
    chunks = more.chunks and ActionChunks(
        torch.where(is_old[:, None], more.chunks.phase, -1),
        more.chunks.action,
        more.chunks.is_executed & is_old[:, None, None],
    )
    mask = more.mask & is_old[:, None]
    return replace(more, reward=value, outcome=value, mask=mask, chunks=chunks), is_old


def same(first: Credit | None, second: Credit | None) -> bool:
    if first is None or second is None:
        return first is second
    return (
        torch.equal(first.advantage, second.advantage)
        and torch.equal(first.weight, second.weight)
        and same(first.full, second.full)
    )


def rows_of(credit: Credit, rows: Tensor) -> Credit:
    return Credit(
        advantage=credit.advantage[rows],
        weight=credit.weight[rows],
        full=credit.full and rows_of(credit.full, rows),
    )


@pytest.mark.parametrize("name", EVERY)
@given(
    rollouts=ragged_rollouts(),
    place=st.integers(0, 99),
    reward=BROKEN_REWARD,
    number=st.integers(1, 3),
    seed=st.integers(0, 999),
)
@FEW
def test_a_broken_rollout_changes_no_other_rollouts_credit(
    name: str, rollouts: Rollouts, place: int, reward: float, number: int, seed: int
):
    """Exactly: of every link and algorithm, what it drew at random and what it remembers too."""
    objective, healthy = EVERY[name], with_every_field(rollouts, seed)
    broken, is_old = add_broken(healthy, place % len(healthy.mask), reward, number)
    generators = [torch.Generator().manual_seed(seed) for _ in range(2)]
    state = objective.init()
    for _ in range(2):  # the second batch meets the state that the first one left
        expected, after = assign_credit(objective, healthy, state, generators[0])
        found, state = assign_credit(objective, broken, state, generators[1])
        assert same(rows_of(found, is_old), expected)
        assert (found.weight[~is_old] == 0).all()
        assert (found.advantage[~is_old] == 0).all()
        assert state == after


@pytest.mark.parametrize("name", NAMED)
@given(reward=st.floats(-2, 2, width=32), others=st.lists(BROKEN_REWARD, max_size=4))
@FEW
def test_a_group_left_with_one_rollout_teaches_nothing(
    name: str, reward: float, others: list[float]
):
    """Beside a mixed group, so that nothing but the group itself is the reason."""
    values = torch.tensor([1.0, 0.0, 0.5, reward, *others])
    mask = torch.ones(len(values), 3, dtype=torch.bool)
    mask[4:] = False
    rollouts = Rollouts(
        group=torch.tensor([0, 0, 0, *[1] * (len(values) - 3)]),
        reward=values,
        outcome=values,
        mask=mask,
        behavior_logp=torch.zeros(mask.shape),
    )
    credit = credit_of(NAMED[name], with_every_field(rollouts, 0))
    assert (credit.weight * credit.advantage)[3:].eq(0).all()
    assert (credit.weight * credit.advantage).isfinite().all()


@pytest.mark.parametrize("name", EVERY)
def test_a_batch_without_a_rollout_that_counts_has_no_weight_and_leaves_the_state(name: str):
    for count in (0, 3):
        rollouts = Rollouts(
            group=torch.zeros(count, dtype=torch.long),
            reward=torch.ones(count),
            outcome=torch.ones(count),
            mask=torch.zeros(count, 2, dtype=torch.bool),
            behavior_logp=torch.zeros(count, 2),
        )
        objective = EVERY[name]
        credit, state = assign_credit(objective, rollouts, objective.init(), torch.Generator())
        assert credit.weight.shape == credit.advantage.shape == (count, 2)
        assert (credit.weight == 0).all()
        assert (credit.advantage == 0).all()
        assert state == objective.init()


def judged(rewards: list[float], *, broken: int) -> Rollouts:
    """Returns one group whose last `broken` rollouts have no steps."""
    value = torch.tensor(rewards)
    mask = torch.ones(len(rewards), 1, dtype=torch.bool)
    mask[len(rewards) - broken :] = False
    return Rollouts(
        group=torch.zeros(len(rewards), dtype=torch.long),
        reward=value,
        outcome=value,
        mask=mask,
        behavior_logp=torch.zeros(mask.shape),
    )


def advantages(objective: Objective, rollouts: Rollouts) -> list[float]:
    values: list[float] = rollout_advantage(credit_of(objective, rollouts), rollouts).tolist()
    return values


@pytest.mark.parametrize(
    ("objective", "rewards", "broken", "expected"),
    [
        # 15 successes beside a crash have nothing to be compared with ...
        (grpo(), [1.0] * 15 + [0.0], 1, [0.0] * 16),
        # ... and beside a real failure (1 - 15/16) / sqrt(15)/16 = 1 / sqrt(15).
        (grpo(), [1.0] * 15 + [0.0, 0.0], 1, [15**-0.5] * 15 + [-(15**0.5), 0.0]),
        (grpo(), [1.0, 0.0], 1, [0.0, 0.0]),
        # The others of [1, 0], without the empty one whose reward is 1.
        (leave_one_out(), [1.0, 0.0, 1.0], 1, [1.0, -1.0, 0.0]),
        (center_by_group_mean(), [1.0, 0.0, 1.0], 1, [0.5, -0.5, 0.0]),
        (leave_one_out(), [1.0], 0, [0.0]),
        (leave_one_out(), [1.0, 3.0, 4.0], 2, [0.0, 0.0, 0.0]),
        (scale_by_group_std(ddof=1, epsilon=0.0), [2.0], 0, [0.0]),
        (scale_by_batch_std(ddof=1, epsilon=0.0), [2.0, 9.0], 1, [0.0, 0.0]),
    ],
)
def test_advantages_beside_a_broken_rollout_by_hand(
    objective: Objective, rewards: list[float], broken: int, expected: list[float]
):
    found = advantages(objective, judged(rewards, broken=broken))
    assert found == pytest.approx(expected, abs=1e-4)


def test_weights_times_advantages_of_rloo_beside_an_empty_rollout():
    """One prompt, two rollouts that count, one step each: 1/2 of +1 and of -1."""
    credit = credit_of(rloo(), judged([1.0, 0.0, 1.0], broken=1))
    assert (credit.weight * credit.advantage)[:, 0].tolist() == [0.5, -0.5, 0.0]


@given(rollouts=ragged_rollouts(), place=st.integers(0, 99), number=st.integers(1, 3))
@FEW
def test_a_broken_rollout_changes_no_batch_of_a_round(rollouts: Rollouts, place: int, number: int):
    """Which groups an update gets, and their order, are decided by the rollouts that count."""
    objective: Objective = chain(rloo())
    broken, is_old = add_broken(rollouts, place % len(rollouts.mask), 1.0, number)
    old_rows = is_old.nonzero()[:, 0]

    def planned(these: Rollouts) -> list[Any]:
        generator = torch.Generator().manual_seed(0)
        batches, _ = plan_batches(objective, these, {}, num_batches=3, generator=generator)
        return batches

    expected, found = planned(rollouts), planned(broken)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.rows, old_rows[other.rows])
        assert same(one.credit, other.credit)
