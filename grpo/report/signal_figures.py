"""Figures of the learning signal by difficulty, round, step and update, as SVG text."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator, PercentFormatter

from grpo.allocation.forecast import BINS
from grpo.params.parameters import BASE
from grpo.report.allocations import Allocated
from grpo.report.numbers import (
    Numbers,
    buckets_of,
    lengths_by_iteration,
    reward_spread,
    signal_by_step,
)
from grpo.report.reading import CURVES, OPTIONAL_CURVES, Run
from grpo.report.style import INK, MARKERS, MUTED, Canvas, Panel, color_of

DIFFICULTY = "the prompt's success rate in the profile"
NO_PROFILE = "no profile was drawn: no arm reads one (profile.when: always draws it)"
MOST_RATES = 10  # of a histogram, besides 0
FEW_STEPS = 16  # curves with at most so many points have markers
LABEL_OF_CURVE = {
    "reward_mean": "mean reward of the batch",
    "uniform_group_fraction": "share of groups of equal outcomes",
    "clip_fraction": "share of clipped steps",
    "kl_to_start": "KL to the iteration's start (nats)",
    "grad_norm": "gradient norm before clipping",
    "entropy_mean": "entropy (nats per step)",
}


def draw_rates(run: Run) -> Panel:
    """Draws how many evaluation prompts each policy solves how often: the base, then last ones."""
    edges = np.linspace(0, 1, min(run.scores[BASE]["k"], MOST_RATES) + 2)
    lasts = {arm: run.chain(arm)[-1] for arm in run.arms}
    canvas = Canvas([3.0], share_x=False)
    width = 0.84 / (len(lasts) + 1)
    for i, (label, name) in enumerate({BASE: BASE, **lasts}.items()):
        color = MUTED if name == BASE else color_of(i - 1)
        counts, _ = np.histogram(run.rates[name].clip(0, 1), edges)
        x = np.arange(len(counts)) + (i - len(lasts) / 2) * width
        shares = counts / len(run.rates)
        drawn = canvas.axes.bar(x, shares, width=0.92 * width, color=color, label=label)
        for share, bar in zip(shares, drawn, strict=True):
            canvas.tip(bar, f"{name}: {share:.0%} of prompts")
    rates = np.linspace(0, 1, len(edges) - 1)
    canvas.axes.set_xticks(range(len(rates)), [f"{each:.2f}" for each in rates])
    canvas.axes.grid(axis="x", visible=False)
    canvas.axes.set_ylabel("evaluation prompts")
    canvas.axes.set_xlabel("share of a prompt's rollouts that solve it")
    _finish(canvas, percent=True)
    return Panel(
        title="Prompts by success rate",
        caption=(
            "Groups of prompts at both ends have no signal: every rollout fails, or every one "
            "succeeds. Grey is the base; colors are each arm's last policy."
        ),
        svg=canvas.svg("rates", "share of evaluation prompts by success rate for each policy"),
    )


def draw_uniform_groups(run: Run, numbers: Numbers) -> Panel:
    """Draws the fraction of groups whose rewards are all equal, by difficulty."""
    signal = numbers.signal
    canvas = Canvas([3.0], share_x=False)
    _draw_bars(canvas, 0, run, _by_bucket(signal, "uniform_groups") / _groups(signal), ".0%")
    canvas.axes.set_ylabel("groups of equal rewards")
    canvas.axes.set_xlabel(_difficulty(run))
    _finish(canvas, percent=True)
    return Panel(
        title="Groups without signal",
        caption=(
            "If all rewards of a group are equal, every advantage is 0. Small groups have equal "
            "rewards more often, but cost less."
        ),
        svg=canvas.svg("uniform-groups", "share of uniform groups by difficulty for each arm"),
    )


def draw_advantage_mass(run: Run, numbers: Numbers) -> Panel:
    """Draws the shares of rollouts and of absolute advantage, by difficulty."""
    canvas = Canvas([2.1, 2.1], share_x=True)
    named = {"rollouts": "of rollouts", "advantage_mass": "of |advantage|"}
    for row, (column, label) in enumerate(named.items()):
        amount = _by_bucket(numbers.signal, column)
        _draw_bars(canvas, row, run, amount / amount.sum().replace(0, np.nan), f".0% {label}")
        canvas.subplots[row].set_ylabel(label)
    canvas.subplots[-1].set_xlabel(_difficulty(run))
    _finish(canvas, percent=True)
    return Panel(
        title="Where the signal was",
        caption=(
            "If an arm's lower bar is higher than its upper bar, rollouts there had more signal "
            "than the arm's average."
        ),
        svg=canvas.svg("advantage-mass", "share of rollouts and of advantage by difficulty"),
    )


def draw_group_sizes(run: Run, numbers: Numbers) -> Panel:
    """Draws the mean number of rollouts per prompt, by difficulty."""
    signal = numbers.signal
    canvas = Canvas([2.7], share_x=False)
    _draw_bars(canvas, 0, run, _by_bucket(signal, "rollouts") / _groups(signal), ".1f")
    canvas.axes.set_ylabel("rollouts per prompt")
    canvas.axes.set_xlabel(_difficulty(run))
    _finish(canvas, percent=False)
    return Panel(
        title="Group sizes",
        caption="Mean number of rollouts per prompt; a gap means that the arm chose no prompt.",
        svg=canvas.svg("group-sizes", "mean rollouts per prompt by difficulty for each arm"),
    )


def draw_allocation(run: Run, allocated: Mapping[str, Allocated]) -> Panel | None:
    """Draws where online allocations spent rollouts, and their expected against solved rates."""
    if not allocated:
        return None
    canvas = Canvas([2.1, 2.7], share_x=True)
    shares, rates = canvas.subplots
    width = 0.8 / (BINS * len(allocated))
    for number, (arm, each) in enumerate(allocated.items()):
        color = color_of(run.arms.index(arm))
        middle = np.array([part.low for part in each.bins]) + 0.5 / BINS
        x = middle + (number - (len(allocated) - 1) / 2) * width
        drawn = shares.bar(
            x, [part.share for part in each.bins], width=width, color=color, label=arm
        )
        for part, bar in zip(each.bins, drawn, strict=True):
            canvas.tip(bar, f"{arm}: {part.share:.0%} of rollouts, expected from {part.low:.2f} on")
        canvas.curve(
            rates,
            [part.expected for part in each.bins],
            [part.solved for part in each.bins],
            color=color,
            marker=MARKERS[run.arms.index(arm) % 6],
            label=arm,
            tips=[f"expected {part.expected:.2f}, solved {part.solved:.2f}" for part in each.bins],
        )
    (line,) = rates.plot([0, 1], [0, 1], color=MUTED, linestyle=":", linewidth=1.4)
    canvas.tip(line, "solved as expected")
    shares.set_ylabel("of rollouts")
    rates.set_ylabel("solved")
    rates.set_xlabel("expected success rate")
    rates.set_xlim(0, 1)
    rates.set_ylim(0, 1)
    _finish(canvas, percent=True)
    return Panel(
        title="Allocation by expected rate",
        caption=(
            "Above, the share of rollouts by the success rate that the posterior expected. Below, "
            "the rate that was solved; on the dotted line, both are equal."
        ),
        svg=canvas.svg("allocation", "share of rollouts and solved rate by expected success rate"),
    )


def draw_reward_spread(run: Run) -> Panel:
    """Draws the reward's standard deviation within groups, by round."""
    canvas = Canvas([2.7], share_x=False)
    for i, arm in enumerate(run.arms):
        rounds = run.chain(arm)[1:]
        spread = [reward_spread(run.rollouts[name]) for name in rounds]
        x = range(1, len(spread) + 1)
        tips = [f"{name}, {value:.3f}" for name, value in zip(rounds, spread, strict=True)]
        style: dict[str, Any] = {"color": color_of(i), "marker": MARKERS[i % 6], "label": arm}
        line = canvas.curve(canvas.axes, x, spread, tips=tips, **style)
        line.set_clip_on(False)  # keeps markers at the upper edge complete
    canvas.axes.set_ylim(bottom=0)
    canvas.axes.set_ylabel("standard deviation")
    _count_along(canvas, "round")
    _finish(canvas, percent=False)
    return Panel(
        title="Spread of reward within groups",
        caption=(
            "The mean over a round's groups. At 0, all rollouts of every prompt have the same "
            "reward, so there is no signal."
        ),
        svg=canvas.svg("reward-spread", "deviation of reward within groups by round for each arm"),
    )


