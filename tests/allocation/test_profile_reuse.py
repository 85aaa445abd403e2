"""What training on the profile's own rollouts does to the gradient, in closed form.

A prompt is chosen by the number K of its N profile rollouts that were solved; then the same
rollouts are trained on. Given K, the estimate keeps its direction and has another length.
"""

import itertools
import math
import re
from pathlib import Path

import numpy as np
import pytest

N = 8  # rollouts of the profile
TRIVIAL, ALPHA = 0.75, 0.1  # of sGPO: drops above, keeps this share of the unsolved
LOGITS = np.array([0.3, -0.7, 0.1, -0.2])
SOLVES = np.array([1.0, 0.0, 1.0, 0.0])  # outcome by action
PAGE = Path(__file__).parents[2] / "docs" / "methods" / "profile_reuse.md"


def probabilities(rate: float) -> np.ndarray:
    """Returns P(K = 0..N) at a success rate."""
    return np.array([math.comb(N, k) * rate**k * (1 - rate) ** (N - k) for k in range(N + 1)])


def chosen() -> np.ndarray:
    """Returns how likely sGPO keeps a prompt with K of N solved."""
    rates = np.arange(N + 1) / N
    return np.where(rates > TRIVIAL, 0.0, np.where(rates == 0, ALPHA, 1.0))


def scale(count: np.ndarray, size: int) -> np.ndarray:
    """Returns E[leave-one-out estimate | K] in units of the gradient of ln(p / (1 - p))."""
    return count * (size - count) / (size * (size - 1))


def factor(rate: float) -> float:
    """Returns the mean length of a chosen prompt's estimate over that of fresh rollouts."""
    weights = probabilities(rate) * chosen()
    fresh = rate * (1 - rate)
    return float(weights @ scale(np.arange(N + 1), N) / weights.sum() / fresh)


def curse(rate: float) -> float:
    """Returns E[profile's rate | chosen]."""
    weights = probabilities(rate) * chosen()
    return float(weights @ (np.arange(N + 1) / N) / weights.sum())


def policy() -> np.ndarray:
    return np.exp(LOGITS) / np.exp(LOGITS).sum()


def estimates(rewards: np.ndarray, size: int, used: int) -> list[tuple[float, int, np.ndarray]]:
    """Returns of every group of a softmax bandit: its probability, K, and the estimate.

    Args:
      used: The first so many rollouts are trained on, leaving one out for the baseline.
    """
    pi, found = policy(), []
    for actions in itertools.product(range(len(pi)), repeat=size):
        taken = np.array(actions)
        reward = rewards[taken[:used]]
        advantage = (reward - reward.mean()) * used / (used - 1)
        gradient = advantage @ (np.eye(len(pi))[taken[:used]] - pi) / used
        found.append((float(pi[taken].prod()), int(SOLVES[taken].sum()), gradient))
    return found


def conditional_mean(groups: list[tuple[float, int, np.ndarray]], count: int) -> np.ndarray:
    among = [(weight, gradient) for weight, solved, gradient in groups if solved == count]
    return sum(weight * each for weight, each in among) / sum(weight for weight, _ in among)


def true_gradient(rewards: np.ndarray) -> np.ndarray:
    pi = policy()
    return pi * (rewards - pi @ rewards)


@pytest.mark.parametrize("used", [5, 2])
def test_a_binary_reward_keeps_its_direction_whatever_count_it_was_chosen_by(used: int):
    """E[g | K] = K (N - K) / (N (N - 1)) * grad ln(p / (1 - p)), for any size of the subset."""
    rate = float(policy() @ SOLVES)
    direction = true_gradient(SOLVES) / (rate * (1 - rate))
    groups = estimates(SOLVES, 5, used)
    for count in range(6):
        expected = scale(np.array(count), 5) * direction
        np.testing.assert_allclose(conditional_mean(groups, count), expected, atol=1e-12)


def test_the_estimate_is_unbiased_before_anything_is_chosen():
    groups = estimates(SOLVES, 4, 4)
    mean = sum(weight * gradient for weight, _, gradient in groups)
    np.testing.assert_allclose(mean, true_gradient(SOLVES), atol=1e-12)
    assert probabilities(0.3) @ scale(np.arange(N + 1), N) == pytest.approx(0.3 * 0.7)


def test_a_reward_that_is_not_binary_loses_its_direction():
    """Two of the actions fail, one of them worse: what a penalty for not finishing does."""
    shaped = np.array([1.0, 0.0, 1.0, -1.0])
    mean = conditional_mean(estimates(shaped, 4, 4), count=1)
    true = true_gradient(shaped)
    cosine = mean @ true / np.linalg.norm(mean) / np.linalg.norm(true)
    assert 0.9 < cosine < 0.995


def test_dropping_what_is_uniform_takes_nothing_from_the_sum():
    """Unsolved groups have no gradient: what they lose in number, the others gain in length."""
    rate = 0.02  # so low that no group is trivial
    weights = probabilities(rate) * chosen()
    total = weights @ scale(np.arange(N + 1), N)
    assert total == pytest.approx(rate * (1 - rate), rel=1e-6)
    assert factor(rate) == pytest.approx(1 / weights.sum(), rel=1e-6)


def test_the_numbers_of_the_page_are_the_closed_form():
    rows = re.findall(r"^\| (0\.\d+) \| (\S+) \| (\S+) \| (\S+) \|$", PAGE.read_text(), flags=re.M)
    assert len(rows) >= 5
    for rate, kept, looked, length in rows:
        p = float(rate)
        assert f"{probabilities(p) @ chosen():.2f}" == kept
        assert f"{curse(p):.2f}" == looked
        assert f"{factor(p):.2f}" == length
