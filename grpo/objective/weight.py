"""Normalizers, computed on the whole batch before any selection, and selections of rollouts."""

from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from grpo.objective.advantage import (
    is_uniform,
    rollout_advantage,
    spread_advantage,
    sum_by_group,
)
from grpo.objective.base import Objective, credit_link, noise_of
from grpo.objective.link import Link
from grpo.types import Credit, Rollouts

FIELDS = ("outcome", "reward")
ADVANTAGES = ("kept_z_score", "kept_mean", "full_group")
EPSILON = 1e-6  # in units of the advantage


def average_over_steps() -> Objective:
    """Weighs every step 1 / (all steps of the batch): the token mean. [Yu et al., 2025, DAPO]"""
    return _average(
        Link("average_over_steps", {}, "average"), lambda rollouts: 1 / rollouts.mask.sum()
    )


def average_over_rollouts() -> Objective:
    """Weighs rollouts 1/N each and a rollout's steps 1/T_i. [Shao et al., 2024, GRPO]"""
    return _average(
        Link("average_over_rollouts", {}, "average"),
        lambda rollouts: 1 / (len(rollouts.mask) * _num_steps(rollouts)),
    )


def average_over_horizon(horizon: int) -> Objective:
    """Weighs every step 1 / (N horizon), horizon a constant. [Liu et al., 2025, Dr. GRPO]

    Raises:
      ValueError: If `horizon` is not positive.
    """
    if horizon <= 0:
        raise ValueError(f"average_over_horizon needs horizon > 0 steps, got {horizon}")
    return _average(
        Link("average_over_horizon", {"horizon": horizon}, "average"),
        lambda rollouts: torch.tensor(1.0 / (len(rollouts.mask) * horizon)),
    )


def sum_over_steps() -> Objective:
    """Weighs every step 1/N: the mean over rollouts of sums over steps. [Liu et al., 2026, LUSPO]

    Equal to `average_over_horizon` with a horizon of 1. The name states the intent: the weight of a
    rollout grows with its length.
    """
    return _average(
        Link("sum_over_steps", {}, "average"),
        lambda rollouts: torch.tensor(1.0 / len(rollouts.mask)),
    )


def average_over_prompts() -> Objective:
    """Weighs prompts 1/P, a prompt's rollouts 1/G_x and a rollout's steps 1/T_i.

    For groups of different sizes: every prompt of an update has the same weight, times its
    `prompt_weight` if prompts were drawn with unequal probabilities.
    """

    def weight(rollouts: Rollouts) -> Tensor:
        _, size = sum_by_group(torch.ones(len(rollouts.group)), rollouts.group)
        num_prompts = len(torch.unique(rollouts.group))
        even = 1 / (num_prompts * size[:, None] * _num_steps(rollouts))
        weight = rollouts.prompt_weight
        return even if weight is None else even * weight[:, None]

    return _average(Link("average_over_prompts", {}, "average"), weight)


def rectify_noise_level() -> Objective:
    """Weighs a denoising step 1 / lambda, divided by the mean: equal gradients at all noise levels.

    lambda = |d log p / d v| per unit of noise, under the sampled density. The paper publishes a
    table of ten numbers for one schedule; here lambda is computed from the step (sde_steps.py).
    [He et al., 2026, Flash-GRPO, temporal gradient rectification]
    """

    def credit(before: Credit, rollouts: Rollouts, generator: Generator) -> Credit:
        return weigh_by(before, rollouts, 1 / noise_of(rollouts, "rectify_noise_level").scale)

    return credit_link(Link("rectify_noise_level", {}, "noise weight"), credit)


def weigh_by_noise_std() -> Objective:
    """Weighs a denoising step by its noise std, divided by the mean: noisy steps weigh more.

    [He et al., 2025, TempFlow-GRPO, noise-aware weighting]

    Unlike the paper: divided by the mean in place of a constant of 2.25; no branching of
    trajectories.
    """

    def credit(before: Credit, rollouts: Rollouts, generator: Generator) -> Credit:
        return weigh_by(before, rollouts, noise_of(rollouts, "weigh_by_noise_std").std)

    return credit_link(Link("weigh_by_noise_std", {}, "noise weight"), credit)


def drop_uniform_groups(by: str = "outcome") -> Objective:
    """Gives weight 0 to groups whose rollouts all have the same outcome, which saves compute.

    With a binary reward the dropped advantages are exactly 0, so that the loss is unchanged.

    Args:
      by: "outcome", or "reward" (shaped rewards create variance without signal: rule U20).

    Raises:
      ValueError: If `by` is neither.
    """
    if by not in FIELDS:
        raise ValueError(f"drop_uniform_groups needs by in {FIELDS}, got {by!r}")

    def credit(before: Credit, rollouts: Rollouts, generator: Generator) -> Credit:
        value = rollouts.outcome if by == "outcome" else rollouts.reward
        dropped = is_uniform(value, rollouts.group)
        return before.keep(~dropped[:, None].expand(before.weight.shape))

    return credit_link(Link("drop_uniform_groups", {"by": by}, "selection"), credit)


