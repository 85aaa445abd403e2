"""Corrections of a sampler that is not the trainer: identity without mismatch, plain loops."""

from math import exp

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo.objective.algorithms import grpo, gspo, rloo
from grpo.objective.base import Objective, chain, loss_terms
from grpo.objective.penalty import penalize_kl
from grpo.objective.trust import (
    mask_mismatched_rollouts,
    truncate_mismatch,
)
from grpo.types import Credit, Rollouts, StepTerms
from tests.objective.batches import bare_terms, gradient_of, loss_of, nearby, ragged_rollouts

FEW = settings(max_examples=10, deadline=None)
EVERY: dict[str, Objective] = {
    "truncate_mismatch": truncate_mismatch(2.0),
    "mask_mismatched_rollouts": mask_mismatched_rollouts(0.5, 2.0),
    "geometric_mean": mask_mismatched_rollouts(0.999, 1.001, over="geometric_mean"),
}
# log(pi_old / mu): small, one step far above; far below; small but all to one side.
MISMATCH = torch.tensor([[0.1, 1.2, 0.0], [0.0, -0.9, -0.1], [0.3, 0.3, 0.3], [0.3, 0.0, 0.0]])
MASK = torch.tensor([[True] * 3, [True] * 3, [True] * 3, [True, False, False]])


def terms_at(objective: Objective, mismatch: Tensor = MISMATCH) -> StepTerms:
    """Returns the terms of rollouts with advantages 1, 2, 3 and 4, on-policy for the trainer."""
    logp = torch.full(mismatch.shape, -1.5)
    advantage = torch.arange(1.0, len(mismatch) + 1)[:, None].expand(mismatch.shape)
    return loss_terms(
        objective,
        logp=logp,
        proximal_logp=logp,
        reference_logp=logp - 0.5,
        behavior_logp=logp - mismatch,
        credit=Credit(advantage=advantage, weight=MASK.float()),
    )


@pytest.mark.parametrize("name", EVERY)
@given(rollouts=ragged_rollouts(), seed=st.integers(0, 999))
@FEW
def test_without_mismatch_nothing_changes_to_the_last_bit(name: str, rollouts: Rollouts, seed: int):
    """mu = pi_old: every weight is 1."""
    logp = nearby(rollouts, seed)
    for plain in (rloo(), gspo(0.1, 0.1)):
        corrected = chain(EVERY[name], plain)
        assert torch.equal(loss_of(corrected, rollouts, logp), loss_of(plain, rollouts, logp))
        assert torch.equal(
            gradient_of(corrected, rollouts, logp), gradient_of(plain, rollouts, logp)
        )


def test_truncated_weights_are_those_of_a_plain_loop():
    after = terms_at(truncate_mismatch(2.0))
    for i, row in enumerate(MISMATCH.tolist()):
        for t, mismatch in enumerate(row):
            expected = min(exp(mismatch), 2.0) * (i + 1) if MASK[i, t] else 0.0
            assert float(after.advantage[i, t]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("objective", "kept"),
    [
        # products exp(1.3), exp(-1.0), exp(0.9), exp(0.3), the masked steps not counted
        (mask_mismatched_rollouts(0.5, 2.0), [False, False, False, True]),
        (mask_mismatched_rollouts(0.5, 2.5), [False, False, True, True]),
        (mask_mismatched_rollouts(0.3, 2.0), [False, True, False, True]),
        # geometric means exp(1.3/3), exp(-1/3), exp(0.3), exp(0.3)
        (mask_mismatched_rollouts(0.7, 1.4, over="geometric_mean"), [False, True, True, True]),
        (mask_mismatched_rollouts(0.7, 1.3, over="geometric_mean"), [False, True, False, False]),
    ],
)
def test_rollouts_beyond_the_bounds_have_no_advantage(objective: Objective, kept: list[bool]):
    after, weights = terms_at(objective), torch.tensor(kept).float()
    assert torch.equal(after.advantage[:, 0], weights * torch.arange(1.0, 5.0))
    assert after.mismatch_weight is not None
    assert torch.equal(after.mismatch_weight[:, 0], weights)


