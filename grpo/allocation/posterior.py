"""Beta posteriors of success rates, given a few rollouts per prompt and a fitted prior.

With N = 8 rollouts, a prompt of rate 0.1 has no success with probability 0.43, so observed rates
are unreliable. The prior Beta(a, b) is fitted to all prompts by marginal likelihood (empirical
Bayes): if many prompts are dead, the posterior assumes that more are.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc, betaln, gammaln

Floats = NDArray[Any]
Ints = NDArray[Any]

DEAD_RATE = 0.01  # within it of 0 or 1, a group of 16 is uniform with probability > 85 %
MEANS = (0.002, 0.998)
CONCENTRATIONS = (0.02, 500.0)
TRIES = 61  # grid points per axis and search
ZOOMS = 4  # searches; each covers the neighbors of the previous best point


class Prior(NamedTuple):
    """Parameters of Beta(alpha, beta) over success rates of prompts."""

    alpha: float
    beta: float


@dataclass(frozen=True, kw_only=True)
class Posterior:
    """Parameters of Beta(alpha, beta) of the success rate of each prompt."""

    alpha: Floats
    beta: Floats

    def select(self, rows: NDArray[np.bool_] | Ints) -> "Posterior":
        """Returns the posterior of the given rows."""
        return Posterior(alpha=self.alpha[rows], beta=self.beta[rows])

    def mean_rate(self) -> Floats:
        """Returns E[p]."""
        rate: Floats = self.alpha / (self.alpha + self.beta)
        return rate

    def outcome_variance(self) -> Floats:
        """Returns E[p (1 - p)] = ab / ((a + b) (a + b + 1))."""
        total = self.alpha + self.beta
        variance: Floats = self.alpha * self.beta / (total * (total + 1))
        return variance

    def outcome_variance_deviation(self) -> Floats:
        """Returns the standard deviation of p (1 - p)."""
        mean, total = self.outcome_variance(), self.alpha + self.beta
        square = mean * (self.alpha + 1) * (self.beta + 1) / ((total + 2) * (total + 3))
        deviation: Floats = np.sqrt(np.maximum(square - mean**2, 0.0))
        return deviation

    def draw(self, chooser: np.random.Generator) -> Floats:
        """Returns one draw of each rate."""
        rates: Floats = chooser.beta(self.alpha, self.beta)
        return rates

    def uniform_chance(self, sizes: Ints) -> Floats:
        """Returns E[p^G + (1 - p)^G], the probability that a group of G = `sizes` is uniform."""
        return _expected_power(self.alpha, self.beta, sizes) + _expected_power(
            self.beta, self.alpha, sizes
        )

    def uniform_chances(self, largest: int) -> Floats:
        """Returns `uniform_chance` of each rate (row) and every group size up to `largest`.

        By E[p^G] = prod (a + i) / (a + b + i) over i < G, so that all sizes take one pass.
        """
        drawn = np.arange(largest)
        total = (self.alpha + self.beta)[:, None] + drawn

        def powers(shape: Floats) -> Floats:
            ratios = (shape[:, None] + drawn) / total
            found: Floats = np.cumprod(np.insert(ratios, 0, 1.0, axis=1), axis=1)
            return found

        return powers(self.alpha) + powers(self.beta)

    def never_solved(self) -> Floats:
        """Returns P(p < DEAD_RATE)."""
        tail: Floats = betainc(self.alpha, self.beta, DEAD_RATE)
        return tail

    def always_solved(self) -> Floats:
        """Returns P(p > 1 - DEAD_RATE)."""
        tail: Floats = betainc(self.beta, self.alpha, DEAD_RATE)
        return tail


def fit_prior(successes: Ints, rollouts: Ints) -> Prior:
    """Returns the beta-binomial maximum-likelihood prior of the counts.

    The search refines a grid of means a / (a + b) and concentrations a + b, so that the same
    counts give the same prior on every machine.
    """
    counted = [
        np.unique(each, return_counts=True) for each in (successes, rollouts - successes, rollouts)
    ]
    means, spreads = MEANS, (math.log(CONCENTRATIONS[0]), math.log(CONCENTRATIONS[1]))
    for _ in range(ZOOMS):
        mean = np.linspace(*means, TRIES)
        spread = np.linspace(*spreads, TRIES)
        concentration = np.exp(spread)
        alpha = mean[:, None] * concentration
        likelihood = _log_likelihood(alpha, concentration, *counted)
        row, column = divmod(int(likelihood.argmax()), TRIES)
        means, spreads = _around(mean, row), _around(spread, column)
    best = float(alpha[row, column])
    return Prior(alpha=best, beta=math.exp(float(spread[column])) - best)


def update(prior: Prior, successes: Ints, rollouts: Ints) -> Posterior:
    """Returns the posterior of each prompt given the counts of its rollouts."""
    return Posterior(alpha=prior.alpha + successes, beta=prior.beta + (rollouts - successes))


def reused_uniform_chance(successes: Ints, rollouts: Ints, sizes: Ints) -> Floats:
    """Returns the probability that G = `sizes` of the counted rollouts have equal outcomes.

    Hypergeometric: (C(s, G) + C(N - s, G)) / C(N, G).
    """
    chances = [
        (math.comb(s, size) + math.comb(n - s, size)) / math.comb(n, size)
        for s, n, size in zip(successes.tolist(), rollouts.tolist(), sizes.tolist(), strict=True)
    ]
    return np.array(chances, dtype=np.float64)


def _expected_power(alpha: Floats, beta: Floats, powers: Ints) -> Floats:
    """Returns E[p^G] = B(a + G, b) / B(a, b)."""
    power: Floats = np.exp(betaln(alpha + powers, beta) - betaln(alpha, beta))
    return power


def _log_likelihood(
    alpha: Floats,
    concentration: Floats,
    successes: tuple[Ints, Ints],
    failures: tuple[Ints, Ints],
    rollouts: tuple[Ints, Ints],
) -> Floats:
    """Returns the beta-binomial log-likelihood of the counts up to a constant.

    Args:
      concentration: alpha + beta.
      successes: The distinct numbers of a prompt's successes, and how many prompts have each; so
        for failures and rollouts. The likelihood is a sum of terms of one of the three.
    """
    beta = concentration - alpha
    total: Floats = -int(rollouts[1].sum()) * betaln(alpha, beta)
    for parameter, (values, repeats), sign in (
        (alpha, successes, 1),
        (beta, failures, 1),
        (concentration, rollouts, -1),
    ):
        for value, repeat in zip(values.tolist(), repeats.tolist(), strict=True):
            total = total + sign * repeat * gammaln(parameter + value)
    return total


def _around(grid: Floats, index: int) -> tuple[float, float]:
    """Returns the grid points before and after `index`, limited to the grid."""
    return float(grid[max(index - 1, 0)]), float(grid[min(index + 1, len(grid) - 1)])
