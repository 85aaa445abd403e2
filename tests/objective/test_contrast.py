"""GRPO of binary outcomes contrasts right with wrong rollouts, as DPO does, and pairs suffice.

["It Takes Two: Your GRPO Is Secretly DPO", 2025, arXiv 2510.00977], sections 4 and 5.
"""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from grpo.objective.algorithms import grpo, rloo, two_grpo
from grpo.types import Rollouts
from tests.objective.batches import credit_of, gradient_of, loss_of

STEPS = 6
RATES = (0.1, 0.3, 0.5, 0.7, 0.9)  # success rates of prompts


def group_of(outcomes: list[float], seed: int) -> Rollouts:
    """Returns a group with the given outcomes and random log-probs, of 1 to STEPS steps."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, STEPS + 1, (len(outcomes),), generator=generator)
    mask = torch.arange(STEPS) < lengths[:, None]
    logp = -torch.rand(mask.shape, generator=generator, dtype=torch.float64) * mask
    outcome = torch.tensor(outcomes, dtype=torch.float32)
    group = torch.zeros(len(outcomes), dtype=torch.int64)
    return Rollouts(group=group, reward=outcome, outcome=outcome, mask=mask, behavior_logp=logp)


def mean_logp(rollouts: Rollouts, logp: Tensor) -> Tensor:
    """Returns each rollout's mean log-prob per step."""
    return (logp * rollouts.mask).sum(dim=1) / rollouts.mask.sum(dim=1)


@pytest.mark.parametrize("outcomes", [[1.0, 0.0], [0, 0, 1, 0, 1], [1] * 7 + [0], [0] * 15 + [1]])
def test_the_gradient_contrasts_right_with_wrong_rollouts(outcomes: list[float]):
    """On-policy: - sqrt(p (1 - p)) (mean of right - mean of wrong), p the rate in the group."""
    rollouts = group_of(outcomes, seed=len(outcomes))
    found = gradient_of(grpo(), rollouts, rollouts.behavior_logp)
    leaf = rollouts.behavior_logp.clone().requires_grad_()
    each, right = mean_logp(rollouts, leaf), rollouts.outcome == 1
    contrast = each[right].mean() - each[~right].mean()
    rate = float(right.float().mean())
    (expected,) = torch.autograd.grad(-((rate * (1 - rate)) ** 0.5) * contrast, leaf)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-9)


def test_the_gradient_of_a_mixed_pair_is_that_of_dpo_at_its_reference_policy():
    """DPO with beta = 1 and log-probs per step; the gradient of a uniform pair is 0."""
    pair = group_of([0.0, 1.0], seed=3)
    found = gradient_of(two_grpo(), pair, pair.behavior_logp)
    leaf = pair.behavior_logp.clone().requires_grad_()
    margin = mean_logp(pair, leaf) - mean_logp(pair, pair.behavior_logp)
    (expected,) = torch.autograd.grad(-logsigmoid(margin[1] - margin[0]), leaf)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-9)
    for outcomes in ([0.0, 0.0], [1.0, 1.0]):
        uniform = group_of(outcomes, seed=3)
        assert not gradient_of(two_grpo(), uniform, uniform.behavior_logp).any()


@pytest.mark.parametrize("outcomes", [[1.0, 0.0], [1, 1]])
def test_a_pair_of_two_grpo_is_a_pair_of_rloo(outcomes: list[float]):
    pair = group_of(outcomes, seed=4)
    ours, other = credit_of(two_grpo(), pair), credit_of(rloo(), pair)
    torch.testing.assert_close(ours.advantage, other.advantage)
    torch.testing.assert_close(ours.weight, other.weight)


def variance_times_rollouts(size: int) -> float:
    """Returns the variance of RLOO's gradient in groups of `size`, times the rollouts of a batch.

    G V + m - (G - 3) / (G - 1) E[v^2], with v = p (1 - p), V its variance between prompts and m the
    mean fourth central moment of an outcome; the last two terms are G times the variance within.
    """
    signal = np.array(RATES) * (1 - np.array(RATES))
    fourth = signal * (1 - 3 * signal)
    within = fourth - (size - 3) / (size - 1) * signal**2
    return float(size * signal.var() + within.mean())


@pytest.mark.parametrize("size", [2, 4, 16])
@pytest.mark.parametrize("prompts", [8, 32])
def test_the_variance_of_the_gradient_falls_with_the_rollouts_of_a_batch(size: int, prompts: int):
    """Lemma 5.3, with its constant for one-step rollouts, whose score is outcome - p."""
    batches, rates = 4000, np.array(RATES)
    chooser = np.random.default_rng(size * prompts)
    rate = chooser.choice(rates, size=(batches, prompts, 1))
    outcome = torch.tensor(chooser.random((batches, prompts, size)) < rate).float()
    shift = torch.zeros(batches, 1, 1, dtype=torch.float64, requires_grad=True)
    logit = torch.tensor(np.log(rate / (1 - rate))) + shift
    logp = logsigmoid(torch.where(outcome == 1, logit, -logit)).reshape(-1, 1)
    rollouts = Rollouts(
        group=torch.arange(batches * prompts).repeat_interleave(size),
        reward=outcome.flatten(),
        outcome=outcome.flatten(),
        mask=torch.ones(len(logp), 1, dtype=torch.bool),
        behavior_logp=logp.detach().float(),
    )
    (gradient,) = torch.autograd.grad(loss_of(rloo(), rollouts, logp), shift)
    estimates = -batches * gradient.flatten().numpy()  # one of each batch: the loss is their mean
    mean, variance = (rates * (1 - rates)).mean(), variance_times_rollouts(size) / (prompts * size)
    error = np.std((estimates - mean) ** 2) / batches**0.5
    assert estimates.mean() == pytest.approx(mean, abs=4 * (variance / batches) ** 0.5)
    assert estimates.var() == pytest.approx(variance, abs=4 * error)


def test_pairs_have_about_the_variance_of_groups_of_sixteen_and_fours_the_least():
    found = {size: variance_times_rollouts(size) for size in (2, 4, 8, 16)}
    assert found[2] == pytest.approx(found[16], rel=0.02)
    assert min(found, key=found.__getitem__) == 4
    assert found[4] < 0.7 * found[2]
