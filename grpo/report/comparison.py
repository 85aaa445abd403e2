"""Comparison of two arms: cost to reach the same reward, with paired bootstrap intervals."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

DIGITS = 12  # of a mean: summing the same rates in another order may change the last bit


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A number with its bootstrap interval over evaluation prompts."""

    value: float
    low: float | None  # None: the number is undefined in too many resamples
    high: float | None


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The policies of an arm from the base on, with the cumulative cost of each."""

    arm: str
    policies: tuple[str, ...]
    costs: tuple[float, ...]  # FLOPs or seconds


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """An arm against the reference arm.

    `reference_cost` is the lowest cost at which the reference reached its final value. If the
    reference declined after its peak, the cost of the decline does not count.
    """

    arm: str
    reference: str
    target: float  # mean at k of the reference's last policy
    difference: Interval  # arm minus reference, of their last policies
    equal_cost: float  # final cost of the cheaper arm
    difference_at_equal_cost: Interval  # arm minus reference, by linear interpolation
    reference_improved: bool  # if not, there is no target to reach
    cost: float | None  # lowest cost at which the arm reaches the target; None: never
    reference_cost: float
    saving_fraction: Interval | None  # of reference_cost; negative: the arm needs more
    # Of resamples in which the reference improves and the arm reaches the target.
    reached_fraction: float


def draw_resamples(num_prompts: int, *, resamples: int, seed: int) -> NDArray[np.int64]:
    """Returns prompt indices drawn with replacement, one row per resample, for all policies."""
    return np.random.default_rng(seed).integers(num_prompts, size=(resamples, num_prompts))


def resample_means(rates: pd.DataFrame, draws: NDArray[np.int64]) -> pd.DataFrame:
    """Returns the mean rate of every policy (column) in every resample (row)."""
    columns = {name: rates[name].to_numpy()[draws].mean(axis=1) for name in rates.columns}
    return pd.DataFrame(columns).round(DIGITS)


def difference(
    rates: pd.DataFrame, means: pd.DataFrame, pair: tuple[str, str], *, confidence: float
) -> Interval:
    """Returns mean(first) - mean(second) over the same prompts, with an interval."""
    first, second = pair
    # Subtracted before averaging: equal policies differ by exactly 0.
    value = float((rates[first] - rates[second]).mean())
    low, high = np.quantile(means[first] - means[second], _tails(confidence))
    return Interval(value=value, low=float(low), high=float(high))


def cost_to_reach(curve: Curve, value_of: Mapping[str, float], target: float) -> float | None:
    """Returns the lowest cost at which the interpolated curve reaches `target`; None: never."""
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
    """Returns the linearly interpolated value at `cost`, constant beyond the ends."""
    return float(np.interp(cost, curve.costs, [value_of[name] for name in curve.policies]))


def saving_fraction(curve: Curve, reference: Curve, value_of: Mapping[str, float]) -> float | None:
    """Returns 1 - cost / reference_cost, both to reach the reference's final value.

    None if the reference did not improve on its start, or the arm never reaches it.
    """
    target = value_of[reference.policies[-1]]
    if target <= value_of[reference.policies[0]]:
        return None
    cost = cost_to_reach(curve, value_of, target)
    reference_cost = cost_to_reach(reference, value_of, target)
    assert reference_cost is not None  # its last policy has this value
    return None if cost is None else 1 - cost / reference_cost


def compare(
    curve: Curve,
    reference: Curve,
    *,
    rates: pd.DataFrame,
    means: pd.DataFrame,
    confidence: float,
) -> Comparison:
    """Returns the comparison of an arm with the reference.

    Args:
      means: The `resample_means` of `rates`.
    """
    last, target_policy = curve.policies[-1], reference.policies[-1]
    value_of = {str(name): round(float(rates[name].mean()), DIGITS) for name in rates.columns}
    target = value_of[target_policy]
    reference_cost = cost_to_reach(reference, value_of, target)
    assert reference_cost is not None  # its last policy has this value
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
    """Returns the interval of a saving; resamples without one (`saving_fraction`) count as -inf."""
    worst = [-np.inf if each is None else each for each in resampled]
    # No interpolation: it is undefined between -inf and a number.
    low, high = np.quantile(worst, _tails(confidence), method="inverted_cdf")
    bounds = [float(each) if np.isfinite(each) else None for each in (low, high)]
    return Interval(value=point, low=bounds[0], high=bounds[1])


def _tails(confidence: float) -> list[float]:
    return [(1 - confidence) / 2, (1 + confidence) / 2]
