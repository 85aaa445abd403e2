"""The list of all figures of the page; figures of reward by cost and of cost by kind of work."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.ticker import MaxNLocator

from grpo.params.parameters import BASE
from grpo.report.allocations import allocations_by_arm
from grpo.report.comparison import Comparison, Curve
from grpo.report.numbers import Numbers, counted_costs
from grpo.report.reading import KINDS_IN_BUDGET, Run
from grpo.report.seconds import ACTIVITIES, Span, seconds_by_activity, timeline
from grpo.report.signal_figures import (
    draw_advantage_mass,
    draw_allocation,
    draw_group_sizes,
    draw_lengths,
    draw_rates,
    draw_reward_spread,
    draw_signal_by_step,
    draw_training,
    draw_uniform_groups,
)
from grpo.report.style import (
    INK,
    KIND_COLORS,
    LINES,
    MARKERS,
    MUTED,
    Canvas,
    Panel,
    color_of,
    styled,
)
from grpo.report.words import (
    flops_unit,
    format_flops,
    format_percent,
    format_rate,
    format_seconds,
)
from grpo.runtime.artifacts.files import write_bytes
from grpo.runtime.artifacts.usage import Usage

SAMPLING = ("sampling", "simulation", "judging")
LABEL_OF_KIND = {"profile": "profiling", "warmup": "warm-up", "audit": "audits"}


def draw_figures(
    run: Run,
    numbers: Numbers,
    *,
    usages: Mapping[str, Usage],
    seconds: Mapping[str, Curve],
) -> list[Panel]:
    """Returns the figures of the page in their order; figures over seconds require `seconds`."""
    with styled():
        panels = [draw_reward_by_flops(run, numbers), draw_other_scores(run, numbers)]
        if seconds:
            panels.append(draw_reward_by_seconds(run, seconds))
        panels.append(draw_rates(run))
        panels.append(draw_flops_by_kind(run, numbers))
        if seconds:
            panels.append(draw_seconds_by_activity(run, usages))
        panels += filter(None, [draw_timeline(run, usages)])
        return [
            *panels,
            draw_uniform_groups(run, numbers),
            draw_advantage_mass(run, numbers),
            draw_group_sizes(run, numbers),
            *filter(None, [draw_allocation(run, allocations_by_arm(run))]),
            draw_reward_spread(run),
            draw_signal_by_step(run),
            draw_lengths(run),
            draw_training(run),
        ]


def write_curve(run: Run, numbers: Numbers, out: Path) -> None:
    """Writes `out`/reward_by_cost.svg, which `dvc plots show` displays."""
    with styled():
        svg = draw_reward_by_flops(run, numbers).svg
    write_bytes(out / "reward_by_cost.svg", f"{svg}\n".encode())


def draw_reward_by_flops(run: Run, numbers: Numbers) -> Panel:
    """Draws mean at k over cumulative FLOPs; rings mark where arms reach the reference's end."""
    table, k = numbers.reward_by_cost, run.scores[BASE]["k"]
    scale, unit = flops_unit(max(float(each) for each in table["flops"]))
    canvas = Canvas([3.6], share_x=False)
    axes = canvas.axes
    for i, arm in enumerate(run.arms):
        own = table[table["arm"] == arm]
        x = [float(each) / scale for each in own["flops"]]
        low, mean, high = (own[each].tolist() for each in ("mean_low", "mean_at_k", "mean_high"))
        canvas.band(axes, x, low, high, color=color_of(i), tip=_interval_tip(run, arm))
        tips = _tips(own["round"], mean, map(format_flops, map(float, own["flops"])))
        style: dict[str, Any] = {"color": color_of(i), "marker": MARKERS[i % 6], "label": arm}
        canvas.curve(axes, x, mean, tips=tips, **style)
    for each in numbers.comparisons.values():
        _mark_target(canvas, each, color_of(run.arms.index(each.arm)), scale)
    axes.set_xlabel(f"{unit}s so far, profiling included")
    axes.set_ylabel(f"mean@{k}")
    canvas.legend(axes, columns=3)
    return Panel(
        title="Reward by compute",
        caption=(
            "Further left is cheaper, higher is better. The dotted line is the final value of "
            f"{run.arms[0]}; a ring marks where another arm reaches it. Bands are "
            f"{format_percent(run.params.evaluation.confidence)} intervals."
        ),
        svg=canvas.svg("reward-by-flops", f"mean@{k} over cumulative {unit}s for each arm"),
    )


