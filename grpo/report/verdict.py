"""What the numbers say, in sentences that stay honest when they say little."""

from grpo.report.comparison import Comparison, Interval
from grpo.report.numbers import Numbers, cost_of, intervals_overlap
from grpo.report.reading import Run
from grpo.report.words import say_change, say_flops, say_percent, say_rate, say_seconds
from grpo.sampling.evaluation import LEAST_PROMPTS


def verdict(run: Run, numbers: Numbers) -> list[str]:
    """Returns one sentence per arm beyond the reference, or about the only arm."""
    if not numbers.comparisons:
        return [_alone(run, numbers)]
    return [headline(run, each) for each in numbers.comparisons.values()]


def headline(run: Run, each: Comparison) -> str:
    """Returns how much less compute the arm needed to reach what the reference reached."""
    goal = f"{each.reference}'s final mean@{_k(run)} of {say_rate(each.target)}"
    if not each.reference_improved:
        return (
            f"{each.reference} did not improve on its base ({goal}), so there is nothing that "
            f"{each.arm} could reach for less."
        )
    if each.saving_fraction is None:
        end = run.scores[run.chain(each.arm)[-1]]["mean_at_k"]["value"]
        spent = [_flops(run, arm) for arm in (each.arm, each.reference)]
        return (
            f"{each.arm} never reached {goal}: it ended at {say_rate(end)}, "
            f"having spent {say_percent(spent[0] / spent[1])} of {each.reference}'s compute."
        )
    confidence = say_percent(run.params.evaluation.confidence)
    reached = f"{each.arm} reached {goal} with {_amount(each.saving_fraction.value)} compute"
    if not can_judge(run):
        return f"{reached}; {_too_few(run)}."
    interval = f"{confidence} interval: {_say_saving(each.saving_fraction)}"
    if is_certain(each.saving_fraction):
        return f"{reached} ({interval})."
    return f"{reached}, but equal compute is not excluded ({interval})."


def compute_needed(each: Comparison) -> str | None:
    """Returns the FLOPs behind the saving, or None if there is none."""
    if each.cost is None:
        return None
    cost, reference_cost = say_flops(each.cost), say_flops(each.reference_cost)
    return f"{each.arm} needed {cost} where {each.reference} needed {reference_cost}."


def headline_seconds(run: Run, each: Comparison) -> str:
    """Returns the same about seconds on this machine."""
    if each.saving_fraction is None or each.cost is None:
        equal = _at_equal(run, each, f"time ({say_seconds(each.equal_cost)})")
        return f"In time on this machine: {equal}."
    cost = f"{say_seconds(each.cost)} instead of {say_seconds(each.reference_cost)}"
    return (
        f"In time on this machine, {each.arm} needed {_amount(each.saving_fraction.value)}: {cost}."
    )


def final_difference(run: Run, each: Comparison) -> str:
    """Returns how the arms compare in mean at k, at equal compute and at their ends."""
    overlap = "overlap" if intervals_overlap(run, each) else "do not overlap"
    equal = _at_equal(run, each, f"compute ({say_flops(each.equal_cost)})")
    if not can_judge(run):
        return (
            f"In mean@{_k(run)} over the same prompts, {equal}; "
            f"at their ends, {_say_change(run, each.difference)}; {_too_few(run)}."
        )
    return (
        f"In mean@{_k(run)} over the same prompts, {equal}; "
        f"at their ends, {_say_change(run, each.difference)}, and their own intervals {overlap}."
    )


def can_judge(run: Run) -> bool:
    """Returns whether there are prompts enough for an interval to mean what it says."""
    return len(run.rates) >= LEAST_PROMPTS


def _too_few(run: Run) -> str:
    return f"too few prompts to judge ({len(run.rates)})"


def _at_equal(run: Run, each: Comparison, cost: str) -> str:
    change = _say_change(run, each.difference_at_equal_cost)
    return f"{each.arm} minus {each.reference} at equal {cost} is {change}"


def _say_change(run: Run, change: Interval) -> str:
    """Returns a difference, its interval, and whether it is more than chance, if one can tell."""
    if not can_judge(run):
        return say_change(change.value)
    assert change.low is not None
    assert change.high is not None
    judged = "significant" if is_certain(change) else "not significant"
    bounds = f"{say_change(change.low)} to {say_change(change.high)}"
    return f"{say_change(change.value)} ({bounds}, {judged})"


def is_certain(interval: Interval) -> bool:
    """Returns whether the interval excludes 0 on the value's side."""
    low = float("-inf") if interval.low is None else interval.low
    high = float("-inf") if interval.high is None else interval.high
    return low > 0 if interval.value > 0 else interval.value < 0 and high < 0


def _alone(run: Run, numbers: Numbers) -> str:
    (arm,) = run.arms
    gain = numbers.gains[arm]
    assert gain.low is not None
    assert gain.high is not None
    if not can_judge(run):
        return (
            f"{arm} changed mean@{_k(run)} of its base by {say_change(gain.value)}; "
            f"{_too_few(run)}. There is no other arm to compare."
        )
    judged = "improved on" if gain.low > 0 else "did not significantly improve on"
    return (
        f"{arm} {judged} its base: mean@{_k(run)} changed by {say_change(gain.value)} "
        f"({say_change(gain.low)} to {say_change(gain.high)}). There is no other arm to compare."
    )


def _amount(saving: float) -> str:
    return f"{say_percent(abs(saving))} {'less' if saving >= 0 else 'more'}"


def _say_saving(saving: Interval) -> str:
    bounds = [
        "never reached" if each is None else _amount(each) for each in (saving.low, saving.high)
    ]
    return " to ".join(bounds)


def _flops(run: Run, arm: str) -> int:
    return cost_of(run, run.chain(arm)[-1], arm)["flops"]


def _k(run: Run) -> int:
    return int(run.scores[run.chain(run.arms[0])[0]]["k"])
