"""Conclusions from the numbers as sentences that state whether a difference is significant."""

from collections.abc import Callable, Mapping

from grpo.report.comparison import Comparison, Curve, Interval
from grpo.report.numbers import Numbers, cost_of, flops_curve, intervals_overlap
from grpo.report.reading import Run
from grpo.report.words import (
    format_change,
    format_flops,
    format_percent,
    format_rate,
    format_seconds,
    listed,
)
from grpo.sampling.evaluation import LEAST_PROMPTS


def verdict(
    run: Run, numbers: Numbers, seconds: Mapping[str, Curve], timed: Mapping[str, Comparison]
) -> list[str]:
    """Returns one sentence per arm other than the reference, or one about the only arm.

    Arms that reached the reference's final reward come first, by what they saved.

    Args:
      seconds: Empty if a stage was not measured here; then no sentence has times.
      timed: The comparisons over seconds.
    """
    if not numbers.comparisons:
        return [_single_arm(run, numbers)]
    ordered = sorted(numbers.comparisons.values(), key=_rank)
    return [_headline(run, each, seconds, timed.get(each.arm)) for each in ordered]


def _rank(each: Comparison) -> tuple[bool, float]:
    if each.saving_fraction is None:
        return True, -each.difference.value
    return False, -each.saving_fraction.value


def _headline(
    run: Run, each: Comparison, seconds: Mapping[str, Curve], timed: Comparison | None
) -> str:
    """Returns how much less compute and time an arm needed for the reference's final reward."""
    goal = f"{each.reference}'s final mean@{_k(run)} of {format_rate(each.target)}"
    if not each.reference_improved:
        return (
            f"{each.reference} did not improve on its base ({goal}), so there is no target for "
            f"{each.arm} to reach."
        )
    if each.saving_fraction is None:
        end = run.scores[run.chain(each.arm)[-1]]["mean_at_k"]["value"]
        spent = [_flops(run, arm) for arm in (each.arm, each.reference)]
        time = ""
        if seconds:
            own, other = (seconds[arm].costs[-1] for arm in (each.arm, each.reference))
            time = f" and {format_percent(own / other)} of its time"
        return (
            f"{each.arm} never reached {goal}: it ended at {format_rate(end)}, a difference of "
            f"{_format_change(run, each.difference)}, "
            f"with {format_percent(spent[0] / spent[1])} of {each.reference}'s compute{time}."
        )
    confidence = format_percent(run.params.evaluation.confidence)
    reached = f"{each.arm} reached {goal} with {_amount(each.saving_fraction.value)} compute"
    if timed is not None and timed.saving_fraction is not None:
        reached += f" and {_amount(timed.saving_fraction.value)} time"
    if not can_judge(run):
        return f"{reached}; {_too_few_prompts(run)}."
    interval = f"{confidence} interval of compute: {_format_saving(each.saving_fraction)}"
    if is_certain(each.saving_fraction):
        return f"{reached} ({interval})."
    return f"{reached}, but equal compute is not excluded ({interval})."


def learned(run: Run, numbers: Numbers) -> str:
    """Returns one sentence on how much each arm changed mean at k of the base."""
    gains = {arm: each["mean_at_k"] for arm, each in numbers.gains.items()}
    changes = [f"with {arm} by {_format_change(run, gain)}" for arm, gain in gains.items()]
    judged = "" if can_judge(run) else f"; {_too_few_prompts(run)}"
    return f"Learned: mean@{_k(run)} of the base changed {listed(changes)}{judged}."


def saved(
    run: Run, numbers: Numbers, seconds: Mapping[str, Curve], timed: Mapping[str, Comparison]
) -> str:
    """Returns one sentence on the time of each arm relative to the reference's.

    Args:
      seconds: Empty if a stage was not measured here; then the sentence is about compute.
      timed: The comparisons over seconds.
    """
    kind, curves, compared, note = "time", seconds, timed, ""
    form: Callable[[float], str] = format_seconds
    if not seconds:
        kind, compared, form = "compute", numbers.comparisons, format_flops
        curves = {arm: flops_curve(numbers.reward_by_cost, arm) for arm in run.arms}
        note = " (not all stages were timed here)"
    ends = {arm: curve.costs[-1] for arm, curve in curves.items()}
    reference = run.arms[0]
    if not compared:
        return f"Saved: {reference} took {form(ends[reference])}; there is no other arm{note}."
    said = [
        f"{arm} took {form(ends[arm])}, {_less(ends[arm], ends[reference], kind)} than "
        f"{reference} ({form(ends[reference])}), {_at_target(run, each, form)}"
        for arm, each in compared.items()
    ]
    return f"Saved: {'; '.join(said)}{note}."


