"""Numbers of a run: reward by cost, signal by difficulty, cost by stage, and arm comparisons.

Pure functions of the artifacts: the same artifacts give the same bytes. Measured seconds belong in
`seconds.py`. Means of rewards and outcomes are over the rollouts that were judged (`is_judged`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from grpo.params.parameters import BASE
from grpo.report.comparison import (
    Comparison,
    Curve,
    Interval,
    compare,
    difference,
    draw_resamples,
    resample_means,
)
from grpo.report.judges import Influence, measure_influence
from grpo.report.reading import COST, GROUP, KINDS_IN_BUDGET, Run, reported_scores
from grpo.runtime.artifacts.files import write_bytes, write_json
from grpo.runtime.artifacts.tables import is_judged
from grpo.wiring.allocation import reads_profile

BUCKETS = ("0", "(0, .25]", "(.25, .5]", "(.5, .75]", "(.75, 1]")  # of a prompt's outcome rate
WITHOUT_PROFILE = ("all prompts",)  # the only bucket where no prompt has an outcome rate
EDGES = (-np.inf, 0.0, 0.25, 0.5, 0.75, 1.0)
DIGITS = 6  # decimal places of every rate in an output file
SCORE_COLUMNS = ("greedy", "mean_at_k", "mean_low", "mean_high", "pass_at_k")


@dataclass(frozen=True, kw_only=True)
class Change:
    """Mean at k of a policy on some prompts, and its change against the base."""

    value: float
    prompts: int
    change: Interval  # of 0 for the base itself


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Numbers of the page that are computed from artifacts; measured seconds are separate."""

    reward_by_cost: pd.DataFrame
    signal: pd.DataFrame
    cost: pd.DataFrame
    gains: dict[str, dict[str, Interval]]  # by arm and score: its last policy minus the base
    comparisons: dict[str, Comparison]  # by arm, without the reference; costs are FLOPs
    influence: dict[str, list[Influence]]  # by arm; empty with one judge


def compute_numbers(run: Run) -> Numbers:
    """Returns the numbers of a run."""
    table = reward_by_cost(run)
    curves = {arm: flops_curve(table, arm) for arm in run.arms}
    return Numbers(
        reward_by_cost=table,
        signal=signal_by_difficulty(run),
        cost=run.costs,
        gains=_gains(run),
        comparisons=compare_arms(run, curves),
        influence={arm: measure_influence(run, arm) for arm in run.arms},
    )


def write_numbers(run: Run, numbers: Numbers, out: Path) -> None:
    """Writes metrics.json, reward_by_cost.csv, signal.csv and cost.csv into `out`."""
    write_json(out / "metrics.json", metrics(run, numbers))
    _write_csv(out / "reward_by_cost.csv", numbers.reward_by_cost)
    _write_csv(out / "signal.csv", numbers.signal)
    _write_csv(out / "cost.csv", numbers.cost)


def counted_costs(run: Run, policy: str, arm: str) -> pd.DataFrame:
    """Returns the stages whose cost counts for an arm, up to a policy on its chain.

    These are sampling and updates of the arm's rounds. The profile counts from the start if the
    arm, or another arm on its chain, reads it. Warm-up and evaluation never count.
    """
    chain = run.chain(arm)
    rounds = chain[1 : chain.index(policy) + 1]
    arms = {arm, *(run.params.rounds[name].arm for name in chain[1:])}
    kinds = KINDS_IN_BUDGET[0 if any(reads_profile(run.params, each) for each in arms) else 1 :]
    return run.costs[run.costs["kind"].isin(kinds) & run.costs["round"].isin(["", *rounds])]


def cost_of(run: Run, policy: str, arm: str) -> dict[str, int]:
    """Returns the cumulative cost of a policy on an arm's chain."""
    counted = counted_costs(run, policy, arm)
    return {each: int(sum(counted[each])) for each in COST}


def reward_by_cost(run: Run) -> pd.DataFrame:
    """Returns one row per arm and policy on its chain, the base first."""
    rows = [
        {"arm": arm, "round": policy, **cost_of(run, policy, arm), **_scores(run, policy)}
        for arm in run.arms
        for policy in run.chain(arm)
    ]
    return pd.DataFrame(rows).astype(dict.fromkeys(COST, object))


