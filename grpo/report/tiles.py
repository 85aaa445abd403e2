"""Tiles at the top of the page: what was learned, what it cost, and what was saved.

Each tile also has one sentence about what confounds its answer.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from grpo.params.parameters import BASE
from grpo.report.comparison import Comparison, Curve, Interval
from grpo.report.numbers import Numbers, cost_of
from grpo.report.reading import Run
from grpo.report.style import css_color_of
from grpo.report.verdict import can_judge, is_certain
from grpo.report.words import (
    format_change,
    format_count,
    format_flops,
    format_percent,
    format_rate,
    format_seconds,
)

NOT_TIMED = "time not measured here"


@dataclass(frozen=True, kw_only=True)
class Line:
    """The answer of one arm."""

    arm: str
    color: str
    value: str  # shown large
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A question with an answer per arm."""

    title: str
    lines: list[Line]
    caveat: str  # what confounds the answer


def make_tiles(
    run: Run,
    numbers: Numbers,
    seconds: Mapping[str, Curve],
    timed: Mapping[str, Comparison],
) -> list[Tile]:
    """Returns the three tiles.

    Args:
      seconds: Empty if a stage was not measured here.
      timed: The comparisons over seconds.
    """
    return [_learned(run, numbers), _cost(run, seconds), _cheaper(run, numbers, timed)]


def _learned(run: Run, numbers: Numbers) -> Tile:
    before = run.scores[BASE]["mean_at_k"]["value"]
    lines = []
    for arm in run.arms:
        gain = numbers.gains[arm]["mean_at_k"]
        after = run.scores[run.chain(arm)[-1]]["mean_at_k"]["value"]
        ends = f"mean@{run.scores[BASE]['k']} from {format_rate(before)} to {format_rate(after)}"
        lines.append(_line(run, arm, format_change(gain.value), ends, _judge(run, gain)))
    return Tile(
        title="Learned?",
        lines=lines,
        caveat=(
            f"One training seed ({run.params.seed}): the intervals cover evaluation prompts, not "
            "the variation between seeds."
        ),
    )


def _judge(run: Run, gain: Interval) -> str:
    """Returns whether a gain is significant, with its interval if there is one."""
    if not can_judge(run):
        return f"too few prompts to judge ({len(run.rates)})"
    assert gain.low is not None
    assert gain.high is not None
    bounds = f"{format_change(gain.low)} to {format_change(gain.high)}"
    return f"{bounds}: {'significant' if is_certain(gain) else 'not significant'}"


def _cost(run: Run, seconds: Mapping[str, Curve]) -> Tile:
    lines = []
    for arm in run.arms:
        flops = format_flops(float(cost_of(run, run.chain(arm)[-1], arm)["flops"]))
        time = f"{format_seconds(seconds[arm].costs[-1])} here" if arm in seconds else NOT_TIMED
        lines.append(_line(run, arm, flops, time))
    updates = {
        arm: format_count(sum(len(run.updates[name]) for name in run.chain(arm)[1:]))
        for arm in run.arms
    }
    return Tile(
        title="Cost?",
        lines=lines,
        caveat=_compared(
            "number of updates", updates, "Fewer updates cost less and may learn less."
        ),
    )


def _cheaper(run: Run, numbers: Numbers, timed: Mapping[str, Comparison]) -> Tile:
    lines = []
    for arm, each in numbers.comparisons.items():
        value, *notes = _saving(run, each, "FLOPs")
        in_time = _saving(run, timed[arm], "time") if timed else [NOT_TIMED]
        lines.append(_line(run, arm, value, *notes, ", ".join(in_time)))
    staleness = {arm: str(run.params.arms[arm].training.staleness) for arm in run.arms}
    return Tile(
        title=f"Cheaper than {run.arms[0]} at equal reward?" if lines else "Cheaper?",
        lines=lines,
        caveat=_compared(
            "staleness",
            staleness,
            "Staleness overlaps sampling and updates: less time, equal FLOPs.",
        ),
    )


def _saving(run: Run, each: Comparison, unit: str) -> list[str]:
    """Returns what an arm saves at the reference's final reward, and how certain that is."""
    if not each.reference_improved:
        return ["no target", f"{each.reference} did not improve on its base"]
    if each.saving_fraction is None:
        return [f"never in {unit}", f"ends below {format_rate(each.target)}"]
    saving = each.saving_fraction.value
    said = f"{format_percent(abs(saving))} {'less' if saving >= 0 else 'more'} {unit}"
    if not can_judge(run):
        return [said, f"too few prompts to judge ({len(run.rates)})"]
    return [said, "significant" if is_certain(each.saving_fraction) else "not significant"]


def _compared(what: str, by_arm: Mapping[str, str], effect: str) -> str:
    """Returns the values of the arms, and the effect if they differ."""
    values = list(dict.fromkeys(by_arm.values()))
    if len(values) > 1:
        named = ", ".join(f"{arm} {value}" for arm, value in by_arm.items())
        return f"Different {what}: {named}. {effect}"
    if len(by_arm) > 1:
        return f"All arms have the same {what} ({values[0]})."
    return f"There is one arm, with {what} {values[0]}."


def _line(run: Run, arm: str, value: str, *notes: str) -> Line:
    return Line(arm=arm, color=css_color_of(run.arms.index(arm)), value=value, notes=notes)
