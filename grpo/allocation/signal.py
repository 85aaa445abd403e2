"""Group sizes with the most expected signal for a budget, from success rates and costs."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from grpo.allocation.posterior import Floats, Ints, Posterior

LARGEST = 128  # rollouts of a group, as in Knapsack RL
SIZES = np.arange(LARGEST + 1)
LOWEST_CHANCE = 0.1  # of an inclusion, in units of the mean: bounds the weight of a prompt
BISECTIONS = 60


class Rates(NamedTuple):
    """Expected cost of each prompt: once per group, per sampled rollout, per trained rollout."""

    read: Floats
    sampled: Floats
    trained: Floats


@dataclass(frozen=True, kw_only=True)
class Price:
    """What groups cost, in FLOPs or seconds."""

    rates: Callable[[list[str], Floats], Rates]  # of prompts and the mean steps of their rollouts
    longest: float  # steps of a rollout, used until a length is known
    largest: int = LARGEST  # rollouts of a group
    keep: int | None = None  # trained rollouts of a group; None: all
    drops_uniform: bool = False  # whether groups of equal outcomes are not trained


def group_values(variance: Floats) -> Floats:
    """Returns v (1 - 1 / G) for each prompt (row) and G (column): the variance within its group."""
    share = np.where(SIZES > 0, 1 - 1 / np.maximum(SIZES, 1), 0.0)
    values: Floats = variance[:, None] * share
    return values


def group_costs(rates: Rates, posterior: Posterior, price: Price) -> Floats:
    """Returns the expected cost of each prompt (row) and group size (column)."""
    trained = np.minimum(SIZES, price.keep or LARGEST).astype(np.float64)
    if price.drops_uniform:
        trained = trained * (1 - posterior.uniform_chances(LARGEST))
    costs: Floats = (
        rates.read[:, None] * (SIZES > 0)
        + rates.sampled[:, None] * SIZES
        + rates.trained[:, None] * trained
    )
    return costs


def spend(values: Floats, costs: Floats, budget: float) -> Ints:
    """Returns the group size of each prompt: the largest total value within a budget.

    Takes the step with the largest gain per cost until the next one exceeds the budget. A prompt's
    first step goes to the size of the largest value per cost: to the pair, unless reading the
    prompt costs more than a rollout. Every total that a step ends with is optimal for its cost. The
    order of steps does not depend on the budget, so that a larger budget takes no rollout from a
    prompt. The first step is taken even if it exceeds the budget. Ties are broken by row.

    Args:
      values, costs: By prompt (row) and group size (column), 0 for a group of 0.
    """
    sizes, largest = np.zeros(len(values), dtype=np.int64), values.shape[1] - 1
    spent = 0.0
    slopes = values[:, 1:] / costs[:, 1:]
    first = (slopes.argmax(axis=1) + 1).tolist()
    steps = list(zip((-slopes.max(axis=1)).tolist(), range(len(slopes)), first))
    heapq.heapify(steps)
    while steps:
        slope, row, size = heapq.heappop(steps)
        cost = costs[row, size] - costs[row, sizes[row]]
        if slope >= 0 or (sizes.any() and spent + cost > budget):
            break
        spent += cost
        sizes[row] = size
        if size < largest:
            heapq.heappush(steps, _next_step(values, costs, row, size))
    return sizes


def _next_step(values: Floats, costs: Floats, row: int, size: int) -> tuple[float, int, int]:
    """Returns minus the largest gain per cost of a larger group, the row and that group's size."""
    gain = values[row, size + 1 :] - values[row, size]
    slope = gain / (costs[row, size + 1 :] - costs[row, size])
    best = int(slope.argmax())
    return -float(slope[best]), row, size + 1 + best


def include(variance: Floats, costs: Floats, budget: float) -> tuple[Floats, Ints]:
    """Returns the inclusion probability and the group size of each prompt, for a mean cost.

    Sizes are proportional to sqrt(v / c), c the cost of a rollout [Neyman, 1934]. Below the pair, a
    prompt is included with half its size as probability. No size is below a tenth of the mean, so
    that every prompt can be drawn. At least one prompt is expected.
    """
    wanted = np.sqrt(variance / costs[:, 2])
    wanted = np.maximum(wanted, LOWEST_CHANCE * wanted.mean()) if wanted.any() else wanted + 1
    rows, largest = np.arange(len(wanted)), costs.shape[1] - 1

    def plan(scale: float) -> tuple[Floats, Ints]:
        sizes = np.clip(np.rint(scale * wanted), 2, largest).astype(np.int64)
        return np.minimum(scale * wanted / 2, 1.0), sizes

    low, high = 0.0, largest / float(wanted.min())
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        inclusion, sizes = plan(middle)
        fits = float(inclusion @ costs[rows, sizes]) <= budget
        low, high = (middle, high) if fits else (low, middle)
    inclusion, sizes = plan(low)
    total = float(inclusion.sum())
    if total >= 1:
        return inclusion, sizes
    return wanted / wanted.sum(), np.full(len(wanted), 2)


def draw_systematically(inclusion: Floats, chooser: np.random.Generator) -> NDArray[np.bool_]:
    """Returns a draw with the given inclusion probabilities; its size differs by less than 1."""
    ends = np.cumsum(inclusion) + chooser.random()
    starts = np.concatenate([ends[:1] - inclusion[:1], ends[:-1]])
    taken: NDArray[np.bool_] = np.floor(ends) > np.floor(starts)
    return taken
