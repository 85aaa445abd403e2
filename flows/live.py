"""What a run shows on stderr while it runs: a live table on terminals, single lines elsewhere."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from grpo.runtime.progress import SECONDS_PER_LINE, Progress, format_duration

POLL_SECONDS = 0.25
BAR_WIDTH = 12
OTHER_LINES = 5  # of the table: title, header, caption
RUNNING, FAILED, STOPPED = "Running", "Failed", "Stopped"
STYLES = {FAILED: "red", STOPPED: "yellow"}

console = Console(stderr=True, highlight=False)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A stage that has started.

    Instance::

        Row(stage="train@sgpo-1", state="Running", seconds=12.0, last_seconds=20.0)
    """

    stage: str
    state: str  # RUNNING, FAILED or how it succeeded
    seconds: float
    last_seconds: float | None = None  # of its last run here; None: unknown
    progress: Progress | None = None
    number: int | None = None  # how many stages were done with it; None: it is not done

    @property
    def left(self) -> str:
        """The time that is left if it takes as long as last time; empty if that is unknown."""
        if self.state != RUNNING or self.last_seconds is None or self.seconds > self.last_seconds:
            return ""
        return format_duration(self.last_seconds - self.seconds)


class Screen(Protocol):
    """Where rows are shown."""

    def update(self, rows: Sequence[Row]) -> None: ...

    def close(self, rows: Sequence[Row]) -> None: ...


@contextmanager
def displayed(read_rows: Callable[[], Sequence[Row]], *, total: int) -> Iterator[None]:
    """Shows the rows while the block runs, from a thread.

    Args:
      read_rows: Returns the stages that have started, in this order.
      total: Number of all stages of the run.
    """
    screen: Screen = _Table(total) if _has_live_terminal() else _Lines(total)
    ended = threading.Event()

    def follow() -> None:
        while not ended.wait(POLL_SECONDS):
            screen.update(read_rows())

    thread = threading.Thread(target=follow, name="display", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        screen.close(read_rows())


def _has_live_terminal() -> bool:
    """Returns whether stderr is a terminal on which lines can be overwritten."""
    return console.file.isatty() and not console.is_dumb_terminal and not console.quiet


class _Table:
    """A table that is drawn again and again, in place."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.start = time.monotonic()
        self.live = Live(console=console, auto_refresh=False)
        self.live.start()

    def update(self, rows: Sequence[Row]) -> None:
        self.live.update(self._draw(rows, max(1, console.height - OTHER_LINES)), refresh=True)

    def close(self, rows: Sequence[Row]) -> None:
        """Draws all rows a last time, and leaves them on the terminal."""
        self.live.update(self._draw(rows, len(rows), running=STOPPED), refresh=True)
        self.live.stop()

    def _draw(self, rows: Sequence[Row], limit: int, running: str = RUNNING) -> Table:
        names = dict.fromkeys(name for row in rows if row.progress for name in row.progress.numbers)
        done = max((row.number for row in rows if row.number), default=0)
        lasted = format_duration(time.monotonic() - self.start)
        table = Table(
            box=None,
            pad_edge=False,
            caption=f"{done}/{self.total} stages up to date, {lasted}",
            caption_justify="left",
        )
        table.add_column("stage", style="cyan", no_wrap=True, overflow="ellipsis")
        for title in ("", "done", "elapsed", "left", *names):
            table.add_column(title, no_wrap=True, justify="right" if title else "left")
        for row in _most_important(rows, limit):
            numbers = row.progress.numbers if row.progress else {}
            took = format_duration(row.seconds)
            cells = [_bar(row, running), _count(row), took, row.left]
            values = [f"{numbers[name]:.3g}" if name in numbers else "" for name in names]
            table.add_row(row.stage, *cells, *values)
        return table


def _most_important(rows: Sequence[Row], limit: int) -> list[Row]:
    """Returns at most `limit` rows in their order: those that run, then the last that ended."""
    ended = [row for row in rows if row.state != RUNNING]
    num_running = len(rows) - len(ended)
    kept = {row.stage for row in ended[max(0, len(ended) - max(0, limit - num_running)) :]}
    return [row for row in rows if row.state == RUNNING or row.stage in kept][:limit]


def _bar(row: Row, running: str) -> RenderableType:
    """Returns a bar of what is done, or of the time of the last run; a word for other states."""
    if row.state != RUNNING or running != RUNNING:
        state = running if row.state == RUNNING else row.state
        return Text(state, style=STYLES.get(state, "green"))
    if row.progress:
        return ProgressBar(row.progress.total or 1, row.progress.done, width=BAR_WIDTH)
    return ProgressBar(row.last_seconds or 1.0, row.seconds, width=BAR_WIDTH) if row.left else ""


def _count(row: Row) -> str:
    return f"{row.progress.done}/{row.progress.total}" if row.progress else ""


class _Lines:
    """A line when a stage starts, every 30 seconds, and when it ends."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.printed: dict[str, float] = {}  # seconds of the stage at its last line
        self.ended: set[str] = set()

    def update(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if row.stage in self.ended:
                continue
            if row.state != RUNNING:
                self._end(row)
            elif row.stage not in self.printed:
                self.printed[row.stage] = row.seconds
                announce(row.stage, _started(row))
            elif row.seconds - self.printed[row.stage] >= SECONDS_PER_LINE:
                self.printed[row.stage] = row.seconds
                announce(row.stage, _running(row))

    def close(self, rows: Sequence[Row]) -> None:
        self.update(rows)

    def _end(self, row: Row) -> None:
        self.ended.add(row.stage)
        if row.state == FAILED:
            announce(row.stage, f"{FAILED} after {row.seconds:.1f} s", style=STYLES[FAILED])
        else:
            count = f"({row.number}/{self.total})"
            announce(row.stage, f"{row.state} in {row.seconds:.1f} s {count}", style="green")


def _started(row: Row) -> str:
    if row.last_seconds is None:
        return "started"
    return f"started, took {format_duration(row.last_seconds)} last time"


def _running(row: Row) -> str:
    what = str(row.progress) if row.progress else "runs"
    left = f", {row.left} left" if row.left else ""
    return f"{what}, {format_duration(row.seconds)}{left}"


def announce(name: str, line: str, style: str = "") -> None:
    """Prints a line about a stage on the console."""
    console.print(Text.assemble((f"{name} ", "cyan"), (line, style)), soft_wrap=True)
