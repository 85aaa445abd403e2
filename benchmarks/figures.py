"""Figures of the docs: the same bytes each time they are drawn."""

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure


def save_figure(figure: Figure, path: Path) -> None:
    """Writes an SVG whose identifiers follow from its name."""
    with mpl.rc_context({"svg.hashsalt": path.name}):
        figure.savefig(path, metadata={"Date": None})
