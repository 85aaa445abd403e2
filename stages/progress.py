"""Progress bars and warnings of a stage on stderr."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from grpo.runtime.artifacts.marks import warning


@contextmanager
def shown(description: str, *, is_seen: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Yields a callback `(done, total)` that updates a progress bar, shown on terminals only.

    Args:
      is_seen: If False, the bar is hidden, because another process shows it.
    """
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not (console.is_terminal and is_seen),
    )
    with bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def warn(message: str | None) -> None:
    """Prints a warning on stderr, in red on terminals; prints nothing if it is None."""
    if message is not None:
        print(warning(message, is_colored=sys.stderr.isatty()), end="", file=sys.stderr)
