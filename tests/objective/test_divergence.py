"""Links that read exact divergences of Gaussian steps, against their papers' own formulas."""

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from grpo.objective.algorithms import diffusion_nft, grpo
from grpo.objective.base import Objective, assign_credit, chain, loss_terms, scalar_loss
from grpo.objective.penalty import needs_divergence, penalize_kl
from grpo.objective.trust import contrast_implicit_policies, normalize_log_ratio, scale_log_ratio
from grpo.objective.weight import weigh_by_noise_std
from grpo.training.frozen import FrozenLogProbs, divergence, merge_log_probs
from grpo.types import Credit, Rollouts, StepLogProbs, StepNoise

DIMENSIONS = 12
ROWS = 5
ADVANTAGE = torch.tensor([2.0, -1.5, 0.3, 9.0, -9.0], dtype=torch.float64)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def scored(mean: Tensor, after: Tensor, std: Tensor) -> StepLogProbs:
    """Returns what a policy with these means makes of `after`: one step per rollout."""
    logp = Normal(mean, std[:, None]).log_prob(after).sum(dim=1, keepdim=True)
    return StepLogProbs(logp=logp, mean=mean / std[:, None])


def terms_of(
    objective: Objective,
    now: StepLogProbs,
    old: StepLogProbs,
    advantage: Tensor,
    noise: StepNoise | None,
):
    """Returns terms and credit of one step per rollout, each of weight 1."""
    needed = torch.ones(len(advantage), 1, dtype=torch.bool)
    credit = Credit(advantage=advantage[:, None], weight=needed.double())
    kl = divergence(now, old, needed)
    terms = loss_terms(
        objective,
        logp=now.logp,
        proximal_logp=old.logp,
        reference_logp=old.logp,
        proximal_kl=kl,
        reference_kl=kl,
        noise=noise,
        credit=credit,
    )
    return terms, credit


def test_the_divergence_is_that_of_two_gaussians():
    std = draw(0, ROWS).exp()
    first, second = draw(1, ROWS, DIMENSIONS), draw(2, ROWS, DIMENSIONS)
    needed = torch.ones(ROWS, 1, dtype=torch.bool)
    ours = divergence(scored(first, first, std), scored(second, first, std), needed)
    wide = std[:, None]
    expected = kl_divergence(Normal(first, wide), Normal(second, wide)).sum(dim=1, keepdim=True)
    torch.testing.assert_close(ours, expected)


def test_without_means_there_is_no_divergence():
    some = torch.ones(2, 1, dtype=torch.bool)
    scores = StepLogProbs(logp=torch.zeros(2, 1))
    assert divergence(scores, scores, some) is None
    with pytest.raises(ValueError, match="needs exact divergences"):
        terms_of(diffusion_nft(4), scores, scores, torch.ones(2), None)


@pytest.mark.parametrize("beta", [0.1, 0.5, 1.0])
def test_contrast_is_the_loss_of_two_implicit_policies(beta: float):
    """r |v+ - u|^2 + (1 - r) |v- - u|^2, as printed: one gradient, one loss but for a constant."""
    old, target = draw(1, ROWS, DIMENSIONS), draw(2, ROWS, DIMENSIONS)
    one = torch.ones(ROWS, dtype=torch.float64)
    clip, losses, gradients = 5.0, [], []
    for shift in (0.0, 0.1):
        now = (old + shift * draw(3, ROWS, DIMENSIONS)).requires_grad_()
        terms, credit = terms_of(
            chain(scale_log_ratio(DIMENSIONS), contrast_implicit_policies(beta, clip)),
            scored(now, target, one),
            scored(old, target, one),
            ADVANTAGE,
            None,
        )
        ours = scalar_loss(terms, credit)
        (gradient,) = torch.autograd.grad(ours, now)
        followed = (ADVANTAGE / clip / 2 + 0.5).clamp(0, 1)[:, None]
        positive = (1 - beta) * old + beta * now
        negative = (1 + beta) * old - beta * now
        paper = (
            followed * (positive - target) ** 2 + (1 - followed) * (negative - target) ** 2
        ).sum() / DIMENSIONS
        (expected,) = torch.autograd.grad(paper, now)
        torch.testing.assert_close(gradient, expected)
        losses.append((ours.item(), paper.item()))
        gradients.append(gradient)
    assert losses[1][0] - losses[0][0] == pytest.approx(losses[1][1] - losses[0][1], abs=1e-9)
    assert not torch.equal(*gradients)