def draw_signal_by_step(run: Run) -> Panel:
    """Draws, by step, the fraction of rollouts trained and the reward spread within groups."""
    canvas = Canvas([2.1, 2.1], share_x=True)
    labels = {"trained_fraction": "rollouts trained", "reward_std_within": "spread of reward"}
    for i, arm in enumerate(run.arms):
        signal = signal_by_step(run, arm)
        marker = MARKERS[i % 6] if len(signal) <= FEW_STEPS else ""
        for axes, column in zip(canvas.subplots, labels, strict=True):
            x, y = signal.index.tolist(), signal[column].tolist()
            tips = [f"step {step}, {value:.3g}" for step, value in zip(x, y, strict=True)]
            style: dict[str, Any] = {"color": color_of(i), "marker": marker, "label": arm}
            line = canvas.curve(axes, x, y, tips=tips if marker else (), **style)
            line.set_clip_on(False)
    for axes, label in zip(canvas.subplots, labels.values(), strict=True):
        axes.set_ylim(bottom=0)
        axes.set_ylabel(label)
    canvas.axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _count_along(canvas, f"step of the rollout: a {run.params.modality.step_name}")
    _finish(canvas, percent=False)
    return Panel(
        title="Signal by step",
        caption=(
            "Above, the share of rollouts whose step is trained. Below, the deviation of reward "
            "within the groups that have the step: the signal of that step."
        ),
        svg=canvas.svg("steps", "share of rollouts trained and spread of reward by step"),
    )


