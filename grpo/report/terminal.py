"""Text for terminals: wrapped, shortened, in columns, and through a pager."""

import os
import pydoc
import sys
import textwrap
from collections.abc import Sequence

WIDTH = 100  # columns
ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"


def wrap(text: str, *, indent: str = "") -> str:
    """Returns the text in lines of at most WIDTH columns; its own line breaks are kept.

    Args:
      indent: Begins every line but the first of each of the text's own lines.
    """
    lines = [
        textwrap.fill(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False)
        for line in text.split("\n")
    ]
    return "\n".join(lines)


def shorten(text: str, width: int) -> str:
    """Returns the text, or its beginning and an ellipsis, in at most `width` columns."""
    return text if len(text) <= width else f"{text[: width - 1]}{ELLIPSIS}"


def align(rows: Sequence[Sequence[str]], *, longest_first: int = WIDTH) -> str:
    """Returns rows of cells in columns; the last column is not padded.

    Args:
      longest_first: Columns of the first cell, which is shortened.
    """
    short = [[shorten(first, longest_first), *others] for first, *others in rows]
    widths = [max(map(len, column)) for column in zip(*short, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in short
    )


def show(text: str) -> None:
    """Prints a text, through a pager if stdout is a terminal."""
    if sys.stdout.isatty():
        os.environ.setdefault("LESS", "-FRX")  # `less` ends at once if the text fits
        pydoc.pager(text)
    else:
        print(text)