def keep_extreme_rollouts(keep: int, advantage: str = "kept_z_score") -> Objective:
    """Keeps the `keep` rollouts of a group with the largest variance of advantages. [PODS, alg. 1]

    These are some of the highest and some of the lowest advantages; ties are broken at random (rule
    U23). Advantages rank rollouts as rewards do, because a baseline and a scale are affine within a
    group. The weight of a kept rollout is multiplied by G / keep, so that the weight of a prompt is
    unchanged.

    Unlike the paper: the z-score uses the population std (ddof 0), as all links here, so that
    advantages are sqrt(keep / (keep - 1)) times those of its code.

    Args:
      advantage: "kept_z_score" normalizes advantages over the kept rollouts, as the paper does;
        "kept_mean" only centers them; "full_group" leaves them unchanged, so that they no longer
        sum to 0 (rule H5).

    Raises:
      ValueError: If `keep` is below 2 or `advantage` unknown.
    """
    if keep < 2 or advantage not in ADVANTAGES:
        raise ValueError(
            f"keep_extreme_rollouts needs keep >= 2 rollouts and advantage in {ADVANTAGES}, "
            f"got {keep} and {advantage!r}"
        )

    def credit(before: Credit, rollouts: Rollouts, generator: Generator) -> Credit:
        value = rollout_advantage(before, rollouts).double()
        candidate = (before.weight != 0).any(dim=1)
        share = torch.zeros_like(before.weight[:, :1])
        for group in torch.unique(rollouts.group[candidate]).tolist():
            rows = (candidate & (rollouts.group == group)).nonzero()[:, 0]
            kept = rows[_choose_extremes(value[rows], keep, generator)]
            share[kept] = len(rows) / len(kept)
            value[rows] = _renormalize(value[rows], value[kept], advantage)
        after = before.keep((share != 0).expand(before.weight.shape))
        return spread_advantage(replace(after, weight=after.weight * share), rollouts, value)

    return credit_link(
        Link("keep_extreme_rollouts", {"keep": keep, "advantage": advantage}, "selection"), credit
    )


def _choose_extremes(
    value: Float[Tensor, " candidate"], keep: int, generator: Generator
) -> Int[Tensor, " kept"]:
    """Returns the `keep` candidates with the largest variance; ties are broken at random."""
    shuffled = torch.randperm(len(value), generator=generator)
    order = shuffled[value[shuffled].argsort(stable=True)]
    if len(order) <= keep:
        return order
    ascending = (value - value.mean())[order]
    num_high = torch.arange(keep + 1)  # the others are the lowest
    total, squares = (
        _sum_of_ends(each, keep - num_high, num_high) for each in (ascending, ascending**2)
    )
    variance = squares / keep - (total / keep) ** 2
    # The tolerance covers rounding: mirrored choices have the same variance.
    best = (variance >= variance.max() * (1 - 1e-9)).nonzero()[:, 0]
    high = int(best[torch.randint(len(best), (1,), generator=generator)])
    return torch.cat([order[: keep - high], order[len(order) - high :]])


def _sum_of_ends(
    ascending: Float[Tensor, " candidate"],
    num_low: Int[Tensor, " choice"],
    num_high: Int[Tensor, " choice"],
) -> Float[Tensor, " choice"]:
    """Returns, per choice, the sum of the `num_low` lowest and `num_high` highest values."""
    sums = torch.cat([ascending.new_zeros(1), ascending.cumsum(0)])
    return sums[num_low] + sums[-1] - sums[len(ascending) - num_high]


def _renormalize(
    value: Float[Tensor, " candidate"], kept: Float[Tensor, " kept"], advantage: str
) -> Float[Tensor, " candidate"]:
    """Returns a group's advantages normalized over its kept rollouts, 0 if those are all equal."""
    if advantage == "full_group":
        return value
    if kept.min() == kept.max():
        return torch.zeros_like(value)
    centered = value - kept.mean()
    return centered if advantage == "kept_mean" else centered / (kept.std(correction=0) + EPSILON)


def weigh_by(before: Credit, rollouts: Rollouts, factor: Float[Tensor, "rollout step"]) -> Credit:
    """Returns credit with weights times `factor`, scaled to a mean of 1 over the batch's steps."""
    kept = torch.where(rollouts.mask, factor, 0.0)
    mean = kept.double().sum() / rollouts.mask.sum()
    return replace(before, weight=before.weight * (kept / mean).to(before.weight.dtype))


def _average(link: Link, weight: Callable[[Rollouts], Tensor]) -> Objective:
    """Returns a link that multiplies weights by a normalizer computed on the whole batch."""

    def credit(before: Credit, rollouts: Rollouts, generator: Generator) -> Credit:
        return replace(before, weight=before.weight * weight(rollouts).to(before.weight.dtype))

    return credit_link(link, credit)


def _num_steps(rollouts: Rollouts) -> Float[Tensor, "rollout 1"]:
    """Returns T_i, and 1 for a rollout without steps."""
    return rollouts.mask.sum(dim=1, keepdim=True).clamp(min=1).float()