def signal_by_difficulty(run: Run) -> pd.DataFrame:
    """Returns one row per round and bucket of prompts by outcome rate (see `buckets_of`)."""
    rows = []
    for name, rollouts in run.rollouts.items():
        if len(run.profile):
            bucket = pd.cut(rollouts["outcome_rate"], list(EDGES), labels=list(BUCKETS))
        else:
            bucket = pd.Series(WITHOUT_PROFILE[0], index=rollouts.index)
        for label in buckets_of(run):
            inside = rollouts[bucket == label]
            where = {"arm": run.params.rounds[name].arm, "round": name, "bucket": label}
            rows.append({**where, **_signal(inside)})
    return pd.DataFrame(rows)


def buckets_of(run: Run) -> tuple[str, ...]:
    """Returns the difficulty buckets; without a profile, a single bucket holds all prompts."""
    return BUCKETS if len(run.profile) else WITHOUT_PROFILE


def reward_spread(rollouts: pd.DataFrame) -> float:
    """Returns the mean over groups of the reward's standard deviation (ddof=0); NaN if none."""
    judged = rollouts[is_judged(rollouts)]
    return float(judged.groupby(GROUP)["reward"].std(ddof=0).mean())


def signal_by_step(run: Run, arm: str) -> pd.DataFrame:
    """Returns, by step, the fraction of rollouts trained and the reward spread within groups.

    Column trained_fraction is relative to the rollouts of all rounds of the arm. Column
    reward_std_within is the mean over the iterations of all rounds, weighted by the rollouts that
    have the step.
    """
    rounds = run.chain(arm)[1:]
    table = pd.concat([run.steps[name] for name in rounds])
    known = table.dropna(subset="reward_std_within")
    spread = (known["reward_std_within"] * known["rollouts"]).groupby(known["step"]).sum()
    by_step = table.groupby("step")
    return pd.DataFrame(
        {
            "trained_fraction": by_step["trained_rollouts"].sum()
            / sum(len(run.rollouts[name]) for name in rounds),
            "reward_std_within": spread / known.groupby("step")["rollouts"].sum(),
        }
    )


def lengths_by_iteration(run: Run, arm: str) -> pd.DataFrame:
    """Returns, by iteration from 1 along the arm's chain, the mean steps and the cut fraction.

    Column cut_fraction is the fraction of rollouts that the step limit ended.
    """
    rows = [
        {"mean_steps": own["steps"].mean(), "cut_fraction": 1 - own["is_finished"].mean()}
        for name in run.chain(arm)[1:]
        for _, own in run.rollouts[name].groupby("iteration")
    ]
    return pd.DataFrame(rows, index=range(1, len(rows) + 1), dtype=float)


def _signal(rollouts: pd.DataFrame) -> dict[str, Any]:
    groups = rollouts[is_judged(rollouts)].groupby(GROUP)["reward"]
    # Compared exactly: a deviation from the mean of equal floats need not be 0.
    uniform = int((groups.min() == groups.max()).sum())
    mass = float((rollouts["advantage"].abs() * rollouts["weight"]).sum())
    return {
        "groups": groups.ngroups,
        "uniform_groups": uniform,
        "rollouts": len(rollouts),
        "trained_rollouts": int((rollouts["trained_steps"] > 0).sum()),
        "advantage_mass": mass,
        "mean_group_size": len(rollouts) / groups.ngroups if groups.ngroups else np.nan,
        "reward_spread": reward_spread(rollouts),
    }


def compare_arms(run: Run, curves: Mapping[str, Curve]) -> dict[str, Comparison]:
    """Returns the comparison of each arm with the reference, the first of `curves`."""
    reference, *others = curves.values()
    means = _means(run, run.rates)
    confidence = run.params.evaluation.confidence
    return {
        curve.arm: compare(curve, reference, rates=run.rates, means=means, confidence=confidence)
        for curve in others
    }


def metrics(run: Run, numbers: Numbers) -> dict[str, Any]:
    """Returns the content of metrics.json, which `dvc metrics show` prints."""
    arms = {}
    for arm in run.arms:
        last = run.chain(arm)[-1]
        gains = {name: _rounded(asdict(each)) for name, each in numbers.gains[arm].items()}
        arms[arm] = {
            **_rounded_scores(run, last),
            "cost": cost_of(run, last, arm),
            "gain_over_base": gains.pop("mean_at_k"),
            "other_gains_over_base": gains,
            "influence": describe_influence(numbers.influence[arm]),
        }
    return {
        "k": run.scores[BASE]["k"],
        "base": _rounded_scores(run, BASE),
        "arms": arms,
        "comparisons": {arm: _comparison(run, each) for arm, each in numbers.comparisons.items()},
    }


