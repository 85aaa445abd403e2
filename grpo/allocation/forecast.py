"""What an online allocation expected of an iteration, beside what happened."""

from typing import Any

import numpy as np
import pandas as pd

from grpo.allocation.posterior import Floats, Posterior
from grpo.allocation.selection import VISITS, History, Seconds
from grpo.types import Cost

BINS = 10  # of success rates


def compare_forecast(
    allocation: pd.DataFrame,
    outcomes: pd.DataFrame,
    history: History,
    *,
    seconds: Seconds | None,
    sampling: Cost,
    updates: Cost,
) -> dict[str, Any]:
    """Returns the record of an iteration's allocation, which is written as JSON.

    A prompt is in the bin of its posterior's mean rate. The share of a bin is of the rollouts; its
    expected and solved rates are means over the judged rollouts.

    Args:
      allocation: Schema ALLOCATION.
      outcomes: prompt_id and outcome of every judged rollout.
      history: The statistics after the iteration.
      seconds: Declared seconds of the budget; None: the allocation reads no costs.
      sampling, updates: Costs of the iteration.
    """
    chosen = allocation[allocation["rollouts"] > 0].set_index("prompt_id")
    posterior = Posterior(alpha=chosen["alpha"].to_numpy(), beta=chosen["beta"].to_numpy())
    sizes = chosen["rollouts"].to_numpy()
    rate = posterior.mean_rate()
    groups = outcomes.groupby("prompt_id")["outcome"].agg(["size", "sum", "min", "max"])
    weight = chosen["weight"].to_numpy()
    visits = history.get(VISITS, {})
    return {
        "candidates": len(allocation),
        "never_drawn": int((~allocation["prompt_id"].isin(visits)).sum()),
        "groups": len(chosen),
        "rollouts": int(sizes.sum()),
        "largest_group": int(sizes.max()),
        "expected_mixed": float((1 - posterior.uniform_chance(sizes)).mean()),
        "mixed": float((groups["min"] < groups["max"]).mean()) if len(groups) else 0.0,
        "effective_sample_size": float(weight.sum() ** 2 / (weight**2).sum()),
        **_costs(chosen, seconds, sampling, updates),
        "bins": _bins(chosen, rate, groups),
    }


def _costs(
    chosen: pd.DataFrame, seconds: Seconds | None, sampling: Cost, updates: Cost
) -> dict[str, Any]:
    """Returns expected and counted cost; of declared seconds, those of the counted steps."""
    if seconds is None:
        return {}
    counted: float = sampling.flops + updates.flops
    if any(seconds):
        counted = (
            seconds.per_sampled_step * sampling.sampled_steps
            + seconds.per_trained_step * updates.trained_steps
            + seconds.per_judgement * int(chosen["rollouts"].sum())
        )
    return {
        "cost_unit": "seconds" if any(seconds) else "FLOPs",
        "expected_cost": float(chosen["cost"].sum()),
        "cost": float(counted),
    }


def _bins(chosen: pd.DataFrame, rate: Floats, groups: pd.DataFrame) -> list[dict[str, Any]]:
    """Returns the share of rollouts, the expected and the solved rate by bin of the mean rate."""
    number = np.minimum((rate * BINS).astype(int), BINS - 1)
    judged, solved = (
        groups[each].reindex(chosen.index, fill_value=0).to_numpy() for each in ("size", "sum")
    )

    def totals(each: Floats) -> list[float]:
        sums: list[float] = np.bincount(number, each, minlength=BINS).tolist()
        return sums

    sizes = chosen["rollouts"].to_numpy()
    columns = (totals(each) for each in (sizes / sizes.sum(), judged, rate * judged, solved))
    return [
        {
            "low": index / BINS,
            "share": share,
            "rollouts": int(count),
            "expected": expected / count if count else None,
            "solved": found / count if count else None,
        }
        for index, (share, count, expected, found) in enumerate(zip(*columns))
    ]
