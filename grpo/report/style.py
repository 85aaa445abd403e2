"""Style of the figures and their reproducible conversion to SVG text."""

import html
import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

WIDTH_INCHES = 4.8  # keeps 12-point text legible on a phone
# Light and dark: on a card, marks have a contrast of at least 3:1, text of 4.5:1 (WCAG 2.2). Colors
# of marks stay distinct under deuteranopia and protanopia. tests/report/test_colors.py checks both.
MARK_COLORS = {
    "blue": ("#0072b2", "#58b0e8"),
    "orange": ("#d55e00", "#ff8a3d"),
    "green": ("#1f9254", "#52d692"),
    "pink": ("#a0267f", "#f27fc6"),
    "olive": ("#515000", "#dde04a"),
    "violet": ("#34209a", "#8a72ff"),
    "gray": ("#8b929a", "#7f8893"),
    "slate": ("#333a42", "#d5dbe1"),
}
PAGE_COLORS = {
    "paper": ("#f6f8fa", "#0e1116"),
    "card": ("#ffffff", "#171b21"),
    "ink": ("#1b1f24", "#e6eaef"),
    "muted": ("#59636e", "#9aa4af"),
    "lines": ("#d1d9e0", "#353c45"),
    "accent": ("#0072b2", "#58b0e8"),
    "good": ("#1a7f37", "#4cc26a"),
    "bad": ("#b42318", "#ff8375"),
    "banner": ("#b42318", "#b42318"),
    "on-banner": ("#ffffff", "#ffffff"),
}
INK, MUTED, LINES = (PAGE_COLORS[name][0] for name in ("ink", "muted", "lines"))
ARM_COLORS = tuple(
    MARK_COLORS[name][0] for name in ("blue", "orange", "green", "pink", "olive", "violet")
)
MARKERS = ("o", "s", "^", "D", "v", "P")
COLOR_OF_KIND = {
    "profile": "pink",
    "sampling": "blue",
    "simulation": "violet",
    "update": "orange",
    "evaluation": "gray",
    "warmup": "slate",
    "audit": "green",
    "start-up": "gray",
    "judging": "green",
    "weights": "olive",
    "other": "slate",
}
KIND_COLORS = {kind: MARK_COLORS[name][0] for kind, name in COLOR_OF_KIND.items()}
# CSS variables by color: the page overrides them in dark mode; a standalone figure uses the color.
VARIABLE_OF_COLOR = {
    INK: "ink",
    MUTED: "muted",
    LINES: "lines",
    **{light: name for name, (light, _) in MARK_COLORS.items()},
}
TIP = "tip-"  # begins the group ids of marks with a tooltip
TIP_POINTS = 16  # diameter of the area around a point that shows its tooltip
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
        self.tips: list[str] = []
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

    def tip(self, artist: Artist, text: str) -> None:
        """Gives a mark a tooltip."""
        artist.set_gid(f"{TIP}{len(self.tips)}")
        self.tips.append(text)

    def curve(
        self,
        axes: Axes,
        x: Sequence[float],
        y: Sequence[float],
        *,
        color: str,
        label: str,
        marker: str = "",
        tips: Sequence[str] = (),
        width: float | None = None,
    ) -> Line2D:
        """Draws a curve with a tooltip per point; without `tips`, the line has its range as one."""
        (line,) = axes.plot(x, y, color=color, marker=marker, label=label, linewidth=width)
        self.tip(line, label if tips else f"{label}: {_range(y)}")
        for each_x, each_y, tip in zip(x, y, tips, strict=bool(tips)):
            style: dict[str, Any] = {"marker": "o", "markersize": TIP_POINTS, "alpha": 0.0}
            (point,) = axes.plot([each_x], [each_y], linestyle="", color=color, **style)
            point.set_clip_on(False)
            self.tip(point, f"{label}: {tip}")
        return line

    def band(
        self,
        axes: Axes,
        x: Sequence[float],
        low: Sequence[float],
        high: Sequence[float],
        *,
        color: str,
        tip: str,
    ) -> None:
        """Fills the interval of a curve."""
        filled = axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
        self.tip(filled, tip)

    def svg(self, name: str, description: str) -> str:
        """Returns the figure as a reproducible SVG element with an accessible description."""
        marks = [(*axes.lines, *axes.patches, *axes.collections) for axes in self.subplots]
        assert all(mark.get_gid() for own in marks for mark in own), "a mark has no tooltip"
        stream = io.StringIO()
        with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
            self.figure.savefig(stream, format="svg", metadata=NO_METADATA)
        return _clean(stream.getvalue(), description, self.tips)


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


def _range(values: Sequence[float]) -> str:
    """Returns the number of values of a curve, its range and its last value."""
    known = [float(each) for each in values if not math.isnan(each)]
    if not known:
        return "no values"
    low, high, last = min(known), max(known), known[-1]
    return f"{len(known)} values from {low:.3g} to {high:.3g}, the last is {last:.3g}"


def _clean(svg: str, description: str, tips: Sequence[str]) -> str:
    """Returns the <svg> element without prolog, fixed size, comments and unused ids.

    A group whose id names a tooltip gets it as its title.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r' (?:width|height)="[\d.]+pt"', "", svg, count=2)
    titled = rf'<g id="{TIP}(\d+)">'
    svg = re.sub(titled, lambda found: f"<g><title>{_escape(tips[int(found[1])])}</title>", svg)
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)
    svg = re.sub(r"<!--.*?-->\n?", "", svg)
    svg = _as_css(svg)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{_escape(description)}" ', 1).strip()


def _escape(text: str) -> str:
    return html.escape(text, quote=True)
