"""Log ratios of any size: loss and gradient are finite, and within the range nothing changes."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo.objective.base import LARGEST_LOG_RATIO, Objective, loss_terms, scalar_loss
from grpo.objective.penalty import penalize_kl
from grpo.objective.trust import (
    average_clipped_log_ratio,
    clip_surrogate,
    gate_ratio_softly,
    mask_mismatched_rollouts,
    truncate_mismatch,
    truncate_ratio,
)
from grpo.training.metrics import Tally
from grpo.types import Credit, StepNoise, StepTerms
from tests.objective.every_link import EVERY

FAR = 1e4


def evaluate(
    objective: Objective, ratio: Tensor, advantage: Tensor, *, mismatch: Tensor | None = None
) -> tuple[StepTerms, Tensor, Tensor]:
    """Returns the terms, the loss and its gradient at log ratios `ratio` to all other policies."""
    logp = torch.full_like(ratio, -1.0, requires_grad=True)
    fixed = logp.detach() - ratio
    credit = Credit(advantage=advantage, weight=torch.ones_like(ratio))
    kl = (logp - fixed).square() / 2
    terms = loss_terms(
        objective,
        logp=logp,
        proximal_logp=fixed,
        reference_logp=fixed,
        behavior_logp=fixed - (ratio if mismatch is None else mismatch),
        proximal_kl=kl,
        reference_kl=kl,
        entropy=-logp,
        noise=StepNoise(*(torch.ones_like(ratio),) * 3),
        credit=credit,
    )
    loss = scalar_loss(terms, credit)
    if not loss.requires_grad:
        return terms, loss, torch.zeros_like(logp)
    (gradient,) = torch.autograd.grad(loss, logp, allow_unused=True)
    return terms, loss, torch.zeros_like(logp) if gradient is None else gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", EVERY)
def test_loss_and_gradient_are_finite_at_any_log_ratio(name: str, dtype: torch.dtype):
    """Of every link and every algorithm; what updates.csv says of the ratio too."""
    for far in (FAR, -FAR, 88.8, 710.0):
        for advantage in (1.0, -1.0, 0.0):
            ratio = torch.tensor([[far, 0.1], [-0.2, far], [far, far]], dtype=dtype)
            terms, loss, gradient = evaluate(EVERY[name], ratio, torch.full_like(ratio, advantage))
            assert loss.isfinite(), (far, advantage)
            assert gradient.isfinite().all(), (far, advantage)
            tally = Tally()
            tally.add(terms, loss, terms.logp.detach(), terms.logp.detach() - ratio)
            seen = [tally.kl, tally.ratio_min, tally.ratio_max, tally.mismatch_weight or 0.0]
            assert torch.tensor(seen).isfinite().all()


def plain_clip(ratio: Tensor, advantage: Tensor) -> Tensor:
    rho = ratio.exp()
    return -torch.minimum(rho * advantage, rho.clamp(0.8, 1.2) * advantage)


def plain_gate(ratio: Tensor, advantage: Tensor) -> Tensor:
    tau = torch.where(advantage > 0, torch.ones_like(ratio), torch.full_like(ratio, 1.05))
    return -(4 / tau * (tau * (ratio.exp() - 1)).sigmoid()) * advantage


def plain_mean(ratio: Tensor, advantage: Tensor) -> Tensor:
    bounded = torch.where(advantage > 0, ratio.clamp(max=0.4), ratio.clamp(min=-0.4))
    return -bounded.exp() * advantage


def plain_truncation(ratio: Tensor, advantage: Tensor) -> Tensor:
    logp = ratio - ratio.detach() - 1.0
    return -ratio.detach().exp().clamp(0, 5) * advantage * logp


PLAIN: dict[str, tuple[Objective, Callable[[Tensor, Tensor], Tensor]]] = {
    "clip_surrogate": (clip_surrogate(), plain_clip),
    "gate_ratio_softly": (gate_ratio_softly(), plain_gate),
    "average_clipped_log_ratio": (average_clipped_log_ratio(), plain_mean),
    "truncate_ratio": (truncate_ratio(5.0), plain_truncation),
    "k3": (penalize_kl(1.0), lambda ratio, advantage: (-ratio).exp() + ratio - 1),
}


@pytest.mark.parametrize("name", PLAIN)
@given(
    ratio=st.lists(st.floats(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO), min_size=1, max_size=6),
    advantage=st.floats(-3, 3, width=32),
)
@settings(max_examples=40, deadline=None)
def test_within_the_range_loss_and_gradient_are_those_without_a_bound(
    name: str, ratio: list[float], advantage: float
):
    """To the bit, one step per rollout; log pi = -1, so that the ratio's graph is its own."""
    objective, plain = PLAIN[name]
    column = torch.tensor(ratio, dtype=torch.float64)[:, None]
    gain = torch.full_like(column, advantage)
    terms, _, gradient = evaluate(objective, column, gain)
    exact = terms.log_ratio.detach().requires_grad_()  # as formed: -1 - (-1 - ratio)
    expected = plain(exact, gain)
    assert torch.equal(terms.loss.detach(), expected.detach())
    (slope,) = torch.autograd.grad(expected.sum(), exact)
    assert torch.equal(gradient, slope)


@given(mismatch=st.floats(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))
@settings(max_examples=40, deadline=None)
def test_within_the_range_corrections_are_those_without_a_bound(mismatch: float):
    column = torch.tensor([[mismatch]], dtype=torch.float64)
    for objective, bounded in (
        (truncate_mismatch(3.0), lambda weight: weight.clamp(max=3.0)),
        (
            mask_mismatched_rollouts(0.5, 2.0),
            lambda weight: ((weight >= 0.5) & (weight <= 2.0)).double(),
        ),
    ):
        terms, _, _ = evaluate(
            objective, torch.zeros_like(column), torch.ones_like(column), mismatch=column
        )
        assert terms.mismatch is not None
        assert torch.equal(terms.advantage, bounded(terms.mismatch.exp()))


def test_a_rollout_far_below_a_low_bound_of_the_mismatch_is_masked():
    terms, _, _ = evaluate(
        mask_mismatched_rollouts(1e-30, 2.0),
        torch.zeros(2, 1, dtype=torch.float64),
        torch.ones(2, 1, dtype=torch.float64),
        mismatch=torch.tensor([[-60.0], [-80.0]], dtype=torch.float64),
    )
    assert terms.advantage[:, 0].tolist() == [1.0, 0.0]


def test_a_penalty_far_above_the_reference_still_draws_back():
    """k3 grows without bound where the policy is surer than the reference: d = -1e4."""
    _, loss, gradient = evaluate(penalize_kl(1.0), torch.tensor([[FAR]]), torch.ones(1, 1))
    assert float(loss.detach()) == FAR - 1
    assert float(gradient) == 1
