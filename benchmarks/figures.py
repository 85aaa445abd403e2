"""Helpers for the figures of the docs, whose bytes are reproducible."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure


def middle_and_reach(
    several: Sequence[Sequence[float]],
) -> tuple[list[float], list[list[float]]]:
    """Returns medians of repeats and the distances to their minimum and maximum (error bars)."""
    middle = [float(np.median(each)) for each in several]
    below = [value - min(each) for value, each in zip(middle, several)]
    above = [max(each) - value for value, each in zip(middle, several)]
    return middle, [below, above]


def save_figure(figure: Figure, path: Path) -> None:
    """Writes an SVG whose element ids are derived from the file name."""
    with mpl.rc_context({"svg.hashsalt": path.name}):
        figure.savefig(path, metadata={"Date": None})
