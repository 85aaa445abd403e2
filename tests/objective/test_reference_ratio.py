"""The ratio to the base policy, and the loss of translation_grpo, which uses it."""

from math import exp

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo.objective.algorithms import gspo, translation_grpo
from grpo.objective.base import Objective, chain, loss_terms, scalar_loss
from grpo.objective.penalty import (
    needs_reference,
    penalize_kl,
    scores_reference_of_all,
    scores_reference_of_kept,
    subtract_kl_from_reward,
)
from grpo.objective.trust import (
    average_ratio_over_rollout,
    clip_surrogate,
    take_ratio_to_reference,
)
from grpo.types import Credit, Rollouts, StepTerms
from tests.objective.batches import bare_terms, credit_of, nearby, ragged_rollouts

FEW = settings(max_examples=12, deadline=None)


def evaluate(
    objective: Objective,
    rollouts: Rollouts,
    logp: Tensor,
    *,
    reference_logp: Tensor,
    proximal_logp: Tensor | None = None,
) -> tuple[Tensor, StepTerms, Credit]:
    """Returns loss, terms and credit of a batch, in float64."""
    given_credit = credit_of(objective, rollouts)
    credit = Credit(advantage=given_credit.advantage.double(), weight=given_credit.weight.double())
    before = logp.detach() if proximal_logp is None else proximal_logp
    terms = loss_terms(
        objective,
        logp=logp,
        proximal_logp=before,
        reference_logp=reference_logp.double(),
        credit=credit,
    )
    return scalar_loss(terms, credit), terms, credit


@given(rollouts=ragged_rollouts())
@FEW
def test_at_the_base_policy_the_ratio_is_1_and_the_loss_minus_the_mean_advantage(rollouts):
    """Which is 0; the gradient is that of REINFORCE on mean log-probs."""
    logp = rollouts.behavior_logp.double().requires_grad_()
    loss, terms, credit = evaluate(
        translation_grpo(), rollouts, logp, reference_logp=rollouts.behavior_logp
    )
    assert (terms.log_ratio == 0).all()
    assert float(loss.detach()) == pytest.approx(0.0, abs=1e-5)
    loss.backward()
    torch.testing.assert_close(logp.grad, -credit.weight * credit.advantage)


def test_the_loss_is_that_of_a_plain_loop():
    """-min(s A, clip(s) A) + beta (exp(d) - d - 1), d = log s the mean difference to the base."""
    rollouts = Rollouts(
        group=torch.zeros(3, dtype=torch.long),
        reward=torch.tensor([0.0, 1.0, 5.0]),
        outcome=torch.tensor([0.0, 1.0, 5.0]),
        mask=torch.tensor([[True, False], [True, True], [True, True]]),
        behavior_logp=torch.tensor([[-1.0, 0.0], [-1.0, -2.0], [-0.5, -0.5]]),
    )
    logp = torch.tensor([[-1.5, 9.0], [-1.0, -1.0], [-0.25, -0.25]], dtype=torch.float64)
    found, _, credit = evaluate(
        translation_grpo(beta=0.5), rollouts, logp, reference_logp=rollouts.behavior_logp
    )
    expected = 0.0
    for mean_difference, advantage in zip((-0.5, 0.5, 0.25), credit.advantage[:, 0].tolist()):
        s = exp(mean_difference)
        clipped = min(max(s, 0.8), 1.2)
        expected -= min(s * advantage, clipped * advantage) / 3
        expected += 0.5 * (s - mean_difference - 1) / 3
    assert float(found) == pytest.approx(expected)


@given(rollouts=ragged_rollouts(), shift=st.floats(-0.5, 0.5))
@FEW
def test_a_constant_log_ratio_to_the_base_gives_the_same_ratio_at_any_length(rollouts, shift):
    reference = rollouts.behavior_logp.double()
    logp = reference + shift
    _, terms, _ = evaluate(translation_grpo(), rollouts, logp, reference_logp=reference)
    torch.testing.assert_close(
        terms.log_ratio[terms.mask], torch.full_like(terms.log_ratio[terms.mask], shift)
    )


@given(rollouts=ragged_rollouts(), seed=st.integers(0, 999))
@FEW
def test_the_policy_before_the_iteration_does_not_enter_a_ratio_to_the_base(rollouts, seed):
    logp, reference = nearby(rollouts, seed), rollouts.behavior_logp
    losses = [
        evaluate(
            translation_grpo(), rollouts, logp, reference_logp=reference, proximal_logp=before
        )[0]
        for before in (logp, nearby(rollouts, seed + 1))
    ]
    assert torch.equal(*losses)


@given(rollouts=ragged_rollouts(), seed=st.integers(0, 999))
@FEW
def test_where_the_base_is_the_policy_before_the_iteration_it_is_gspo(rollouts, seed):
    logp, before = nearby(rollouts, seed), rollouts.behavior_logp.double()
    at_base = chain(take_ratio_to_reference(), gspo(0.1, 0.1))
    losses = [
        evaluate(each, rollouts, logp, reference_logp=before, proximal_logp=before)[0]
        for each in (at_base, gspo(0.1, 0.1))
    ]
    assert torch.equal(*losses)


def test_beyond_the_clip_around_the_base_nothing_is_trained_in_any_later_round():
    """What rule U28 warns of: the proximal ratio is 1, but the rollout has no gradient."""
    logp = torch.tensor([[-0.5]], requires_grad=True)
    terms = StepTerms(
        logp=logp,
        log_ratio=logp - logp.detach(),
        advantage=torch.tensor([[1.0]]),
        mask=torch.tensor([[True]]),
        loss=torch.zeros(1, 1),
        reference_logp=torch.tensor([[-1.0]]),  # a ratio of exp(0.5) = 1.65
    )
    links = (take_ratio_to_reference(), average_ratio_over_rollout(), clip_surrogate(0.2, 0.2))
    chain(*links).loss(terms).loss.sum().backward()
    assert logp.grad is not None
    assert float(logp.grad) == 0.0


def test_without_log_probs_of_the_base_the_link_says_what_it_needs():
    terms = bare_terms()
    with pytest.raises(ValueError, match="take_ratio_to_reference needs reference_logp"):
        take_ratio_to_reference().loss(terms)


def test_the_base_is_needed_by_a_ratio_to_it_and_by_a_penalty_with_weight():
    assert needs_reference(chain(take_ratio_to_reference(), clip_surrogate()))
    assert needs_reference(penalize_kl(0.1))
    assert not needs_reference(penalize_kl(0.0))
    assert not needs_reference(gspo())


@pytest.mark.parametrize(
    ("link", "of_kept", "of_all"),
    [
        (take_ratio_to_reference(), True, False),
        (penalize_kl(0.1), True, False),
        (penalize_kl(0.0), False, False),
        (chain(penalize_kl(0.1), penalize_kl(0.0, "k2")), True, False),
        (subtract_kl_from_reward(0.1), False, True),
    ],
)
def test_costs_know_which_rollouts_the_reference_scores(
    link: Objective, of_kept: bool, of_all: bool
):
    assert scores_reference_of_kept(link.links) == of_kept
    assert scores_reference_of_all(link.links) == of_all
    assert needs_reference(link) == (of_kept or of_all)