def draw_lengths(run: Run) -> Panel:
    """Draws the mean length of rollouts and the share that the step limit cut, by iteration."""
    canvas = Canvas([2.1, 2.1], share_x=True)
    labels = {"mean_steps": "mean steps", "cut_fraction": "cut at the limit"}
    for i, arm in enumerate(run.arms):
        lengths = lengths_by_iteration(run, arm)
        marker = MARKERS[i % 6] if len(lengths) <= FEW_STEPS else ""
        for axes, (column, label) in zip(canvas.subplots, labels.items(), strict=True):
            x, y = lengths.index.tolist(), lengths[column].tolist()
            tips = [f"iteration {n}, {label} {value:.3g}" for n, value in zip(x, y, strict=True)]
            style: dict[str, Any] = {"color": color_of(i), "marker": marker, "label": arm}
            line = canvas.curve(axes, x, y, tips=tips if marker else (), **style)
            line.set_clip_on(False)
            axes.set_ylim(bottom=0)
            axes.set_ylabel(label)
    canvas.subplots[1].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _count_along(canvas, "iteration")
    _finish(canvas, percent=False)
    return Panel(
        title="Length of rollouts",
        caption=(
            f"Steps are {run.params.modality.step_name}s of training rollouts. If length grows "
            "while reward does not, look at the rollouts."
        ),
        svg=canvas.svg("lengths", "mean steps and share of cut rollouts by iteration for each arm"),
    )


def draw_training(run: Run) -> Panel:
    """Draws training metrics of each arm by update, with its rounds concatenated."""
    recorded = {column for table in run.updates.values() for column in table.columns}
    curves = [*CURVES, *(each for each in OPTIONAL_CURVES if each in recorded)]
    canvas = Canvas([1.75] * len(curves), share_x=True)
    for axes, curve in zip(canvas.subplots, curves, strict=True):
        for i, arm in enumerate(run.arms):
            tables = [run.updates[name] for name in run.chain(arm)[1:]]
            values = np.concatenate(
                [each[curve] if curve in each else np.full(len(each), np.nan) for each in tables]
            ).tolist()
            x = range(1, len(values) + 1)
            canvas.curve(axes, x, values, color=color_of(i), label=arm, width=1.6)
        axes.set_title(LABEL_OF_CURVE[curve])
        axes.yaxis.set_major_locator(MaxNLocator(4))
    _count_along(canvas, "update")
    _finish(canvas, percent=False)
    return Panel(
        title="Updates",
        caption=(
            "Rewards are of the prompts that each arm chose, so compare arms by evaluation only. "
            "KL returns to 0 at the start of an iteration."
        ),
        svg=canvas.svg(
            "training", f"per update: {', '.join(LABEL_OF_CURVE[each] for each in curves)}"
        ),
    )


def _by_bucket(signal: pd.DataFrame, column: str) -> pd.DataFrame:
    """Returns the sum of a column over each arm's rounds, by bucket (row) and arm (column)."""
    return signal.pivot_table(index="bucket", columns="arm", values=column, aggfunc="sum")


def _groups(signal: pd.DataFrame) -> pd.DataFrame:
    return _by_bucket(signal, "groups").replace(0, np.nan)


def _difficulty(run: Run) -> str:
    """Returns the label of the difficulty axis."""
    return DIFFICULTY if len(run.profile) else NO_PROFILE


def _draw_bars(canvas: Canvas, row: int, run: Run, heights: pd.DataFrame, form: str) -> None:
    """Draws a cluster of bars per difficulty bucket, one bar per arm.

    Args:
      row: Of the subplot.
      form: A format specification of a height, with words after a space.
    """
    axes = canvas.subplots[row]
    width = 0.8 / len(run.arms)
    buckets = buckets_of(run)
    for i, arm in enumerate(run.arms):
        x = np.arange(len(buckets)) + (i - (len(run.arms) - 1) / 2) * width
        values = heights.loc[list(buckets), arm]
        drawn = axes.bar(x, values, width=0.92 * width, color=color_of(i), label=arm)
        form_of_number, _, words = form.partition(" ")
        for bucket, value, bar in zip(buckets, values, drawn, strict=True):
            canvas.tip(bar, f"{arm}, {bucket}: {value:{form_of_number}} {words}".strip())
    axes.set_xticks(range(len(buckets)), buckets)
    axes.grid(axis="x", visible=False)
    axes.tick_params(axis="x", labelcolor=INK)
    axes.set_ylim(bottom=0)


def _count_along(canvas: Canvas, label: str) -> None:
    """Labels the shared horizontal axis and limits it to integer ticks."""
    canvas.subplots[-1].set_xlabel(label)
    canvas.subplots[-1].xaxis.set_major_locator(MaxNLocator(8, integer=True))


def _finish(canvas: Canvas, *, percent: bool) -> None:
    """Adds the legend and formats the vertical axes as percentages if asked."""
    canvas.legend(canvas.axes, columns=3)
    for axes in canvas.subplots if percent else []:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.yaxis.set_major_locator(MaxNLocator(4))
