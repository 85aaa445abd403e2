"""Normalizers, decided on the whole batch before any selection, and selections of what to train."""

from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from grpo.objective.advantage import is_uniform, sum_by_group
from grpo.objective.base import Link, Objective, credit_link
from grpo.types import Credit, Rollouts

FIELDS = ("outcome", "reward")


def average_over_steps() -> Objective:
    """Weighs every step 1 / (all steps of the batch): the token mean. [Yu et al., 2025, DAPO]"""
    return _average(Link("average_over_steps", {}), lambda rollouts: 1 / rollouts.mask.sum())


def average_over_rollouts() -> Objective:
    """Weighs rollouts 1/N each and a rollout's steps 1/T_i. [Shao et al., 2024, GRPO]"""
    return _average(
        Link("average_over_rollouts", {}),
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
        Link("average_over_horizon", {"horizon": horizon}),
        lambda rollouts: torch.tensor(1.0 / (len(rollouts.mask) * horizon)),
    )


def average_over_prompts() -> Objective:
    """Weighs prompts 1/P, a prompt's rollouts 1/G_x and a rollout's steps 1/T_i.

    The normalizer for groups of different sizes: every prompt counts the same.
    """

    def weight(rollouts: Rollouts) -> Tensor:
        _, size = sum_by_group(torch.ones(len(rollouts.group)), rollouts.group)
        num_prompts = len(torch.unique(rollouts.group))
        return 1 / (num_prompts * size[:, None] * _num_steps(rollouts))

    return _average(Link("average_over_prompts", {}), weight)


def drop_uniform_groups(by: str = "outcome") -> Objective:
    """Weighs 0 every group whose rollouts all have the same outcome: no signal, no compute.

    With a binary reward the dropped advantages are exactly 0, so the sum is unchanged.

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
        return before.select(~dropped[:, None].expand(before.weight.shape))

    return credit_link(Link("drop_uniform_groups", {"by": by}), credit)


def _average(link: Link, weight: Callable[[Rollouts], Tensor]) -> Objective:
    """Returns a link that multiplies the weights by a normalizer of the whole batch."""

    def credit(before: Credit, rollouts: Rollouts, generator: Generator) -> Credit:
        return replace(before, weight=before.weight * weight(rollouts).to(before.weight.dtype))

    return credit_link(link, credit)


def _num_steps(rollouts: Rollouts) -> Float[Tensor, "rollout 1"]:
    """Returns T_i, and 1 for a rollout without steps."""
    return rollouts.mask.sum(dim=1, keepdim=True).clamp(min=1).float()
