"""Trust regions: their formulas in plain loops, their gradients, and how they reduce to others."""

from collections.abc import Callable
from math import exp, log
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo.objective.algorithms import cispo, dapo, gspo, luspo, sapo
from grpo.objective.base import Objective
from grpo.objective.trust import (
    HALVED,
    average_clipped_log_ratio,
    average_ratio_over_rollout,
    clip_surrogate,
    gate_ratio_softly,
    truncate_ratio,
    trusted_ranges,
)
from grpo.types import Rollouts, StepTerms
from tests.objective.batches import gradient_of, loss_of, nearby, ragged_rollouts

FEW = settings(max_examples=12, deadline=None)
REGIONS: dict[str, Objective] = {
    "clip_surrogate": clip_surrogate(0.2, 0.28),
    "truncate_ratio": truncate_ratio(1.5, 0.6),
    "gate_ratio_softly": gate_ratio_softly(1.0, 1.05),
    "average_clipped_log_ratio": average_clipped_log_ratio(0.3, 0.4),
}


def terms_of(log_ratio: Tensor, advantage: Tensor, mask: Tensor | None = None) -> StepTerms:
    """Returns terms before any link; the policy moved by `log_ratio` from logp -1."""
    mask = torch.ones_like(log_ratio, dtype=torch.bool) if mask is None else mask
    return StepTerms(
        logp=log_ratio - 1.0,
        log_ratio=log_ratio,
        advantage=advantage,
        mask=mask,
        loss=torch.zeros_like(log_ratio),
    )


def drawn(seed: int, spread: float = 0.6) -> tuple[Tensor, Tensor]:
    """Returns log ratios well beyond every bound, and advantages of both signs and 0."""
    generator = torch.Generator().manual_seed(seed)
    log_ratio = spread * torch.randn(5, 4, generator=generator, dtype=torch.float64)
    advantage = torch.randn(5, 1, generator=generator, dtype=torch.float64)
    advantage[0] = 0.0
    return log_ratio, advantage.expand(5, 4).clone()


def clip_by_hand(row: list[float], t: int, gain: float) -> tuple[float, bool]:
    ratio = exp(row[t])
    kept = ratio * gain
    if gain > 0 and ratio > 1.28:
        return -1.28 * gain, True
    if gain < 0 and ratio < 0.8:
        return -0.8 * gain, True
    return -kept, False


def truncation_by_hand(row: list[float], t: int, gain: float) -> tuple[float, bool]:
    ratio = exp(row[t])
    bounded = 1.5 if ratio > 1.5 else 0.6 if ratio < 0.6 else ratio
    return -bounded * gain * (row[t] - 1.0), bounded != ratio


def gate_by_hand(row: list[float], t: int, gain: float) -> tuple[float, bool]:
    tau = 1.0 if gain > 0 else 1.05
    passed = 1 / (1 + exp(-tau * (exp(row[t]) - 1)))
    return -4 / tau * passed * gain, 4 * passed * (1 - passed) < 0.5


def geometric_mean_by_hand(row: list[float], t: int, gain: float) -> tuple[float, bool]:
    """sgn(A) min(sgn(A) l, sgn(A) clip(l)), as the paper writes it."""
    sign = (gain > 0) - (gain < 0)
    bounded = [
        sign * min(sign * each, sign * min(max(each, -0.3), 0.4)) if sign else 0.0 for each in row
    ]
    mean = sum(bounded) / len(bounded)
    return -gain * exp(mean), sign != 0 and bounded[t] != row[t]


BY_HAND: dict[str, Callable[[list[float], int, float], tuple[float, bool]]] = {
    "clip_surrogate": clip_by_hand,
    "truncate_ratio": truncation_by_hand,
    "gate_ratio_softly": gate_by_hand,
    "average_clipped_log_ratio": geometric_mean_by_hand,
}


@pytest.mark.parametrize("name", REGIONS)
@given(seed=st.integers(0, 999))
@FEW
def test_loss_and_clipped_steps_are_those_of_a_plain_loop(name: str, seed: int):
    log_ratio, advantage = drawn(seed)
    after = REGIONS[name].loss(terms_of(log_ratio, advantage))
    assert after.clipped is not None
    for i, row in enumerate(log_ratio.tolist()):
        for t in range(len(row)):
            loss, clipped = BY_HAND[name](row, t, float(advantage[i, t]))
            assert float(after.loss[i, t]) == pytest.approx(loss, rel=1e-12)
            assert bool(after.clipped[i, t]) == clipped


