"""The figure: rewards over the seconds from the process start."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.peer_trl_run.settings import ARMS, SAME
from grpo.report.style import ARM_COLORS, INK, MARKERS, styled

NAMES = {"trl": "TRL", SAME: "same algorithm"}  # of sides that are not called by their name
SMOOTHED = 4  # updates


def draw(results: dict[str, dict[str, Any]]) -> Figure:
    """Returns a row of panels per size, of each size's results.

    Evaluated policies over CPU and wall seconds, a line per run, from the base's reward at 0 s. And
    the rewards on which both sides of one algorithm train; other arms choose other prompts.
    """
    runs = {size: found["runs"] for size, found in results.items()}
    with styled():
        figure = Figure(figsize=(12.6, 3.4 * len(runs)), layout="constrained")
        axes = figure.subplots(len(runs), 3, squeeze=False)
        for row, (size, seeds) in zip(axes, runs.items()):
            row[0].sharey(row[1])
            for panel, (cost, title) in zip(row, {"cpu": "CPU s", "wall": "wall s"}.items()):
                _draw_runs(panel, seeds, cost)
                panel.set_xlabel(f"{title} from the start of the process")
            _draw_updates(row[2], seeds)
            row[2].set_xlabel("wall s from the start of the process")
            for panel in row:
                panel.set_title(f"setting {size}")
                panel.set_xlim(left=0)
            row[0].set_ylabel("evaluation: mean@k")
            row[2].set_ylabel(f"rollouts, mean of {SMOOTHED} updates")
        named = [each.get_legend_handles_labels() for each in axes[:, 0]]
        lines = {label: line for handles, labels in named for line, label in zip(handles, labels)}
        axes[0][0].legend([*lines.values()], [*lines])
    return figure


def _draw_runs(panel: Axes, seeds: dict[str, Any], cost: str) -> None:
    """Draws the evaluated policies of every run; the label is given once per side."""
    for index, side in enumerate(("trl", *ARMS)):
        color = _color(index)
        label: str | None = NAMES.get(side, side)
        for run in seeds.values():
            if side not in run:
                continue
            points = run[side]["curve"]
            panel.plot(
                [0.0, *(each[cost] for each in points)],
                [run["base"]["reward"], *(each["reward"] for each in points)],
                color=color,
                marker=MARKERS[index],
                markersize=4,
                linewidth=1.4,
                label=label,
            )
            label = None


def _draw_updates(panel: Axes, seeds: dict[str, Any]) -> None:
    """Draws the mean reward of each update's rollouts over the mean seconds, over all seeds."""
    for index, side in enumerate(("trl", SAME)):
        found = [run[side]["batches"] for run in seeds.values() if "wall" in run[side]["batches"]]
        if not found:  # a run before seconds of updates were recorded
            continue
        wall, reward = (np.mean([each[name] for each in found], 0) for name in ("wall", "reward"))
        smooth = np.convolve(reward, np.full(SMOOTHED, 1 / SMOOTHED), mode="valid")
        panel.plot(wall[SMOOTHED - 1 :], smooth, color=_color(index), linewidth=1.4)


def _color(index: int) -> str:
    """Returns the color of TRL or of an arm."""
    return ARM_COLORS[index - 1] if index else INK