def defined(number: float) -> float | None:
    """Returns a number as output files have it; None for NaN."""
    return None if np.isnan(number) else round(number, DIGITS)


def describe_influence(influence: Sequence[Influence]) -> dict[str, dict[str, float | None]]:
    """Returns the fields of `Influence` by judge, as output files have them."""
    return {
        each.judge: {
            name: defined(value) for name, value in each._asdict().items() if name != "judge"
        }
        for each in influence
    }


def intervals_overlap(run: Run, comparison: Comparison) -> bool:
    """Returns whether the intervals of mean at k of both arms' last policies overlap."""
    first, second = (
        run.scores[run.chain(arm)[-1]]["mean_at_k"]
        for arm in (comparison.arm, comparison.reference)
    )
    return bool(first["low"] <= second["high"] and second["low"] <= first["high"])


def _comparison(run: Run, each: Comparison) -> dict[str, Any]:
    saving = each.saving_fraction
    return {
        "reference": each.reference,
        "target_mean_at_k": round(each.target, DIGITS),
        "reference_improved": each.reference_improved,
        "reached": each.cost is not None,
        "flops": None if each.cost is None else round(each.cost),
        "reference_flops": round(each.reference_cost),
        "saving_fraction": None if saving is None else _rounded(asdict(saving)),
        "reached_fraction": round(each.reached_fraction, DIGITS),
        "difference": _rounded(asdict(each.difference)),
        "equal_flops": round(each.equal_cost),
        "difference_at_equal_flops": _rounded(asdict(each.difference_at_equal_cost)),
        "intervals_overlap": intervals_overlap(run, each),
    }


def _gains(run: Run) -> dict[str, dict[str, Interval]]:
    confidence = run.params.evaluation.confidence
    gains: dict[str, dict[str, Interval]] = {arm: {} for arm in run.arms}
    for score, values in run.per_prompt.items():
        means = _means(run, values)
        for arm in run.arms:
            pair = (run.chain(arm)[-1], BASE)
            gains[arm][score] = difference(values, means, pair, confidence=confidence)
    return gains


def _means(run: Run, values: pd.DataFrame) -> pd.DataFrame:
    """Returns `resample_means`; the resamples of all scores have the same prompts."""
    resamples = run.params.evaluation.bootstrap_resamples
    draws = draw_resamples(len(values), resamples=resamples, seed=run.params.seed)
    return resample_means(values, draws)


def changes_by_family(run: Run) -> dict[str, dict[str, Change]]:
    """Returns mean at k and its change against the base, by policy and family.

    Prompts are resampled within a family; the same draws serve all policies.
    """
    found: dict[str, dict[str, Change]] = {str(name): {} for name in run.rates}
    for family, rates in run.rates.groupby(run.families):
        means = _means(run, rates)
        for name in found:
            change = difference(
                rates, means, (name, BASE), confidence=run.params.evaluation.confidence
            )
            found[name][str(family)] = Change(
                value=float(rates[name].mean()), prompts=len(rates), change=change
            )
    return found


def flops_curve(table: pd.DataFrame, arm: str) -> Curve:
    """Returns an arm's curve over FLOPs from the table `reward_by_cost`."""
    own = table[table["arm"] == arm]
    flops = tuple(float(each) for each in own["flops"])
    return Curve(arm=arm, policies=tuple(own["round"]), costs=flops)


def _scores(run: Run, policy: str) -> dict[str, float]:
    scores = run.scores[policy]
    mean = scores["mean_at_k"]
    values = {name: scores[name]["value"] for name in run.score_names}
    columns = {**values, "mean_low": mean["low"], "mean_high": mean["high"]}
    return {name: columns[name] for name in SCORE_COLUMNS if name in columns}


def _rounded_scores(run: Run, policy: str) -> dict[str, Any]:
    scores = run.scores[policy]
    found: dict[str, Any] = {name: _rounded(scores[name]) for name in reported_scores(run.params)}
    if "corpus" in scores:
        found["corpus"] = {
            kind: {family: _rounded(each) for family, each in by_family.items()}
            for kind, by_family in scores["corpus"].items()
        }
    return found


def _rounded(interval: Mapping[str, float | None]) -> dict[str, float | None]:
    return {name: None if each is None else round(each, DIGITS) for name, each in interval.items()}


def _write_csv(path: Path, table: pd.DataFrame) -> None:
    text = table.to_csv(index=False, float_format=f"%.{DIGITS}f", lineterminator="\n")
    write_bytes(path, text.encode())