def slope(objective: Objective, log_ratio: Tensor, advantage: Tensor) -> Tensor:
    """Returns d sum(loss) / d log ratio."""
    leaf = log_ratio.clone().requires_grad_()
    objective.loss(terms_of(leaf, advantage)).loss.sum().backward()
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("name", [name for name in REGIONS if name != "truncate_ratio"])
@given(seed=st.integers(0, 999))
@FEW
def test_gradients_match_finite_differences_beyond_the_bounds(name: str, seed: int):
    """G8 at ratios from a third to three; steps that land on a kink are moved off it."""
    log_ratio, advantage = drawn(seed)
    for kink in (log(0.8), log(1.28), -0.3, 0.4):
        log_ratio = torch.where((log_ratio - kink).abs() < 1e-4, log_ratio + 1e-3, log_ratio)
    objective, step = REGIONS[name], 1e-6
    analytic = slope(objective, log_ratio, advantage)
    for i, t in [(0, 0), (1, 1), (2, 3), (3, 0), (4, 2)]:
        moved = [log_ratio.clone(), log_ratio.clone()]
        moved[0][i, t] += step
        moved[1][i, t] -= step
        high, low = (objective.loss(terms_of(each, advantage)).loss.sum() for each in moved)
        numeric = float(high - low) / (2 * step)
        assert numeric == pytest.approx(float(analytic[i, t]), abs=1e-8, rel=1e-6)


@given(seed=st.integers(0, 999))
@FEW
def test_the_truncated_weight_is_a_constant_of_the_gradient(seed: int):
    """CISPO's loss is sg[w] A log pi: its gradient is w A, however far the ratio has gone."""
    log_ratio, advantage = drawn(seed)
    expected = -log_ratio.exp().clamp(0.6, 1.5) * advantage
    torch.testing.assert_close(slope(REGIONS["truncate_ratio"], log_ratio, advantage), expected)


def test_no_step_loses_its_gradient_under_truncation_but_does_under_the_clip():
    log_ratio, advantage = torch.tensor([[2.0, -2.0]]), torch.tensor([[1.0, -1.0]])
    assert (slope(REGIONS["clip_surrogate"], log_ratio, advantage) == 0).all()
    assert (slope(REGIONS["truncate_ratio"], log_ratio, advantage) != 0).all()


@given(rollouts=ragged_rollouts(), seed=st.integers(0, 999))
@FEW
def test_within_its_bounds_truncation_has_the_gradient_of_the_ratio(rollouts: Rollouts, seed: int):
    """G4: nothing truncated, nothing clipped: CISPO is DAPO without its filter."""
    logp = nearby(rollouts, seed)
    torch.testing.assert_close(
        gradient_of(cispo(ratio_max=1e9), rollouts, logp),
        gradient_of(dapo(low=0.999999, high=1e9), rollouts, logp),
    )


def test_the_slope_of_the_soft_gate_is_1_at_1_and_a_half_where_it_counts_as_clipped():
    """4 s (1 - s), s = sigmoid(tau (rho - 1)): d loss / d rho in units of -A."""
    advantage = torch.tensor([[1.0, 1.0, -1.0]], dtype=torch.float64)
    ratio = torch.tensor([[1.0, 1 + HALVED, 1 + HALVED / 1.05]], dtype=torch.float64)
    by_ratio = slope(REGIONS["gate_ratio_softly"], ratio.log(), advantage) / ratio
    torch.testing.assert_close(by_ratio, -advantage * torch.tensor([[1.0, 0.5, 0.5]]).double())


@given(seed=st.integers(0, 999))
@FEW
def test_the_geometric_mean_without_bounds_is_the_ratio_of_the_rollout(seed: int):
    """G4: exp(mean log rho) A, as GSPO has it where it does not clip."""
    log_ratio, advantage = drawn(seed)
    before = terms_of(log_ratio, advantage)
    mean = average_ratio_over_rollout().loss(before)
    torch.testing.assert_close(
        average_clipped_log_ratio(1e9, 1e9).loss(before).loss, -mean.log_ratio.exp() * advantage
    )


@given(seed=st.integers(0, 999))
@FEW
def test_the_geometric_mean_of_one_step_is_the_clip_in_log_space(seed: int):
    """G4: at T = 1, clip_surrogate with bounds exp(-0.3) and exp(0.4)."""
    log_ratio, advantage = (each[:, :1] for each in drawn(seed))
    clip = clip_surrogate(low=1 - exp(-0.3), high=exp(0.4) - 1)
    first, second = (
        each.loss(terms_of(log_ratio, advantage))
        for each in (REGIONS["average_clipped_log_ratio"], clip)
    )
    torch.testing.assert_close(first.loss, second.loss)
    assert torch.equal(first.clipped, second.clipped)


def test_one_outlier_is_clipped_before_the_mean_and_not_after():
    """GMPO keeps the other steps of a rollout in which one ratio ran away; GSPO's clip drops all.

    log ratios 4, 0, 0, 0: clipped to 0.4 their mean is 0.1, else 1.
    """
    log_ratio, advantage = torch.tensor([[4.0, 0.0, 0.0, 0.0]]), torch.ones(1, 4)
    after = REGIONS["average_clipped_log_ratio"].loss(terms_of(log_ratio, advantage))
    torch.testing.assert_close(after.loss, torch.full((1, 4), -exp(0.1)))
    assert after.clipped.tolist() == [[True, False, False, False]]  # type: ignore[union-attr]
    after = clip_surrogate(0.4, 0.4).loss(
        average_ratio_over_rollout().loss(terms_of(log_ratio, advantage))
    )
    assert after.clipped.tolist() == [[True] * 4]  # type: ignore[union-attr]


