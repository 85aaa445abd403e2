"""Batches of whole groups per update, and microbatches of rows packed by length."""

from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from grpo.objective.base import Objective, State, assign_credit
from grpo.runtime.ranks import num_ranks, this_rank
from grpo.types import Credit, Rollouts


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The rollouts of one update and their credit, computed before any forward pass."""

    rows: Int[Tensor, " rollout"]  # indices into the round's rollouts
    rollouts: Rollouts
    credit: Credit


def plan_batches(
    objective: Objective,
    rollouts: Rollouts,
    state: State,
    *,
    num_batches: int,
    generator: Generator,
) -> tuple[list[Batch], State]:
    """Returns the round's batches with their credit: whole groups, about equal rollout counts.

    Rollouts without steps are in no batch. With fewer groups than `num_batches`, or groups of very
    different sizes, there are fewer batches.
    """
    counted = rollouts.counts.nonzero()[:, 0]
    groups, group = torch.unique(rollouts.group[counted], return_inverse=True)
    rank = torch.randperm(len(groups), generator=generator).argsort()[group]
    order = rank.argsort(stable=True)
    sizes = torch.bincount(rank)
    batch_of_group = (sizes.cumsum(0) - sizes) * num_batches // max(len(counted), 1)
    batch_of_row = batch_of_group[rank[order]]
    batches = []
    for index in range(num_batches):
        rows = counted[order[batch_of_row == index]]
        if len(rows):
            part = rollouts.select(rows)
            credit, state = assign_credit(objective, part, state, generator)
            batches.append(Batch(rows=rows, rollouts=part, credit=credit))
    return batches, state


def explain_fewer(asked: int, rollouts: Rollouts, batches: list[Batch]) -> str | None:
    """Returns the reason for fewer updates than `asked`, or None if there are as many."""
    if len(batches) >= asked:
        return None
    groups = len(torch.unique(rollouts.group[rollouts.counts]))
    return (
        f"made {len(batches)} of {asked} updates: an update takes whole groups, about equal in "
        f"rollouts, and the iteration has {groups}; lower training.updates_per_iteration to "
        f"{len(batches)}"
    )


def pack_microbatches(
    widths: Int[Tensor, " rollout"], tokens_per_microbatch: int
) -> list[Int[Tensor, " kept"]]:
    """Returns rows sorted by width, split so that rows * largest width is within the budget."""
    order, width = widths.argsort(stable=True), widths.tolist()
    packed: list[list[int]] = [[]]
    for row in order.tolist():
        if packed[-1] and (len(packed[-1]) + 1) * width[row] > tokens_per_microbatch:
            packed.append([])
        packed[-1].append(row)
    return [torch.tensor(rows) for rows in packed if rows]


class _Share(NamedTuple):
    """A microbatch that a rank computes."""

    rows: Int[Tensor, " kept"]
    counts: bool  # False: padding, computed only to match the collectives of other ranks


def local_microbatches(widths: Int[Tensor, " rollout"], tokens_per_microbatch: int) -> list[_Share]:
    """Returns the microbatches of this rank."""
    return assign_microbatches(widths, tokens_per_microbatch, num_ranks())[this_rank()]


def assign_microbatches(
    widths: Int[Tensor, " rollout"], tokens_per_microbatch: int, ranks: int
) -> list[list[_Share]]:
    """Returns the microbatches of each rank, the same number for all ranks.

    Microbatches that ranks compute at the same time have about equal numbers of tokens. If there
    are too few rows, some ranks compute the narrowest row again and discard the result.
    """
    packed = pack_microbatches(widths, tokens_per_microbatch)
    if ranks > 1:
        packed = _pack_into(len(packed) + -len(packed) % ranks, widths, tokens_per_microbatch)
    shares = [_Share(rows, True) for rows in packed]
    shares += [_Share(packed[0][:1], False)] * (-len(packed) % ranks)
    return [shares[rank::ranks] for rank in range(ranks)]


def _pack_into(
    number: int, widths: Int[Tensor, " rollout"], tokens_per_microbatch: int
) -> list[Int[Tensor, " kept"]]:
    """Returns at most `number` microbatches, minimizing the largest one."""
    budgets = range(min(int(widths.max()), tokens_per_microbatch), tokens_per_microbatch)

    def is_enough(budget: int) -> bool:
        return len(pack_microbatches(widths, budget)) <= number

    return pack_microbatches(widths, budgets.start + bisect_left(budgets, True, key=is_enough))


def last_step(weight: Float[Tensor, "rollout step"]) -> int:
    """Returns the number of steps up to the last one with a nonzero weight."""
    return int((weight != 0).any(dim=0).nonzero().max()) + 1
