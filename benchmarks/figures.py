"""Figures of the docs: the same bytes each time they are drawn."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure


def middle_and_reach(
    several: Sequence[Sequence[float]],
) -> tuple[list[float], list[list[float]]]:
    """Returns the medians of repeats, and how far the least and the largest are below and above."""
    middle = [float(np.median(each)) for each in several]
    below = [value - min(each) for value, each in zip(middle, several)]
    above = [max(each) - value for value, each in zip(middle, several)]
    return middle, [below, above]


def save_figure(figure: Figure, path: Path) -> None:
    """Writes an SVG whose identifiers follow from its name."""
    with mpl.rc_context({"svg.hashsalt": path.name}):
        figure.savefig(path, metadata={"Date": None})
