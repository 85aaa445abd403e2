"""The posterior of a success rate against numeric integration, simulation and known cases."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.allocation.posterior import (
    DEAD_RATE,
    Posterior,
    Prior,
    fit_prior,
    reused_uniform_chance,
    update,
)

POINTS = 400_000


def expectation(alpha: float, beta: float, value) -> float:
    """Returns E[value(p)] by the midpoint rule in sin^2, which tames the ends of a Beta."""
    angle = (np.arange(POINTS) + 0.5) / POINTS * np.pi / 2
    rate = np.sin(angle) ** 2
    density = np.exp(
        (2 * alpha - 1) * np.log(np.sin(angle)) + (2 * beta - 1) * np.log(np.cos(angle))
    )
    return float((density * value(rate)).sum() / density.sum())


def one(alpha: float, beta: float) -> Posterior:
    return Posterior(alpha=np.array([alpha]), beta=np.array([beta]))


@given(alpha=st.floats(0.6, 12), beta=st.floats(0.6, 12), size=st.integers(2, 32))
@settings(max_examples=15, deadline=None)
def test_the_chance_of_a_uniform_group_is_the_integral_over_the_posterior(
    alpha: float, beta: float, size: int
):
    found = one(alpha, beta).uniform_chance(np.array([size]))[0]
    integral = expectation(alpha, beta, lambda p: p**size + (1 - p) ** size)
    assert found == pytest.approx(integral, rel=1e-4)


@given(alpha=st.floats(0.6, 12), beta=st.floats(0.6, 12))
@settings(max_examples=10, deadline=None)
def test_mean_variance_and_tails_are_integrals_over_the_posterior(alpha: float, beta: float):
    posterior = one(alpha, beta)
    for found, value in [
        (posterior.mean_rate(), lambda p: p),
        (posterior.outcome_variance(), lambda p: p * (1 - p)),
        (posterior.never_solved(), lambda p: p < DEAD_RATE),
        (posterior.always_solved(), lambda p: p > 1 - DEAD_RATE),
    ]:
        assert found[0] == pytest.approx(expectation(alpha, beta, value), rel=2e-3, abs=1e-6)


def test_a_group_of_two_is_mixed_with_twice_the_variance():
    """1 - p^2 - (1 - p)^2 = 2 p (1 - p)."""
    posterior = Posterior(alpha=np.array([0.4, 3.0]), beta=np.array([2.0, 0.7]))
    mixed = 1 - posterior.uniform_chance(np.array([2, 2]))
    np.testing.assert_allclose(mixed, 2 * posterior.outcome_variance())


def test_all_sizes_at_once_have_the_chances_of_each():
    chooser = np.random.default_rng(0)
    alpha, beta = np.exp(chooser.normal(0.0, 2.0, size=(2, 200)))
    posterior = Posterior(alpha=alpha, beta=beta)
    found = posterior.uniform_chances(128)
    each = [posterior.uniform_chance(np.full(200, size)) for size in range(129)]
    np.testing.assert_allclose(found, np.stack(each, axis=1), rtol=1e-10)


def test_sizes_differ_by_prompt():
    posterior = Posterior(alpha=np.array([1.0, 1.0]), beta=np.array([1.0, 1.0]))
    # E[p^G] = 1 / (G + 1) for a flat posterior.
    np.testing.assert_allclose(posterior.uniform_chance(np.array([2, 5])), [2 / 3, 2 / 6])


def test_the_prior_behind_simulated_counts_is_found():
    chooser = np.random.default_rng(0)
    prior = Prior(alpha=0.4, beta=0.9)
    rates = chooser.beta(*prior, size=40_000)
    rollouts = np.full(len(rates), 8)
    fitted = fit_prior(chooser.binomial(8, rates), rollouts)
    assert fitted.alpha == pytest.approx(prior.alpha, rel=0.05)
    assert fitted.beta == pytest.approx(prior.beta, rel=0.05)


def test_dead_prompts_are_expected_to_stay_dead():
    """Half of the prompts always, half never solved: a flat prior would call 9/(9+16) uniform."""
    successes, rollouts = np.array([0, 8] * 200), np.full(400, 8)
    posterior = update(fit_prior(successes, rollouts), successes, rollouts)
    assert posterior.uniform_chance(np.full(400, 16)).mean() > 0.98
    flat = update(Prior(1.0, 1.0), successes, rollouts)
    assert flat.uniform_chance(np.full(400, 16)).mean() == pytest.approx(9 / 25, abs=1e-3)


@pytest.mark.parametrize("solved", [0, 4, 8])
def test_counts_that_are_all_the_same_have_a_prior(solved: int):
    prior = fit_prior(np.full(20, solved), np.full(20, 8))
    assert prior.alpha > 0
    assert prior.beta > 0
    assert abs(prior.alpha / sum(prior) - solved / 8) < 0.01


def test_reused_rollouts_are_uniform_as_draws_without_replacement():
    successes, rollouts = np.array([0, 8, 4, 1]), np.full(4, 8)
    found = reused_uniform_chance(successes, rollouts, np.array([8, 8, 2, 4]))
    # 4 of 8, two drawn: (6 + 6) / 28. 1 of 8, four drawn: C(7, 4) / C(8, 4) = 35 / 70.
    np.testing.assert_allclose(found, [1, 1, 12 / 28, 0.5])