@given(rollouts=ragged_rollouts(), seed=st.integers(0, 999))
@FEW
def test_luspo_is_gspo_times_the_length(rollouts: Rollouts, seed: int):
    """Rollout by rollout: the gradient of log pi_i times T_i, under the same clip."""
    logp = nearby(rollouts, seed, spread=1e-3)
    length = rollouts.mask.sum(dim=1, keepdim=True)
    torch.testing.assert_close(
        gradient_of(luspo(0.1, 0.1), rollouts, logp),
        gradient_of(gspo(0.1, 0.1), rollouts, logp) * length,
    )


def test_cispo_on_policy_has_the_gradient_of_dapo_and_not_a_fifth_of_it():
    """The trap of a bound that is read as a distance from 1: 0.2 would be a ratio of 0.2."""
    rollouts = Rollouts(
        group=torch.tensor([0, 0]),
        reward=torch.tensor([1.0, 0.0]),
        outcome=torch.tensor([1.0, 0.0]),
        mask=torch.ones(2, 3, dtype=torch.bool),
        behavior_logp=torch.full((2, 3), -0.7),
    )
    logp = rollouts.behavior_logp.double()
    torch.testing.assert_close(
        gradient_of(cispo(), rollouts, logp), gradient_of(dapo(), rollouts, logp)
    )
    with pytest.raises(ValueError, match=r"U13: .*ratio_max > 1"):
        cispo(ratio_max=0.2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: truncate_ratio(1.0), "U13"),
        (lambda: truncate_ratio(5.0, ratio_min=1.0), "ratio_min < 1"),
        (lambda: truncate_ratio(5.0, ratio_min=-0.1), "0 <= ratio_min"),
        (lambda: gate_ratio_softly(0.0, 1.0), "positive taus"),
        (lambda: gate_ratio_softly(1.0, -1.0), "positive taus"),
        (lambda: average_clipped_log_ratio(0.0, 0.4), "low > 0"),
        (lambda: average_clipped_log_ratio(0.4, 0.0), "high > 0"),
        (lambda: clip_surrogate(1.0, 0.2), "low < 1"),
    ],
)
def test_wrong_settings_are_refused(make: Callable[[], Any], message: str):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("region", "expected"),
    [
        (clip_surrogate(0.2, 0.28), 0.2),
        (truncate_ratio(5.0), log(5)),
        (truncate_ratio(5.0, 0.5), log(2)),
        (gate_ratio_softly(1.0, 1.05), log(1 + HALVED / 1.05)),
        (average_clipped_log_ratio(0.3, 0.4), 0.3),
    ],
)
def test_a_region_answers_beyond_its_range_and_not_before(region: Objective, expected: float):
    """U27 asks for a drift below a third of that range."""
    (trusted,) = trusted_ranges(region).values()
    assert trusted == pytest.approx(expected)

    def answers(distance: float) -> bool:
        log_ratio = torch.tensor([[distance], [distance], [-distance], [-distance]])
        advantage = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
        clipped = region.loss(terms_of(log_ratio, advantage)).clipped
        assert clipped is not None
        return bool(clipped.any())

    assert answers(1.2 * trusted)
    assert not answers(0.5 * trusted)


def test_a_loss_far_from_the_start_stays_finite_where_a_region_bounds_it():
    """8 nats: a ratio of 3000."""
    log_ratio = torch.tensor([[8.0, -8.0]])
    for region in REGIONS.values():
        loss = region.loss(terms_of(log_ratio, torch.ones(1, 2))).loss
        assert float(loss.abs().max()) < 20


def test_the_loss_of_a_region_is_added_to_what_is_there():
    before = terms_of(torch.zeros(1, 2), torch.ones(1, 2)).with_loss(torch.full((1, 2), 7.0))
    for region in REGIONS.values():
        fresh = region.loss(terms_of(torch.zeros(1, 2), torch.ones(1, 2)))
        torch.testing.assert_close(region.loss(before).loss, 7.0 + fresh.loss)


def test_sapo_adds_the_same_constant_for_both_signs_only_if_the_taus_agree():
    """On-policy the loss is -(2 / tau) A: a value to plot, not to compare across algorithms."""
    rollouts = Rollouts(
        group=torch.tensor([0, 0]),
        reward=torch.tensor([1.0, 0.0]),
        outcome=torch.tensor([1.0, 0.0]),
        mask=torch.ones(2, 1, dtype=torch.bool),
        behavior_logp=torch.full((2, 1), -0.7),
    )
    logp = rollouts.behavior_logp.double()
    # A = +1 and -1, weight 1/2 each: -(2/1.0) / 2 + (2/1.05) / 2
    expected = -1.0 + 1 / 1.05
    assert float(loss_of(sapo(), rollouts, logp)) == pytest.approx(expected, abs=1e-5)