def _at_target(run: Run, each: Comparison, form: Callable[[float], str]) -> str:
    """Returns at what cost an arm reached the reference's final mean at k."""
    goal = f"{each.reference}'s final mean@{_k(run)}"
    if not each.reference_improved:
        return f"and {each.reference} did not improve on its base"
    if each.cost is None:
        return f"and never reached {goal}"
    return f"and reached {goal} after {form(each.cost)} instead of {form(each.reference_cost)}"


def _less(cost: float, reference: float, kind: str) -> str:
    """Returns e.g. `43 % less time`."""
    return f"{_amount(1 - cost / reference)} {kind}" if reference else f"more {kind}"


def compute_needed(each: Comparison) -> str | None:
    """Returns a sentence with the FLOPs of both arms at the target; None if never reached."""
    if each.cost is None:
        return None
    cost, reference_cost = format_flops(each.cost), format_flops(each.reference_cost)
    return f"{each.arm} needed {cost} where {each.reference} needed {reference_cost}."


def headline_seconds(run: Run, each: Comparison) -> str:
    """Returns the headline for seconds on this machine instead of compute."""
    if each.saving_fraction is None or each.cost is None:
        equal = _at_equal(run, each, f"time ({format_seconds(each.equal_cost)})")
        return f"In time on this machine: {equal}."
    cost = f"{format_seconds(each.cost)} instead of {format_seconds(each.reference_cost)}"
    return (
        f"In time on this machine, {each.arm} needed {_amount(each.saving_fraction.value)}: {cost}."
    )


def final_difference(run: Run, each: Comparison) -> str:
    """Returns the difference in mean at k at equal compute and between the last policies."""
    overlap = "overlap" if intervals_overlap(run, each) else "do not overlap"
    equal = _at_equal(run, each, f"compute ({format_flops(each.equal_cost)})")
    if not can_judge(run):
        return (
            f"In mean@{_k(run)} over the same prompts, {equal}; "
            f"at their ends, {_format_change(run, each.difference)}; {_too_few_prompts(run)}."
        )
    return (
        f"In mean@{_k(run)} over the same prompts, {equal}; "
        f"at their ends, {_format_change(run, each.difference)}, and their own intervals {overlap}."
    )


def can_judge(run: Run) -> bool:
    """Returns whether there are enough evaluation prompts for a valid interval."""
    return len(run.rates) >= LEAST_PROMPTS


def _too_few_prompts(run: Run) -> str:
    return f"too few prompts to judge ({len(run.rates)})"


def _at_equal(run: Run, each: Comparison, cost: str) -> str:
    change = _format_change(run, each.difference_at_equal_cost)
    return f"{each.arm} minus {each.reference} at equal {cost} is {change}"


def _format_change(run: Run, change: Interval) -> str:
    """Returns a difference; with enough prompts, also its interval and significance."""
    if not can_judge(run):
        return format_change(change.value)
    assert change.low is not None
    assert change.high is not None
    judged = "significant" if is_certain(change) else "not significant"
    bounds = f"{format_change(change.low)} to {format_change(change.high)}"
    return f"{format_change(change.value)} ({bounds}, {judged})"


def is_certain(interval: Interval) -> bool:
    """Returns whether the whole interval has the sign of the value."""
    low = float("-inf") if interval.low is None else interval.low
    high = float("-inf") if interval.high is None else interval.high
    return low > 0 if interval.value > 0 else interval.value < 0 and high < 0


def _single_arm(run: Run, numbers: Numbers) -> str:
    (arm,) = run.arms
    gain = numbers.gains[arm]["mean_at_k"]
    assert gain.low is not None
    assert gain.high is not None
    if not can_judge(run):
        return (
            f"{arm} changed mean@{_k(run)} of its base by {format_change(gain.value)}; "
            f"{_too_few_prompts(run)}. There is no other arm to compare."
        )
    judged = "improved on" if gain.low > 0 else "did not significantly improve on"
    return (
        f"{arm} {judged} its base: mean@{_k(run)} changed by {format_change(gain.value)} "
        f"({format_change(gain.low)} to {format_change(gain.high)}). "
        "There is no other arm to compare."
    )


def _amount(saving: float) -> str:
    return f"{format_percent(abs(saving))} {'less' if saving >= 0 else 'more'}"


def _format_saving(saving: Interval) -> str:
    bounds = [
        "never reached" if each is None else _amount(each) for each in (saving.low, saving.high)
    ]
    return " to ".join(bounds)


def _flops(run: Run, arm: str) -> int:
    return cost_of(run, run.chain(arm)[-1], arm)["flops"]


def _k(run: Run) -> int:
    return int(run.scores[run.chain(run.arms[0])[0]]["k"])