def _tips(policies: Iterable[str], rewards: Iterable[float], costs: Iterable[str]) -> list[str]:
    """Returns a tooltip per policy on a curve, e.g. `plain-1, 0.512 after 3.21 TFLOP`."""
    named = zip(policies, rewards, costs, strict=True)
    return [
        f"{policy}, {format_rate(float(reward))} after {cost}" for policy, reward, cost in named
    ]


def _interval_tip(run: Run, arm: str) -> str:
    return f"{arm}: {format_percent(run.params.evaluation.confidence)} interval"


def _mark_target(canvas: Canvas, each: Comparison, color: str, scale: float) -> None:
    """Draws the target and, if the arm reaches it, a ring labeled with the saving."""
    if not each.reference_improved:
        return
    axes = canvas.axes
    line = axes.axhline(each.target, color=MUTED, linestyle=":", linewidth=1.4, zorder=1)
    canvas.tip(line, f"{each.reference} ends at {format_rate(each.target)}")
    if each.cost is None or each.saving_fraction is None:
        return
    saving = each.saving_fraction.value
    is_left = each.cost < 0.3 * each.reference_cost  # no room for a label on the left
    x = each.cost / scale
    (ring,) = axes.plot(x, each.target, "o", ms=13, mfc="none", mec=color, mew=2, zorder=5)
    canvas.tip(ring, f"{each.arm} reaches it after {format_flops(each.cost)}")
    axes.annotate(
        f"{format_percent(abs(saving))} {'less' if saving >= 0 else 'more'}",
        (each.cost / scale, each.target),
        xytext=(10 if is_left else -10, 10),
        textcoords="offset points",
        ha="left" if is_left else "right",
        fontweight="bold",
        color=INK,
    )


def draw_other_scores(run: Run, numbers: Numbers) -> Panel:
    """Draws pass at k, and greedy if the evaluation has it, over cumulative FLOPs."""
    table, k = numbers.reward_by_cost, run.scores[BASE]["k"]
    scale, unit = flops_unit(max(float(each) for each in table["flops"]))
    labels = {"greedy": "greedy", "pass_at_k": f"pass@{k}"}
    named = {score: label for score, label in labels.items() if score in run.score_names}
    title = " and ".join(named.values())
    canvas = Canvas([2.4] * len(named), share_x=True)
    for axes, (score, label) in zip(canvas.subplots, named.items(), strict=True):
        for i, arm in enumerate(run.arms):
            own = table[table["arm"] == arm]
            parts = [run.scores[name][score] for name in own["round"]]
            x = [float(each) / scale for each in own["flops"]]
            low, high = [each["low"] for each in parts], [each["high"] for each in parts]
            canvas.band(axes, x, low, high, color=color_of(i), tip=_interval_tip(run, arm))
            tips = _tips(own["round"], own[score], map(format_flops, map(float, own["flops"])))
            style: dict[str, Any] = {"color": color_of(i), "marker": MARKERS[i % 6], "label": arm}
            canvas.curve(axes, x, own[score].tolist(), tips=tips, **style)
        axes.set_ylabel(label)
        axes.yaxis.set_major_locator(MaxNLocator(5))
    canvas.subplots[-1].set_xlabel(f"{unit}s so far, profiling included")
    canvas.legend(canvas.axes, columns=3)
    return Panel(
        title=title.capitalize(),
        caption=(
            f"If mean@{k} rises while pass@{k} falls, the policy became more certain, not more "
            "capable."
        ),
        svg=canvas.svg("other-scores", f"{title} over cumulative {unit}s"),
    )


