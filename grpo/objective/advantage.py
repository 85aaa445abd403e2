"""Baselines, which are subtracted from rewards, and scales, which divide advantages."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from grpo.objective.base import LinkState, Objective, credit_link, stateful_credit_link
from grpo.objective.link import Link, Setting
from grpo.types import Credit, Rollouts

PerRollout = Float[Tensor, " rollout"]


def center_by_group_mean() -> Objective:
    """A_i = r_i - mean_j r_j, and exactly 0 in a group whose rewards are all equal."""

    return _rollout_link(
        Link("center_by_group_mean", {}, "baseline"),
        lambda value, rollouts: _center(value, rollouts.group),
    )


def leave_one_out() -> Objective:
    """A_i = r_i - mean_{j != i} r_j = G/(G-1) (r_i - mean_j r_j): unbiased. [Kool et al., 2019]

    The advantage of the only rollout of a group is 0.
    """

    def center(value: PerRollout, rollouts: Rollouts) -> PerRollout:
        total, size = sum_by_group(value, rollouts.group)
        others = (total - value) / (size - 1).clamp(min=1)
        return torch.where(is_uniform(value, rollouts.group), 0.0, value - others)

    return _rollout_link(Link("leave_one_out", {}, "baseline"), center)


def center_by_moving_average(decay: float = 0.9) -> Objective:
    """A_i = r_i - b, b the moving average of earlier batches' mean reward (0 at the start).

    The average is bias-corrected like Adam's moments: b = m / (1 - decay^batches).

    Raises:
      ValueError: If `decay` is not in [0, 1).
    """
    if not 0 <= decay < 1:
        raise ValueError(f"center_by_moving_average needs decay in [0, 1), got {decay}")

    def credit(
        before: Credit, rollouts: Rollouts, state: LinkState, generator: Generator
    ) -> tuple[Credit, LinkState]:
        value = rollout_advantage(before, rollouts).double()
        seen = state["batches"]
        baseline = state["mean"] / (1 - decay**seen) if seen else 0.0
        mean = decay * state["mean"] + (1 - decay) * float(value.mean())
        after = spread_advantage(before, rollouts, value - baseline)
        return after, {"mean": mean, "batches": seen + 1}

    link = Link("center_by_moving_average", {"decay": decay}, "baseline")
    return stateful_credit_link(link, {"mean": 0.0, "batches": 0.0}, credit)


def scale_by_group_std(ddof: int = 0, epsilon: float = 1e-6) -> Objective:
    """A_i / (std_j A_j + epsilon) within the group, 0 if all are equal. [Shao et al., eq. 3]

    Unlike TRL and verl (ddof=1), the default is the papers' population deviation; at G=2 the two
    differ by sqrt(2).

    Args:
      ddof: 0 divides the sum of squares by G, 1 by G - 1.
      epsilon: In units of the reward.
    """
    _require_deviation("scale_by_group_std", ddof, epsilon)

    return _rollout_link(
        Link("scale_by_group_std", {"ddof": ddof, "epsilon": epsilon}, "scale", "group scale"),
        lambda value, rollouts: _scale(value, rollouts.group, ddof, epsilon),
    )


def scale_by_batch_std(ddof: int = 0, epsilon: float = 1e-6) -> Objective:
    """A_i / (std of A over the whole batch + epsilon), 0 if it is 0. [Liu et al., 2025, Lite-PPO]

    Args:
      ddof: 0 divides the sum of squares by the number of rollouts, 1 by one less.
      epsilon: In units of the reward.
    """
    _require_deviation("scale_by_batch_std", ddof, epsilon)

    def scale(value: PerRollout, rollouts: Rollouts) -> PerRollout:
        if value.min() == value.max():
            return torch.zeros_like(value)
        return value / (value.std(correction=ddof) + epsilon)

    return _rollout_link(
        Link("scale_by_batch_std", {"ddof": ddof, "epsilon": epsilon}, "scale"), scale
    )


def add_improvement(weight: float = 5.0) -> Objective:
    """r_i + weight d_i, d_i the improvement on the first answer. [Group Revision]

    d_i = max(0, (e_1 - e_i) / e_1) with the errors e_1 of the first answer and e_i of the rollout.
    The arm's selection must hold `revise_first_answers`. As shaping it is not potential-based: it
    changes which policy is best.

    Raises:
      ValueError: If `weight` is negative or infinite; on credit, without improvements.
    """
    if not 0 <= weight < math.inf:
        raise ValueError(f"add_improvement needs a finite weight >= 0, got {weight}")
    link = Link("add_improvement", {"weight": weight}, "reward part", "improvement")
    return _rollout_link(
        link, lambda value, rollouts: value + weight * _improvement(rollouts, link.name)
    )


def scale_by_improvement(center: str = "none") -> Objective:
    """(1 + d_i) A_i, d_i the improvement on the first answer. [Group Revision]

    The products do not sum to 0 over a group: the better rollouts have the larger factors.

    Args:
      center: "none", as published; or "group": the group's mean of the products is subtracted.

    Raises:
      ValueError: If `center` is unknown; on credit, without improvements, see `add_improvement`.
    """
    if center not in ("none", "group"):
        raise ValueError(f"scale_by_improvement needs center none or group, got {center!r}")
    link = Link("scale_by_improvement", {"center": center}, "improvement")

    def scale(value: PerRollout, rollouts: Rollouts) -> PerRollout:
        scaled = value * (1 + _improvement(rollouts, link.name))
        if center == "none":
            return scaled
        total, size = sum_by_group(scaled, rollouts.group)
        return torch.where(is_uniform(scaled, rollouts.group), 0.0, scaled - total / size)

    return _rollout_link(link, scale)


def sum_later_part_scores(
    outcome_weight: float = 0.0, ddof: int = 0, epsilon: float = 1e-6
) -> Objective:
    """A_it = sum of the z-scores of the parts of rollout i that end at step t or later.

    The z-scores are over the scores of all parts of the group's rollouts, 0 if all are equal.
    [Shao et al., 2024, section 4.1.3, process supervision] Steps after the last part have the
    advantage 0, as has a rollout without parts.

    Args:
      outcome_weight: Adds this times the z-score of the rollout's reward to the advantages of all
        of its steps; 0: only parts count.
      ddof: 0 divides the sum of squares by the number of values, 1 by one less.
      epsilon: In units of the scores, and of the reward.

    Raises:
      ValueError: If a number is out of range; on credit, without parts.
    """
    name = "sum_later_part_scores"
    _require_deviation(name, ddof, epsilon)
    if not 0 <= outcome_weight < math.inf:
        raise ValueError(f"{name} needs a finite outcome_weight >= 0, got {outcome_weight}")

    def z_score(value: PerRollout, group: Int[Tensor, " rollout"]) -> PerRollout:
        return _scale(_center(value, group), group, ddof, epsilon)

    def credit(before: Credit, rollouts: Rollouts, generator: Generator) -> Credit:
        if rollouts.parts is None:
            raise ValueError(f"{name} needs Rollouts.parts, got None: a judge must score parts")
        end, score = rollouts.parts
        row, part = (end >= 0).nonzero(as_tuple=True)
        at_end = torch.zeros(rollouts.mask.shape, dtype=torch.float64)
        if len(row):
            scores = z_score(score[row, part].double(), rollouts.group[row])
            at_end.index_put_((row, end[row, part]), scores, accumulate=True)
        advantage = at_end.flip(1).cumsum(1).flip(1)
        if outcome_weight:
            reward = rollout_advantage(before, rollouts).double()
            advantage = advantage + outcome_weight * z_score(reward, rollouts.group)[:, None]
        return replace(before, advantage=advantage.to(before.advantage.dtype) * rollouts.mask)

    settings: dict[str, Setting] = {
        "outcome_weight": outcome_weight,
        "ddof": ddof,
        "epsilon": epsilon,
    }
    return credit_link(Link(name, settings, "baseline", "group scale", "part scores"), credit)


def _improvement(rollouts: Rollouts, name: str) -> PerRollout:
    if rollouts.improvement is None:
        raise ValueError(f"{name} needs Rollouts.improvement, got None: revise first answers")
    return rollouts.improvement.double()


def _center(value: PerRollout, group: Int[Tensor, " rollout"]) -> PerRollout:
    """Returns values minus the mean of their group, exactly 0 if all of them are equal."""
    total, size = sum_by_group(value, group)
    return torch.where(is_uniform(value, group), 0.0, value - total / size)


def _scale(
    value: PerRollout, group: Int[Tensor, " rollout"], ddof: int, epsilon: float
) -> PerRollout:
    """Returns values divided by the std of their group + epsilon, 0 if all of them are equal."""
    total, size = sum_by_group(value, group)
    squares, _ = sum_by_group((value - total / size) ** 2, group)
    scaled = value / ((squares / (size - ddof).clamp(min=1)).sqrt() + epsilon)
    return torch.where(is_uniform(value, group), 0.0, scaled)


def _require_deviation(name: str, ddof: int, epsilon: float) -> None:
    if ddof not in (0, 1) or not 0 <= epsilon < math.inf:
        raise ValueError(
            f"{name} needs ddof 0 or 1 and a finite epsilon >= 0, got {ddof} and {epsilon}"
        )


def rollout_advantage(credit: Credit, rollouts: Rollouts) -> PerRollout:
    """Returns the advantage of each rollout's first step, 0 for a rollout without steps."""
    first = rollouts.mask.to(torch.uint8).argmax(dim=1, keepdim=True)
    return torch.where(rollouts.mask.any(dim=1), credit.advantage.gather(1, first)[:, 0], 0.0)


