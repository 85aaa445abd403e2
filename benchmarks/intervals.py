"""Means over seeds with their intervals, and how tables and pages write them."""

from collections.abc import Sequence

import numpy as np
from scipy import stats


def mean_interval(values: list[float]) -> dict[str, float | None]:
    """Returns the mean with a 95 % t interval over seeds; a single seed has no interval."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return {"value": mean, "low": None, "high": None}
    half = float(stats.sem(values) * stats.t.ppf(0.975, len(values) - 1))
    return {"value": mean, "low": mean - half, "high": mean + half}


def in_words(interval: dict[str, float | None], form: str = "+.3f") -> str:
    """Returns value and interval as text; a dash if the value was not reached."""
    value, low, high = (
        "-" if each is None else format(each, form)
        for each in (interval["value"], interval["low"], interval["high"])
    )
    return value if low == high == "-" else f"{value} [{low}, {high}]"


def span(values: Sequence[float], form: str = ".0f") -> str:
    """Returns the lowest and the highest value as text; one number if both read the same."""
    low, high = (format(each, form) for each in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
