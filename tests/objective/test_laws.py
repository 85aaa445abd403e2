"""Laws that every chain keeps."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.objective.algorithms import grpo, gspo, gspo_token, rloo
from grpo.objective.base import Objective, chain, loss_terms
from grpo.types import Rollouts
from tests.objective.batches import (
    OBJECTIVES,
    credit_of,
    gradient_of,
    loss_of,
    nearby,
    ragged_rollouts,
)

FEW = settings(max_examples=25, deadline=None)
PENALIZED = {"grpo", "rloo_k2", "rloo_entropy", "translation_grpo"}  # or rewarded: entropy
WITHOUT_PENALTY = [name for name in OBJECTIVES if name not in PENALIZED]
DIMENSIONS = {"flow_grpo": 3, "awm": 3}  # a ratio per dimension has that much less gradient
OTHER_VALUE = {"cispo", "sapo", "awm"}  # not -A on-policy, with the gradient of all others
# Their ratio stops gradients: another objective's value has their gradient, or a test of its own.
DIFFERENTIABLE = {name: name for name in OBJECTIVES if name != "cispo"} | {"gspo_token": "gspo"}


@pytest.mark.parametrize("name", WITHOUT_PENALTY)
@given(rollouts=ragged_rollouts())
@FEW
def test_on_policy_loss_and_gradient_are_those_of_reinforce(name: str, rollouts: Rollouts):
    """G1: at logp = proximal, loss = -sum w A and d loss / d logp = -w A, for every chain."""
    objective = OBJECTIVES[name]
    credit = credit_of(objective, rollouts)
    logp = rollouts.behavior_logp.double()
    expected = -(credit.weight.double() * credit.advantage.double())
    if name not in OTHER_VALUE:
        torch.testing.assert_close(loss_of(objective, rollouts, logp), expected.sum())
    gradient = gradient_of(objective, rollouts, logp) * DIMENSIONS.get(name, 1)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("name", OBJECTIVES)
@given(rollouts=ragged_rollouts(), seed=st.integers(0, 999), cut=st.integers(1, 5))
@FEW
def test_microbatch_losses_add_up_to_the_batch_loss(
    name: str, rollouts: Rollouts, seed: int, cut: int
):
    """G5: uneven sizes, groups split across microbatches."""
    objective, logp = OBJECTIVES[name], nearby(rollouts, seed)
    credit = credit_of(objective, rollouts)
    order = torch.randperm(len(logp), generator=torch.Generator().manual_seed(seed))
    parts = [
        loss_of(objective, rollouts, logp, credit=credit, rows=rows, mismatch=0.1)
        for rows in (order[:cut], order[cut:])
        if len(rows)
    ]
    torch.testing.assert_close(sum(parts), loss_of(objective, rollouts, logp, mismatch=0.1))


@pytest.mark.parametrize("name", OBJECTIVES)
@given(rollouts=ragged_rollouts(), seed=st.integers(0, 999))
@FEW
def test_masked_steps_change_neither_loss_nor_gradient(name: str, rollouts: Rollouts, seed: int):
    """NaN off the mask is as good as 0."""
    objective, logp = OBJECTIVES[name], nearby(rollouts, seed)
    poisoned = torch.where(rollouts.mask, logp, torch.nan)
    clean = loss_of(objective, rollouts, logp)
    torch.testing.assert_close(loss_of(objective, rollouts, poisoned), clean)
    gradient = gradient_of(objective, rollouts, poisoned)
    assert not gradient.isnan().any()
    assert (gradient[~rollouts.mask] == 0).all()


@pytest.mark.parametrize("name", OBJECTIVES)
@given(rollouts=ragged_rollouts(), seed=st.integers(0, 999), extra=st.integers(1, 4))
@FEW
def test_padding_changes_nothing(name: str, rollouts: Rollouts, seed: int, extra: int):
    """G6: wider padding gives the same loss."""
    objective, logp = OBJECTIVES[name], nearby(rollouts, seed)
    wide = replace(
        rollouts,
        mask=torch.nn.functional.pad(rollouts.mask, (0, extra)),
        behavior_logp=torch.nn.functional.pad(rollouts.behavior_logp, (0, extra)),
    )
    padded = torch.nn.functional.pad(logp, (0, extra))
    torch.testing.assert_close(
        loss_of(objective, wide, padded, mismatch=0.1),
        loss_of(objective, rollouts, logp, mismatch=0.1),
    )


@pytest.mark.parametrize("name", WITHOUT_PENALTY)
@given(value=st.floats(-1e6, 1e6, width=32), count=st.integers(2, 9))
@FEW
def test_a_uniform_group_weighs_nothing_whatever_the_float(name: str, value: float, count: int):
    """G2: exactly 0, though the mean of equal floats need not equal them."""
    rollouts = Rollouts(
        group=torch.zeros(count, dtype=torch.long),
        reward=torch.full((count,), value),
        outcome=torch.full((count,), value),
        mask=torch.ones(count, 3, dtype=torch.bool),
        behavior_logp=torch.full((count, 3), -0.5),
    )
    credit = credit_of(OBJECTIVES[name], rollouts)
    assert (credit.advantage * credit.weight == 0).all()


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "two_grpo"])
@given(rollouts=ragged_rollouts(binary=True), scale=st.floats(0.5, 4), shift=st.floats(-3, 3))
@FEW
def test_z_scores_ignore_affine_changes_of_reward(
    name: str, rollouts: Rollouts, scale: float, shift: float
):
    moved = replace(rollouts, reward=rollouts.reward * scale + shift)
    before = credit_of(OBJECTIVES[name], rollouts).advantage
    after = credit_of(OBJECTIVES[name], moved).advantage
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
@given(rollouts=ragged_rollouts(), seed=st.integers(0, 999))
@settings(max_examples=10, deadline=None)
def test_gradients_match_finite_differences(name: str, rollouts: Rollouts, seed: int):
    """G8, away from the kinks of the clip; beyond them, see test_trust.py."""
    objective, logp = OBJECTIVES[DIFFERENTIABLE[name]], nearby(rollouts, seed, spread=1e-5)
    gradient = gradient_of(OBJECTIVES[name], rollouts, logp, mismatch=0.1)
    step = 1e-6
    for row, column in rollouts.mask.nonzero()[:6].tolist():
        moved = [logp.clone(), logp.clone()]
        moved[0][row, column] += step
        moved[1][row, column] -= step
        high, low = (loss_of(objective, rollouts, each, mismatch=0.1) for each in moved)
        numeric = float(high - low) / (2 * step)
        assert numeric == pytest.approx(float(gradient[row, column]), abs=1e-7, rel=1e-4)


@given(rollouts=ragged_rollouts(), seed=st.integers(0, 999))
@FEW
def test_gspo_and_gspo_token_agree_when_advantages_do(rollouts: Rollouts, seed: int):
    """Equal value, clipping and gradient if A_it = A_i. [Zheng et al., 2025, section 4.3]"""
    logp = nearby(rollouts, seed, spread=1e-3)
    whole, token = gspo(0.1, 0.1), gspo_token(0.1, 0.1)
    torch.testing.assert_close(loss_of(whole, rollouts, logp), loss_of(token, rollouts, logp))
    torch.testing.assert_close(
        gradient_of(whole, rollouts, logp), gradient_of(token, rollouts, logp)
    )


def test_gspo_of_one_step_is_grpo():
    """T = 1: the mean of one ratio is the ratio, bit for bit."""
    rollouts = Rollouts(
        group=torch.tensor([0, 0, 0]),
        reward=torch.tensor([1.0, 0.0, 0.5]),
        outcome=torch.tensor([1.0, 0.0, 0.5]),
        mask=torch.ones(3, 1, dtype=torch.bool),
        behavior_logp=torch.tensor([[-0.5], [-1.0], [-2.0]]),
    )
    logp = nearby(rollouts, 1)
    plain, sequence = grpo(0.2, 0.2, beta=0.0), gspo(0.2, 0.2)
    assert loss_of(plain, rollouts, logp) == loss_of(sequence, rollouts, logp)


def test_a_constant_log_ratio_gives_the_same_gspo_ratio_at_any_length():
    objective = chain(gspo(0.5, 0.5))
    mask = torch.tensor([[True, False, False], [True, True, True]])
    rollouts = Rollouts(
        group=torch.tensor([0, 0]),
        reward=torch.tensor([1.0, 0.0]),
        outcome=torch.tensor([1.0, 0.0]),
        mask=mask,
        behavior_logp=torch.full((2, 3), -1.0) * mask,
    )
    credit = credit_of(objective, rollouts)
    terms = loss_terms(
        objective,
        logp=rollouts.behavior_logp + 0.25,
        proximal_logp=rollouts.behavior_logp,
        reference_logp=None,
        credit=credit,
    )
    torch.testing.assert_close(terms.log_ratio[mask], torch.full((4,), 0.25))


@given(rollouts=ragged_rollouts(binary=True), seed=st.integers(0, 999))
@FEW
def test_dropping_uniform_groups_does_not_change_the_loss(rollouts: Rollouts, seed: int):
    """Their advantage is 0, and the normalizer was decided on the whole batch."""
    kept: Objective = rloo()
    names = [link.name for link in kept.links]
    assert "drop_uniform_groups" in names
    logp = nearby(rollouts, seed)
    credit = credit_of(kept, rollouts)
    full = replace(credit, weight=_weights_without_selection(rollouts))
    torch.testing.assert_close(
        loss_of(kept, rollouts, logp, credit=credit), loss_of(kept, rollouts, logp, credit=full)
    )


def _weights_without_selection(rollouts: Rollouts) -> torch.Tensor:
    """1 / (P G_x T_i), written out by hand."""
    weight = torch.zeros(rollouts.mask.shape)
    groups = rollouts.group.tolist()
    for row, group in enumerate(groups):
        share = len(set(groups)) * groups.count(group) * int(rollouts.mask[row].sum())
        weight[row] = rollouts.mask[row] / share
    return weight