def spread_advantage(credit: Credit, rollouts: Rollouts, value: PerRollout) -> Credit:
    """Returns `credit` with one advantage per rollout, at all steps of its mask."""
    advantage = value.to(credit.advantage.dtype)[:, None] * rollouts.mask
    return replace(credit, advantage=advantage)


def is_uniform(value: PerRollout, group: Int[Tensor, " rollout"]) -> Tensor:
    """Returns, per rollout, whether all values of its group are equal."""
    _, index = torch.unique(group, return_inverse=True)
    shape = (int(index.max()) + 1,)
    # Compared exactly: the mean of equal floats need not equal them.
    low = torch.full(shape, torch.inf, dtype=value.dtype).scatter_reduce(0, index, value, "amin")
    high = torch.full(shape, -torch.inf, dtype=value.dtype).scatter_reduce(0, index, value, "amax")
    return (low == high)[index]


def sum_by_group(
    value: PerRollout, group: Int[Tensor, " rollout"]
) -> tuple[PerRollout, PerRollout]:
    """Returns, per rollout, the sum of `value` over its group and the size of the group."""
    _, index = torch.unique(group, return_inverse=True)
    zeros = torch.zeros(int(index.max()) + 1, dtype=value.dtype)
    total = zeros.index_add(0, index, value)
    size = zeros.index_add(0, index, torch.ones_like(value))
    return total[index], size[index]


def _rollout_link(link: Link, change: Callable[[PerRollout, Rollouts], PerRollout]) -> Objective:
    """Returns a link that maps the advantages of rollouts in float64."""

    def credit(before: Credit, rollouts: Rollouts, generator: Generator) -> Credit:
        value = rollout_advantage(before, rollouts).double()
        return spread_advantage(before, rollouts, change(value, rollouts))

    return credit_link(link, credit)