@given(rollouts=ragged_rollouts(), seed=st.integers(0, 999))
@FEW
def test_a_weight_scales_the_gradient_and_has_none_itself(rollouts: Rollouts, seed: int):
    """sum w Psi: on ratios by step, the gradient of a step is its weight times the plain one."""
    logp, mismatch = nearby(rollouts, seed), 0.3
    weight = (rollouts.behavior_logp.double() * mismatch).exp().clamp(max=2.0)
    torch.testing.assert_close(
        gradient_of(chain(truncate_mismatch(2.0), rloo()), rollouts, logp, mismatch=mismatch),
        gradient_of(rloo(), rollouts, logp) * weight,
    )


def test_corrections_multiply_whatever_their_order():
    both = terms_at(chain(truncate_mismatch(1.2), mask_mismatched_rollouts(0.5, 2.0)))
    turned = terms_at(chain(mask_mismatched_rollouts(0.5, 2.0), truncate_mismatch(1.2)))
    assert both.mismatch_weight is not None
    assert turned.mismatch_weight is not None
    assert torch.equal(both.mismatch_weight, turned.mismatch_weight)
    assert both.mismatch_weight[:, 0].tolist() == pytest.approx([0.0, 0.0, 0.0, 1.2])


def test_a_penalty_keeps_its_weight():
    """A masked rollout still counts for the divergence: only the advantage is weighed."""
    link = mask_mismatched_rollouts(0.5, 2.0)
    for penalized in (chain(link, penalize_kl(0.1, "k2")), penalize_kl(0.1, "k2")):
        # k2 = 0.5^2 / 2, times 0.1
        torch.testing.assert_close(terms_at(penalized).loss, 0.0125 * MASK)


def test_an_unbounded_weight_makes_the_surrogate_unbiased_for_one_step():
    """E_mu[w A] = E_pi_old[A] on an enumerated softmax; truncated, it is below."""
    generator = torch.Generator().manual_seed(0)
    trainer, sampler, gain = torch.rand(3, 6, generator=generator, dtype=torch.float64)
    trainer, sampler = trainer.softmax(0), (3 * sampler).softmax(0)
    expected = float(trainer @ gain)
    values = {}
    for weight_max in (1e9, 1.0):
        terms = StepTerms(
            logp=trainer.log()[:, None],
            log_ratio=torch.zeros(6, 1).double(),
            advantage=gain[:, None],
            mask=torch.ones(6, 1, dtype=torch.bool),
            loss=torch.zeros(6, 1).double(),
            mismatch=(trainer / sampler).log()[:, None],
        )
        weighed = truncate_mismatch(weight_max).loss(terms).advantage[:, 0]
        values[weight_max] = float(sampler @ weighed)
    assert values[1e9] == pytest.approx(expected)
    assert values[1.0] < expected


@pytest.mark.parametrize("name", ["truncate_mismatch", "mask_mismatched_rollouts"])
def test_a_correction_without_the_samplers_log_probs_says_what_it_needs(name: str):
    terms = bare_terms()
    with pytest.raises(ValueError, match=f"{name} needs behavior_logp"):
        EVERY[name].loss(terms)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: truncate_mismatch(0.9), "weight_max >= 1"),
        (lambda: mask_mismatched_rollouts(0.0, 2.0), "0 < low < 1 < high"),
        (lambda: mask_mismatched_rollouts(0.5, 1.0), "0 < low < 1 < high"),
        (lambda: mask_mismatched_rollouts(0.5, 2.0, over="sum"), "over in"),
    ],
)
def test_wrong_settings_are_refused(make: object, message: str):
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


def test_behind_the_trust_region_a_correction_would_change_nothing():
    """Why rule H4 is an error and not a matter of taste."""
    late = terms_at(chain(grpo(beta=0.0), mask_mismatched_rollouts(0.5, 2.0)))
    assert torch.equal(late.loss, terms_at(grpo(beta=0.0)).loss)
