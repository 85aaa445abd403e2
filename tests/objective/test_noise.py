"""Links for denoising steps: the ratio per dimension, and equal pushes at every noise level."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.objective.algorithms import flash_grpo, flow_grpo
from grpo.objective.base import Objective, assign_credit, loss_terms, scalar_loss
from grpo.objective.trust import scale_log_ratio
from grpo.objective.weight import rectify_noise_level
from grpo.training.metrics import Tally
from grpo.types import Credit, Rollouts, StepNoise

DIMENSIONS = 6


def one_step_rollouts(steps: list[int], scale: list[float], size: int = 4) -> Rollouts:
    """Returns groups of `size` whose only step with noise is the given one."""
    group = torch.arange(len(steps)).repeat_interleave(size)
    mask = torch.zeros(len(group), len(scale), dtype=torch.bool)
    mask[torch.arange(len(group)), torch.tensor(steps)[group]] = True
    reward = torch.arange(len(group)) % size / size
    return Rollouts(
        group=group,
        reward=reward,
        outcome=reward,
        mask=mask,
        behavior_logp=torch.zeros(mask.shape),
        noise=StepNoise(*(torch.where(mask, torch.tensor(scale), 0.0),) * 3),
    )


def credit_of(objective: Objective, rollouts: Rollouts) -> Credit:
    return assign_credit(objective, rollouts, objective.init(), torch.Generator())[0]


@given(
    scale=st.lists(st.floats(0.01, 100.0), min_size=3, max_size=3),
    steps=st.lists(st.integers(0, 2), min_size=1, max_size=6),
)
@settings(max_examples=40, deadline=None)
def test_rectified_weights_have_mean_one(scale: list[float], steps: list[int]):
    """And stand to each other as the inverse noise scales; one shared step changes nothing."""
    rollouts = one_step_rollouts(steps, scale)
    weight = credit_of(rectify_noise_level(), rollouts).weight[rollouts.mask]
    assert weight.mean() == pytest.approx(1.0, rel=1e-5)
    product = weight * rollouts.noise.scale[rollouts.mask]
    torch.testing.assert_close(product, product.mean().expand(len(product)), rtol=1e-5, atol=0)
    if len(set(steps)) == 1:
        torch.testing.assert_close(weight, torch.ones(len(weight)))


def test_at_one_shared_step_flash_is_flow():
    rollouts = one_step_rollouts([1, 1], [0.3, 0.5, 2.0])
    flash, flow = (credit_of(each(DIMENSIONS), rollouts) for each in (flash_grpo, flow_grpo))
    assert torch.equal(flash.weight, flow.weight)
    assert torch.equal(flash.advantage, flow.advantage)


def test_before_any_update_the_loss_is_the_weighted_advantage():
    """The ratio is 1; the gradient is REINFORCE's per dimension, times the rectification."""
    objective = flash_grpo(DIMENSIONS)
    rollouts = one_step_rollouts([0, 2], [0.3, 0.5, 2.0])
    credit = credit_of(objective, rollouts)
    logp = torch.randn(rollouts.mask.shape, generator=torch.Generator().manual_seed(0))
    logp = (logp * rollouts.mask).requires_grad_()
    terms = loss_terms(
        objective, logp=logp, proximal_logp=logp.detach(), reference_logp=None, credit=credit
    )
    loss = scalar_loss(terms, credit)
    loss.backward()
    expected = -(credit.weight * credit.advantage)
    assert loss.item() == pytest.approx(expected.sum().item(), abs=1e-6)
    torch.testing.assert_close(logp.grad, expected / DIMENSIONS)


def test_the_ratio_is_that_of_the_mean_over_dimensions():
    logp, proximal = torch.tensor([[-300.0]]), torch.tensor([[-306.0]])
    ones = torch.ones(1, 1)
    terms = loss_terms(
        scale_log_ratio(DIMENSIONS),
        logp=logp,
        proximal_logp=proximal,
        reference_logp=None,
        credit=Credit(advantage=ones, weight=ones),
    )
    assert terms.log_ratio.item() == pytest.approx(1.0)


def test_without_noise_levels_there_is_nothing_to_rectify():
    rollouts = one_step_rollouts([0], [1.0])
    tokens = Rollouts(
        group=rollouts.group,
        reward=rollouts.reward,
        outcome=rollouts.outcome,
        mask=rollouts.mask,
        behavior_logp=rollouts.behavior_logp,
    )
    with pytest.raises(ValueError, match="needs steps with noise"):
        credit_of(rectify_noise_level(), tokens)


def test_dimensions_are_positive():
    with pytest.raises(ValueError, match="dimensions > 0, got 0"):
        scale_log_ratio(0)


def test_the_divergence_of_an_update_is_finite_whatever_the_dimensions():
    """A log ratio of 1 000 nats over 512 dimensions is one of two per dimension."""
    ones = torch.ones(1, 1)
    terms = loss_terms(
        flow_grpo(512),
        logp=1000.0 * ones,
        proximal_logp=0.0 * ones,
        reference_logp=None,
        credit=Credit(advantage=ones, weight=ones),
    )
    tally = Tally()
    tally.add(terms, torch.zeros(()), 1000.0 * ones, 0.0 * ones)
    d = 1000 / 512
    assert tally.kl == pytest.approx(math.exp(-d) - 1 + d, rel=1e-5)
