"""What a few rollouts say of a prompt's success rate: a Beta posterior whose prior is fitted.

A profile of N = 8 calls a prompt of rate 0.1 unsolved with probability 0.43, so its rates must not
be read as they are. The prior is Beta(a, b), fitted to all prompts by marginal likelihood
(empirical Bayes), so that a profile of many dead prompts expects dead prompts.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc, betaln

Floats = NDArray[Any]
Ints = NDArray[Any]

DEAD_RATE = 0.01  # below it, or above 1 - it: a group of 16 is uniform in more than 85 %
MEANS = (0.002, 0.998)
CONCENTRATIONS = (0.02, 500.0)
TRIES = 61  # along each axis of a search
ZOOMS = 4  # each search is within the neighbors of the one before


class Prior(NamedTuple):
    """Beta(alpha, beta) over the prompts' success rates."""

    alpha: float
    beta: float


@dataclass(frozen=True, kw_only=True)
class Posterior:
    """Beta(alpha, beta) of each prompt's success rate."""

    alpha: Floats
    beta: Floats

    def select(self, rows: NDArray[np.bool_] | Ints) -> "Posterior":
        """Returns the posterior of some prompts."""
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

    def uniform_chance(self, sizes: Ints) -> Floats:
        """Returns E[p^G + (1 - p)^G]: the chance that a group of `sizes` has one outcome only."""
        return _expected_power(self.alpha, self.beta, sizes) + _expected_power(
            self.beta, self.alpha, sizes
        )

    def never_solved(self) -> Floats:
        """Returns P(p < DEAD_RATE)."""
        tail: Floats = betainc(self.alpha, self.beta, DEAD_RATE)
        return tail

    def always_solved(self) -> Floats:
        """Returns P(p > 1 - DEAD_RATE)."""
        tail: Floats = betainc(self.beta, self.alpha, DEAD_RATE)
        return tail


def fit_prior(successes: Ints, rollouts: Ints) -> Prior:
    """Returns the prior under which the counts are likeliest: a beta-binomial fit.

    Searched on a grid of means and concentrations a + b that zooms in, so that the same counts
    give the same prior everywhere.
    """
    pairs, repeats = np.unique(np.stack([successes, rollouts], axis=1), axis=0, return_counts=True)
    means, spreads = MEANS, (math.log(CONCENTRATIONS[0]), math.log(CONCENTRATIONS[1]))
    for _ in range(ZOOMS):
        mean = np.linspace(*means, TRIES)
        spread = np.linspace(*spreads, TRIES)
        alpha = mean[:, None] * np.exp(spread)
        likelihood = _log_likelihood(alpha, np.exp(spread) - alpha, pairs, repeats)
        row, column = divmod(int(likelihood.argmax()), TRIES)
        means, spreads = _around(mean, row), _around(spread, column)
    best = float(alpha[row, column])
    return Prior(alpha=best, beta=math.exp(float(spread[column])) - best)


def update(prior: Prior, successes: Ints, rollouts: Ints) -> Posterior:
    """Returns the posterior of each prompt after its rollouts."""
    return Posterior(alpha=prior.alpha + successes, beta=prior.beta + (rollouts - successes))


def reused_uniform_chance(successes: Ints, rollouts: Ints, sizes: Ints) -> Floats:
    """Returns P(one outcome only) of `sizes` of the very rollouts that were counted.

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


def _log_likelihood(alpha: Floats, beta: Floats, pairs: Ints, repeats: Ints) -> Floats:
    """Returns the beta-binomial log-likelihood of counts, without its constant."""
    total = np.zeros(np.broadcast_shapes(alpha.shape, beta.shape))
    for (solved, count), repeat in zip(pairs.tolist(), repeats.tolist(), strict=True):
        total += repeat * (betaln(alpha + solved, beta + count - solved) - betaln(alpha, beta))
    return total


def _around(grid: Floats, index: int) -> tuple[float, float]:
    """Returns the neighbors of a point of a grid, or its end."""
    return float(grid[max(index - 1, 0)]), float(grid[min(index + 1, len(grid) - 1)])
