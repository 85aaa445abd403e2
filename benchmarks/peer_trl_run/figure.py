"""The figure: evaluation reward over CPU seconds and over wall seconds, from the process start."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.peer_trl_run.settings import ARMS
from grpo.report.style import ARM_COLORS, INK, MARKERS, styled

NAMES = {"trl": "TRL", "same": "same algorithm"}  # of sides that are not called by their name


def draw(results: dict[str, Any]) -> Figure:
    """Returns a row of two panels per size: a line per run, from the base's reward at 0 s."""
    runs = results["runs"]
    with styled():
        figure = Figure(figsize=(9.6, 3.4 * len(runs)), layout="constrained")
        axes = figure.subplots(len(runs), 2, squeeze=False, sharey="row")
        for row, (size, seeds) in zip(axes, runs.items()):
            for panel, (cost, title) in zip(row, {"cpu": "CPU s", "wall": "wall s"}.items()):
                _draw_runs(panel, seeds, cost)
                panel.set_title(f"setting {size}")
                panel.set_xlabel(f"{title} from the start of the process")
                panel.set_xlim(left=0)
            row[0].set_ylabel("mean@k")
        named = [each.get_legend_handles_labels() for each in axes[:, 0]]
        lines = {label: line for handles, labels in named for line, label in zip(handles, labels)}
        axes[0][0].legend([*lines.values()], [*lines])
    return figure


def _draw_runs(panel: Axes, seeds: dict[str, Any], cost: str) -> None:
    """Draws the evaluated policies of every run; the label is given once per side."""
    for index, side in enumerate(("trl", *ARMS)):
        color = INK if side == "trl" else ARM_COLORS[index - 1]
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