def draw_reward_by_seconds(run: Run, seconds: Mapping[str, Curve]) -> Panel:
    """Draws mean at k over the seconds measured on this machine."""
    k = run.scores[BASE]["k"]
    longest = max(curve.costs[-1] for curve in seconds.values())
    scale, unit = (60.0, "minutes") if longest >= 180 else (1.0, "seconds")
    canvas = Canvas([3.5], share_x=False)
    for i, (arm, curve) in enumerate(seconds.items()):
        means = [run.scores[name]["mean_at_k"] for name in curve.policies]
        x = [each / scale for each in curve.costs]
        low, high = [each["low"] for each in means], [each["high"] for each in means]
        canvas.band(canvas.axes, x, low, high, color=color_of(i), tip=_interval_tip(run, arm))
        value = [each["value"] for each in means]
        tips = _tips(curve.policies, value, map(format_seconds, curve.costs))
        style: dict[str, Any] = {"color": color_of(i), "marker": MARKERS[i % 6], "label": arm}
        canvas.curve(canvas.axes, x, value, tips=tips, **style)
    canvas.axes.set_xlabel(f"{unit} so far on this machine")
    canvas.axes.set_ylabel(f"mean@{k}")
    canvas.legend(canvas.axes, columns=3)
    return Panel(
        title="Reward by time",
        caption=(
            "The same curves over measured time of the profile, rollout, score and train stages, "
            "start-up included."
        ),
        svg=canvas.svg("reward-by-seconds", f"mean@{k} over measured {unit} for each arm"),
    )


def draw_flops_by_kind(run: Run, numbers: Numbers) -> Panel:
    """Draws FLOPs of profiling, sampling and updates by arm, and FLOPs outside the budget."""
    cost = numbers.cost
    bars = {}
    for arm in run.arms:
        counted = counted_costs(run, run.chain(arm)[-1], arm)
        bars[arm] = {kind: _flops_of(counted, kind) for kind in KINDS_IN_BUDGET}
    kinds = [each for each in ("evaluation", "warmup", "audit") if each in set(cost["kind"])]
    aside = {
        f"all: {LABEL_OF_KIND.get(each, each)}": {each: _flops_of(cost, each)} for each in kinds
    }
    canvas = Canvas([0.45 * (len(bars) + len(aside)) + 1.5], share_x=False)
    longest = _longest({**bars, **aside})
    scale, unit = flops_unit(longest)
    _stack_bars(canvas, {**bars, **aside}, scale, format_flops, longest)
    line = canvas.axes.axhline(len(bars) - 0.5, color=LINES, linewidth=1.4)
    canvas.tip(line, "below: part of no arm's budget")
    canvas.axes.set_xlabel(f"{unit}s")
    canvas.legend(canvas.axes, columns=3)
    return Panel(
        title="Where the compute went",
        caption=(
            "The full profile counts for an arm that reads it. Below the line is the work of all "
            "arms together that no arm's budget contains."
        ),
        svg=canvas.svg("flops-by-kind", "FLOPs by kind of work for each arm"),
    )


def draw_seconds_by_activity(run: Run, usages: Mapping[str, Usage]) -> Panel:
    """Draws the measured seconds of each arm by activity."""
    bars = {arm: seconds_by_activity(run, usages, arm) for arm in run.arms}
    used = [each for each in ACTIVITIES if any(bar[each] > 0 for bar in bars.values())]
    bars = {arm: {each: bar[each] for each in used} for arm, bar in bars.items()}
    scale = 60.0 if _longest(bars) >= 180 else 1.0
    canvas = Canvas([0.45 * len(bars) + 1.5], share_x=False)
    _stack_bars(canvas, bars, scale, format_seconds, _longest(bars))
    canvas.axes.set_xlabel("minutes" if scale > 1 else "seconds")
    canvas.legend(canvas.axes, columns=3)
    return Panel(
        title="Where the time went",
        caption="As last measured here. Start-up is imports and loading, in every stage.",
        svg=canvas.svg("seconds-by-activity", "seconds by activity for each arm"),
    )