def test_a_normalized_ratio_is_centered_whatever_the_noise():
    """E log rho = -KL under the old policy: 20 000 steps, within four standard errors of 0."""
    number = 20_000
    std = torch.full((number,), 0.3, dtype=torch.float64)
    old = torch.zeros(number, DIMENSIONS, dtype=torch.float64)
    now = old + 0.1
    after = old + std[:, None] * draw(4, number, DIMENSIONS)
    noise = StepNoise(*(std[:, None],) * 3)
    ratios = {}
    for name, objective in {
        "plain": scale_log_ratio(DIMENSIONS),
        "normalized": chain(scale_log_ratio(DIMENSIONS), normalize_log_ratio()),
    }.items():
        scores = scored(now, after, std), scored(old, after, std)
        ratios[name] = terms_of(objective, *scores, torch.ones(number), noise)[0].log_ratio
    error = 4 * float(ratios["normalized"].std()) / math.sqrt(number)
    assert abs(float(ratios["normalized"].mean())) < error
    kl = 0.1**2 / (2 * 0.3**2)
    assert float(ratios["plain"].mean()) == pytest.approx(-kl, rel=0.1)
    torch.testing.assert_close(ratios["normalized"], (ratios["plain"] + kl) * 0.3)


@pytest.mark.parametrize(
    ("objective", "share"),
    [(weigh_by_noise_std(), [1.0, 2.0, 3.0]), (normalize_log_ratio(), [4.0, 2.0, 1.0])],
    ids=["deviation", "one over the step's size"],
)
def test_weights_by_noise_have_mean_one(objective: Objective, share: list[float]):
    mask = torch.eye(3, dtype=torch.bool).repeat(2, 1)
    rollouts = Rollouts(
        group=torch.arange(6) // 3,
        reward=torch.arange(6.0),
        outcome=torch.arange(6.0),
        mask=mask,
        behavior_logp=torch.zeros(6, 3),
        noise=StepNoise(
            mask * 1.0, mask * torch.tensor([0.1, 0.2, 0.3]), mask * torch.tensor([0.1, 0.2, 0.4])
        ),
    )
    weight = assign_credit(objective, rollouts, {}, torch.Generator())[0].weight
    assert weight.mean() * 3 == pytest.approx(1.0, rel=1e-6)
    kept = weight[mask][:3]
    expected = torch.tensor(share)
    torch.testing.assert_close(kept / kept.sum(), expected / expected.sum())


def test_an_exact_penalty_is_the_divergence_per_dimension():
    std = torch.full((ROWS,), 0.5, dtype=torch.float64)
    base, now = draw(1, ROWS, DIMENSIONS), draw(2, ROWS, DIMENSIONS)
    objective = chain(scale_log_ratio(DIMENSIONS), penalize_kl(0.04, "exact"))
    terms, _ = terms_of(objective, scored(now, now, std), scored(base, now, std), ADVANTAGE, None)
    expected = 0.04 * ((now - base) ** 2).mean(dim=1, keepdim=True) / (2 * 0.5**2)
    torch.testing.assert_close(terms.loss, expected)
    assert needs_divergence(objective)
    assert not needs_divergence(grpo())


def test_merged_scores_are_those_of_each_and_the_later_where_both_are():
    first = torch.tensor([[True, False], [True, True]])
    second = torch.tensor([[True, True], [False, False]])
    one = FrozenLogProbs(logp=torch.ones(2, 2), computed=first, mean=torch.arange(3.0)[:, None])
    two = FrozenLogProbs(
        logp=2 * torch.ones(2, 2), computed=second, mean=torch.arange(10.0, 12)[:, None]
    )
    merged = merge_log_probs(one, two)
    assert merged.logp.tolist() == [[2, 2], [1, 1]]
    assert merged.mean is not None
    assert merged.mean[:, 0].tolist() == [10, 11, 1, 2]
    part = merged.part(torch.tensor([1, 0]), torch.tensor([[True], [True]]), torch.device("cpu"))
    assert part.mean is not None
    assert part.mean[:, 0].tolist() == [1, 10]
