"""How two arms compare: cost to reach the same reward, and paired bootstrap intervals."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

DIGITS = 12  # of a mean: the same rates in another order may differ in the last bit


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A number and what the resampled evaluation prompts say about it."""

    value: float
    low: float | None  # None: too many resamples have no such number
    high: float | None


@dataclass(frozen=True, kw_only=True)
class Curve:
    """An arm's policies from base on, and what each had cost (FLOPs or seconds)."""

    arm: str
    policies: tuple[str, ...]
    costs: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """An arm against the reference arm.

    `reference_cost` is the least cost at which the reference had what it ended with, so that a
    reference that sank after its peak is not charged for the descent.
    """

    arm: str
    reference: str
    target: float  # mean at k of the reference's last policy
    difference: Interval  # arm minus reference, of their last policies
    equal_cost: float  # where the cheaper arm ended
    difference_at_equal_cost: Interval  # arm minus reference, on the lines between their points
    reference_improved: bool  # otherwise there is nothing to reach
    cost: float | None  # the arm's least cost at the target; None: never reached
    reference_cost: float
    saving_fraction: Interval | None  # of reference_cost; negative: the arm needs more
    reached_fraction: float  # of the resamples, those in which the arm reaches the target


def draw_resamples(num_prompts: int, *, resamples: int, seed: int) -> NDArray[np.int64]:
    """Returns rows of prompt numbers, drawn with replacement; every policy uses the same rows."""
    return np.random.default_rng(seed).integers(num_prompts, size=(resamples, num_prompts))


def resample_means(rates: pd.DataFrame, draws: NDArray[np.int64]) -> pd.DataFrame:
    """Returns the mean rate of every policy (column) in every resample (row)."""
    columns = {name: rates[name].to_numpy()[draws].mean(axis=1) for name in rates.columns}
    return pd.DataFrame(columns).round(DIGITS)


def difference(
    rates: pd.DataFrame, means: pd.DataFrame, pair: tuple[str, str], *, confidence: float
) -> Interval:
    """Returns mean(first) - mean(second) over the same prompts, with its interval."""
    first, second = pair
    # Subtracted before averaging: equal policies differ by exactly 0.
    value = float((rates[first] - rates[second]).mean())
    low, high = np.quantile(means[first] - means[second], _tails(confidence))
    return Interval(value=value, low=float(low), high=float(high))


def cost_to_reach(curve: Curve, value_of: Mapping[str, float], target: float) -> float | None:
    """Returns the least cost at which the line through the curve's points reaches `target`."""
    values = [value_of[name] for name in curve.policies]
    if values[0] >= target:
        return curve.costs[0]
    for i in range(1, len(values)):
        before, after = values[i - 1], values[i]
        if after >= target:
            share = (target - before) / (after - before)
            return curve.costs[i - 1] + share * (curve.costs[i] - curve.costs[i - 1])
    return None


def value_at(curve: Curve, value_of: Mapping[str, float], cost: float) -> float:
    """Returns the line through the curve's points at `cost`, level beyond its ends."""
    return float(np.interp(cost, curve.costs, [value_of[name] for name in curve.policies]))


def saving_fraction(curve: Curve, reference: Curve, value_of: Mapping[str, float]) -> float | None:
    """Returns 1 - cost / reference_cost at what the reference ended with.

    None if the reference did not improve on its start, or the arm never reaches it.
    """
    target = value_of[reference.policies[-1]]
    if target <= value_of[reference.policies[0]]:
        return None
    cost = cost_to_reach(curve, value_of, target)
    reference_cost = cost_to_reach(reference, value_of, target)
    assert reference_cost is not None  # it ended there
    return None if cost is None else 1 - cost / reference_cost


def compare(
    curve: Curve,
    reference: Curve,
    *,
    rates: pd.DataFrame,
    means: pd.DataFrame,
    confidence: float,
) -> Comparison:
    """Compares an arm with the reference; `means` are `resample_means` of `rates`."""
    last, target_policy = curve.policies[-1], reference.policies[-1]
    value_of = {str(name): round(float(rates[name].mean()), DIGITS) for name in rates.columns}
    target = value_of[target_policy]
    reference_cost = cost_to_reach(reference, value_of, target)
    assert reference_cost is not None  # it ended there
    point = saving_fraction(curve, reference, value_of)
    equal_cost = min(curve.costs[-1], reference.costs[-1])
    resampled, at_equal_cost = [], []
    for row in means.to_numpy().tolist():
        drawn = dict(zip(map(str, means.columns), row, strict=True))
        resampled.append(saving_fraction(curve, reference, drawn))
        at_equal_cost.append(_lead(curve, reference, drawn, equal_cost))
    low, high = np.quantile(at_equal_cost, _tails(confidence))
    lead = _lead(curve, reference, value_of, equal_cost)
    return Comparison(
        arm=curve.arm,
        reference=reference.arm,
        target=target,
        difference=difference(rates, means, (last, target_policy), confidence=confidence),
        equal_cost=equal_cost,
        difference_at_equal_cost=Interval(value=lead, low=float(low), high=float(high)),
        reference_improved=target > value_of[reference.policies[0]],
        cost=None if point is None else cost_to_reach(curve, value_of, target),
        reference_cost=reference_cost,
        saving_fraction=None if point is None else _saving_interval(point, resampled, confidence),
        reached_fraction=float(np.mean([each is not None for each in resampled])),
    )


def _lead(curve: Curve, reference: Curve, value_of: Mapping[str, float], cost: float) -> float:
    return value_at(curve, value_of, cost) - value_at(reference, value_of, cost)


def _saving_interval(point: float, resampled: list[float | None], confidence: float) -> Interval:
    """Returns the interval of a saving; a resample without one counts as the worst saving."""
    worst = [-np.inf if each is None else each for each in resampled]
    # Taken from the sample itself: between -inf and a number there is nothing to interpolate.
    low, high = np.quantile(worst, _tails(confidence), method="inverted_cdf")
    bounds = [float(each) if np.isfinite(each) else None for each in (low, high)]
    return Interval(value=point, low=bounds[0], high=bounds[1])


def _tails(confidence: float) -> list[float]:
    return [(1 - confidence) / 2, (1 + confidence) / 2]