def draw_timeline(run: Run, usages: Mapping[str, Usage]) -> Panel | None:
    """Draws what samplers and trainer did when in the last round of each arm with iterations.

    None if no such round was measured here.
    """
    rounds = [run.chain(arm)[-1] for arm in run.arms]
    known = {
        name: timeline(usages[f"train@{name}"])
        for name in rounds
        if len(run.iterations.get(name, ())) > 1 and f"train@{name}" in usages
    }
    if not any(known.values()):
        return None
    return Panel(
        title="Timeline of a round",
        caption=(
            "train@ of the last round of each arm, as last measured here. With staleness 1 and "
            "workers, samplers and trainer work at the same time."
        ),
        svg=draw_spans(known).svg("timeline", "what samplers and trainer did when, by round"),
    )


def draw_spans(spans_by_name: Mapping[str, Sequence[Span]]) -> Canvas:
    """Draws timelines, each with a lane for samplers and one for the trainer."""
    rows = {
        f"{name}, {lane}": [each for each in spans if (each.activity in SAMPLING) == is_sampling]
        for name, spans in spans_by_name.items()
        for lane, is_sampling in (("samplers", True), ("trainer", False))
    }
    canvas = Canvas([0.4 * len(rows) + 1.2], share_x=False)
    for kind in ACTIVITIES:
        label = LABEL_OF_KIND.get(kind, kind)
        for row, (name, spans) in enumerate(rows.items()):
            bars = [(each.start, each.end - each.start) for each in spans if each.activity == kind]
            drawn = canvas.axes.broken_barh(bars, (row - 0.35, 0.7), color=KIND_COLORS[kind])
            seconds = format_seconds(sum(length for _, length in bars))
            canvas.tip(drawn, f"{name}: {label}, {seconds} in {len(bars)} parts")
        if any(each.activity == kind for spans in rows.values() for each in spans):
            (empty,) = canvas.axes.barh(0, 0, color=KIND_COLORS[kind], label=label)
            canvas.tip(empty, label)
    canvas.axes.set_yticks(range(len(rows)), list(rows))
    canvas.axes.invert_yaxis()
    canvas.axes.set_xlabel("seconds after start-up")
    canvas.legend(canvas.axes, columns=3)
    return canvas


def _stack_bars(
    canvas: Canvas,
    bars: Mapping[str, Mapping[str, float]],
    scale: float,
    formatter: Callable[[float], str],
    longest: float,
) -> None:
    """Draws one horizontal bar per name with a segment per kind and the total at the end."""
    axes = canvas.axes
    labeled: set[str] = set()
    for name, segments in bars.items():
        left = 0.0
        for kind, amount in segments.items():
            label = LABEL_OF_KIND.get(kind, kind)
            style: dict[str, Any] = {"color": KIND_COLORS[kind]}
            style["label"] = None if kind in labeled else label
            labeled.add(kind)
            (bar,) = axes.barh(name, amount / scale, left=left, height=0.62, **style)
            canvas.tip(bar, f"{name}: {label}, {formatter(amount)}")
            left += amount / scale
        axes.annotate(
            formatter(left * scale),
            (left, name),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
        )
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", labelcolor=INK)
    axes.set_xlim(0, 1.33 * longest / scale or 1.0)  # room for the totals
    axes.xaxis.set_major_locator(MaxNLocator(5))


def _longest(bars: Mapping[str, Mapping[str, float]]) -> float:
    return max(sum(each.values()) for each in bars.values())


def _flops_of(cost: pd.DataFrame, kind: str) -> float:
    return float(sum(cost.loc[cost["kind"] == kind, "flops"]))
