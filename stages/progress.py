"""Progress and warnings of a stage: a bar or lines on stderr, or a file for the flow above it."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich import progress as bars
from rich.console import Console
from rich.table import Column

from grpo.runtime.artifacts.marks import is_colored, warning
from grpo.runtime.progress import (
    CHANNEL,
    SECONDS_PER_LINE,
    Progress,
    ProgressFile,
    format_duration,
)

Show = Callable[[Progress], None]


class Report:
    """Callback `(done, total)` for the progress of one part of a stage."""

    def __init__(self, part: str, show: Show) -> None:
        self.part = part
        self.show = show
        self.numbers: Mapping[str, float] = {}

    def __call__(self, done: int, total: int) -> None:
        self.show(Progress(part=self.part, done=done, total=total, numbers=self.numbers))

    def note(self, numbers: Mapping[str, float]) -> None:
        """Keeps the numbers of an update; the next call shows them."""
        self.numbers = numbers


@contextmanager
def shown(part: str, *, is_seen: bool = True) -> Iterator[Report]:
    """Yields a callback that shows the progress of a part of the stage.

    Args:
      is_seen: If False, nothing is shown, because another process shows it.
    """
    console = Console(stderr=True)
    if not is_seen:
        yield Report(part, lambda progress: None)
    elif directory := os.environ.get(CHANNEL):
        yield Report(part, ProgressFile(Path(directory), os.environ.get("DVC_STAGE", part)))
    elif console.is_terminal and not console.is_dumb_terminal:
        with _bar(console, part) as show:
            yield Report(part, show)
    else:
        with _lines() as show:
            yield Report(part, show)


@contextmanager
def _bar(console: Console, part: str) -> Iterator[Show]:
    whole = Column(no_wrap=True)
    bar = bars.Progress(
        bars.TextColumn("{task.description}"),
        bars.BarColumn(bar_width=12),
        bars.MofNCompleteColumn(table_column=whole),
        bars.TimeElapsedColumn(table_column=whole),
        bars.TimeRemainingColumn(table_column=whole),
        bars.TextColumn("{task.fields[numbers]}", table_column=Column(no_wrap=False)),
        console=console,
    )
    with bar:
        task = bar.add_task(part, total=None, numbers="")

        def show(progress: Progress) -> None:
            numbers = " ".join(f"{name} {each:.3g}" for name, each in progress.numbers.items())
            bar.update(task, completed=progress.done, total=progress.total, numbers=numbers)

        yield show


@contextmanager
def _lines() -> Iterator[Show]:
    """Prints a line every 30 seconds, and one at the end of a block that succeeds."""
    start = printed = time.monotonic()
    latest: Progress | None = None

    def say(progress: Progress) -> None:
        duration = format_duration(time.monotonic() - start)
        print(f"{progress}, {duration}", file=sys.stderr, flush=True)

    def show(progress: Progress) -> None:
        nonlocal latest, printed
        latest = progress
        if time.monotonic() - printed >= SECONDS_PER_LINE:
            printed = time.monotonic()
            say(progress)

    yield show
    if latest is not None:
        say(latest)


def warn(message: str | None) -> None:
    """Prints a warning on stderr, in red on terminals; prints nothing if it is None."""
    if message is not None:
        print(warning(message, is_colored=is_colored(sys.stderr)), end="", file=sys.stderr)
