"""Style of the figures and their reproducible conversion to SVG text."""

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

WIDTH_INCHES = 4.8  # keeps 12-point text legible on a phone
INK, MUTED, LINES = "#1b1f24", "#59636e", "#d1d9e0"
# Okabe and Ito (2008): distinguishable under all common kinds of color vision deficiency.
ARM_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MARKERS = ("o", "s", "^", "D", "v", "P")
KIND_COLORS = {
    "profile": "#cc79a7",
    "sampling": "#56b4e9",
    "simulation": "#d55e00",
    "update": "#e69f00",
    "evaluation": "#8c959f",
    "warmup": "#b5bcc4",
    "audit": "#0072b2",
    "start-up": "#8c959f",
    "judging": "#009e73",
    "weights": "#f0e442",
    "other": "#b5bcc4",
}
# CSS variables by color: the page overrides them in dark mode; a standalone figure uses the color.
VARIABLE_OF_COLOR = {
    INK: "ink",
    MUTED: "muted",
    LINES: "lines",
    **{color: f"arm-{i}" for i, color in enumerate(ARM_COLORS[:4])},
}
STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": LINES,
    "axes.grid": True,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 12,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 12,
    "axes.titlecolor": INK,
    "font.family": ["DejaVu Sans"],
    "font.size": 12,
    "grid.color": LINES,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 12,
    "legend.handlelength": 1.6,
    "legend.labelcolor": INK,
    "lines.linewidth": 2.2,
    "lines.markersize": 6,
    "svg.fonttype": "none",
    "text.color": INK,
    "xtick.color": LINES,
    "xtick.labelcolor": MUTED,
    "xtick.labelsize": 11,
    "ytick.color": LINES,
    "ytick.labelcolor": MUTED,
    "ytick.labelsize": 11,
}
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A figure of the page."""

    title: str
    caption: str  # what to look for, in one or two sentences
    svg: str


class Canvas:
    """A matplotlib figure with one column of subplots; `axes` is the first of them."""

    def __init__(self, heights_inches: Sequence[float], *, share_x: bool) -> None:
        self.figure = Figure(figsize=(WIDTH_INCHES, sum(heights_inches)), layout="constrained")
        grid = self.figure.subplots(
            len(heights_inches),
            sharex=share_x,
            squeeze=False,
            height_ratios=list(heights_inches),
        )
        self.subplots: list[Axes] = list(grid[:, 0])
        self.figure.patch.set_alpha(0)
        for axes in self.subplots:
            axes.patch.set_alpha(0)
            axes.tick_params(length=0)

    @property
    def axes(self) -> Axes:
        return self.subplots[0]

    def legend(self, axes: Axes, columns: int) -> None:
        """Puts the legend of `axes` above the subplots."""
        handles, labels = axes.get_legend_handles_labels()
        self.figure.legend(handles, labels, loc="outside upper left", ncols=columns)

    def svg(self, name: str, description: str) -> str:
        """Returns the figure as a reproducible SVG element with an accessible description."""
        stream = io.StringIO()
        with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
            self.figure.savefig(stream, format="svg", metadata=NO_METADATA)
        return _clean(stream.getvalue(), description)


@contextmanager
def styled() -> Iterator[None]:
    """Applies STYLE within the block, regardless of the user's matplotlibrc."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        yield


def color_of(index: int) -> str:
    """Returns the color of the arm at `index`."""
    return ARM_COLORS[index % len(ARM_COLORS)]


def css_color_of(index: int) -> str:
    """Returns the color of the arm at `index` as a CSS variable that the page can override."""
    return _as_css(color_of(index))


def _as_css(text: str) -> str:
    """Returns `text` with each color of VARIABLE_OF_COLOR replaced by var(--name, color)."""
    for color, variable in VARIABLE_OF_COLOR.items():
        text = text.replace(color, f"var(--{variable}, {color})")
    return text


def _clean(svg: str, description: str) -> str:
    """Returns the <svg> element without prolog, fixed size, comments and unused ids."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r' (?:width|height)="[\d.]+pt"', "", svg, count=2)
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)
    svg = re.sub(r"<!--.*?-->\n?", "", svg)
    svg = _as_css(svg)
    label = description.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1).strip()
