"""The three estimators of the divergence, on an enumerated softmax."""

import pytest
import torch
from torch import Tensor

from grpo.objective.base import chain
from grpo.objective.penalty import k1, k2, k3, k3_mirrored, penalize_kl, subtract_kl_from_reward
from grpo.types import Rollouts, StepTerms
from tests.objective.batches import bare_terms, credit_of

GENERATOR = torch.Generator().manual_seed(0)
POLICY = torch.randn(6, generator=GENERATOR, dtype=torch.float64)
REFERENCE = torch.randn(6, generator=GENERATOR, dtype=torch.float64)
MASK = torch.ones(6, 1, dtype=torch.bool)


def _expected(estimator: object, logits: Tensor) -> Tensor:
    """Returns E_{a ~ pi} k(a), pi held fixed in the expectation."""
    logp = logits.log_softmax(0)
    value = estimator(logp[:, None], REFERENCE.log_softmax(0)[:, None], MASK)  # type: ignore[operator]
    return (logp.exp().detach() * value[:, 0]).sum()


def _gradient(function: object, logits: Tensor) -> Tensor:
    leaf = logits.clone().requires_grad_()
    function(leaf).backward()  # type: ignore[operator]
    assert leaf.grad is not None
    return leaf.grad


def _kl(logits: Tensor) -> Tensor:
    logp = logits.log_softmax(0)
    return (logp.exp() * (logp - REFERENCE.log_softmax(0))).sum()


def test_k1_and_k3_are_unbiased_and_k2_is_not():
    assert _expected(k1, POLICY) == pytest.approx(float(_kl(POLICY)))
    assert _expected(k3, POLICY) == pytest.approx(float(_kl(POLICY)))
    assert abs(float(_expected(k2, POLICY) - _kl(POLICY))) > 1e-3


def test_as_a_loss_k1_has_no_gradient_k2_the_reverse_and_k3_the_forward_kl():
    pi, reference = POLICY.softmax(0), REFERENCE.softmax(0)
    zero = torch.zeros(6, dtype=torch.float64)
    torch.testing.assert_close(_gradient(lambda x: _expected(k1, x), POLICY), zero)
    torch.testing.assert_close(
        _gradient(lambda x: _expected(k2, x), POLICY), _gradient(_kl, POLICY)
    )
    torch.testing.assert_close(_gradient(lambda x: _expected(k3, x), POLICY), pi - reference)


def test_mirrored_k3_is_chi_squared_minus_kl_and_its_gradient_half_of_chi_squareds():
    """sum pi^2 / ref = chi^2 + 1."""

    def chi_squared(logits: Tensor) -> Tensor:
        return (logits.softmax(0) ** 2 / REFERENCE.softmax(0)).sum() - 1

    value = _expected(k3_mirrored, POLICY)
    assert value == pytest.approx(float(chi_squared(POLICY) - _kl(POLICY)))
    torch.testing.assert_close(
        _gradient(lambda x: _expected(k3_mirrored, x), POLICY), _gradient(chi_squared, POLICY) / 2
    )


@pytest.mark.parametrize("estimator", [k1, k2, k3, k3_mirrored])
def test_estimators_are_0_off_the_mask_even_for_nan(estimator: object):
    nan = torch.full((1, 2), torch.nan, requires_grad=True)
    value = estimator(nan, torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.bool))  # type: ignore[operator]
    value.sum().backward()
    assert (value == 0).all()
    assert nan.grad is not None
    assert (nan.grad == 0).all()


def test_the_penalty_is_added_to_the_loss():
    terms = StepTerms(
        logp=torch.tensor([[0.0]]),
        log_ratio=torch.tensor([[0.0]]),
        advantage=torch.tensor([[0.0]]),
        mask=torch.tensor([[True]]),
        loss=torch.tensor([[1.0]]),
        reference_logp=torch.tensor([[2.0]]),
    )
    # k2 = 2^2 / 2 = 2
    assert penalize_kl(0.5, "k2").loss(terms).loss.item() == 2.0


def test_over_a_rollout_the_penalty_is_that_of_mean_log_probs():
    """Means -1 and -3 over two steps: d = -2, k2 = 2. The third step is padding."""
    terms = StepTerms(
        logp=torch.tensor([[0.0, -2.0, 9.0]]),
        log_ratio=torch.zeros(1, 3),
        advantage=torch.zeros(1, 3),
        mask=torch.tensor([[True, True, False]]),
        loss=torch.zeros(1, 3),
        reference_logp=torch.tensor([[-4.0, -2.0, 7.0]]),
    )
    loss = penalize_kl(0.5, "k2", over="rollout").loss(terms).loss
    assert loss.tolist() == [[1.0, 1.0, 0.0]]


@pytest.mark.parametrize("settings", [("k3", "tokens"), ("exact", "rollout")])
def test_an_unknown_or_unfit_unit_of_the_penalty_is_refused(settings: tuple[str, str]):
    with pytest.raises(ValueError, match="penalize_kl needs over in"):
        penalize_kl(0.1, *settings)


def test_a_penalty_without_reference_says_what_it_needs():
    terms = bare_terms()
    with pytest.raises(ValueError, match="reference_logp"):
        penalize_kl(0.1).loss(terms)
    assert penalize_kl(0.0).loss(terms) is terms


def test_k1_is_taken_off_the_reward():
    rollouts = Rollouts(
        group=torch.tensor([0]),
        reward=torch.tensor([1.0]),
        outcome=torch.tensor([1.0]),
        mask=torch.tensor([[True, True, False]]),
        behavior_logp=torch.tensor([[-1.0, -2.0, 0.0]]),
        reference_logp=torch.tensor([[-2.0, -4.0, 99.0]]),
    )
    # k1 = 1 + 2; 1 - 0.1 * 3
    credit = credit_of(chain(subtract_kl_from_reward(0.1)), rollouts)
    assert credit.advantage[0].tolist() == pytest.approx([0.7, 0.7, 0.0])
