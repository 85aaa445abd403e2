"""Measured resource usage of a stage: seconds by part, processor seconds, peak memory.

Measurements differ between runs, so they are not part of any artifact. They are stored in
`.runs/`, one JSON per stage, and read by the report page and the lineage.
"""

import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from grpo.runtime.artifacts.files import read_json, write_json
from grpo.runtime.fork_client import main_process

USAGE = Path(".runs")
ORIGIN = time.perf_counter()  # of spans


@dataclass(kw_only=True)
class Usage:
    """Usage of a stage, including its start-up; excludes killed attempts."""

    seconds_by_part: dict[str, float] = field(default_factory=dict)
    # Part, start and end of every block, in seconds since the process that measures has started.
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    cpu_seconds: float = 0.0
    seconds: float = 0.0
    peak_bytes: int = 0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Adds the block's seconds to part `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            self.seconds_by_part[name] = self.seconds_by_part.get(name, 0.0) + end - start
            self.spans.append((name, round(start - ORIGIN, 3), round(end - ORIGIN, 3)))

    def beside(self) -> "Usage":
        """Returns a usage for work at the same time as this one: only its spans are kept."""
        return Usage(spans=self.spans)

    def move(self, source: str, seconds_by_part: Mapping[str, float]) -> None:
        """Moves seconds from part `source` to other parts."""
        for target, seconds in seconds_by_part.items():
            self.seconds_by_part[source] -= seconds
            self.seconds_by_part[target] = self.seconds_by_part.get(target, 0.0) + seconds


@contextmanager
def measured(stage: str) -> Iterator[Usage]:
    """Yields a Usage and, when the block succeeds, writes it to `.runs/STAGE.json`."""
    usage = Usage()
    main = main_process()  # not this process if it is the fork of a preloaded one
    start = _seconds_since_start(main)
    usage.seconds_by_part["start"] = start
    entered = time.perf_counter()  # unaffected by changes of the system clock
    yield usage
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    usage.seconds += start + time.perf_counter() - entered
    usage.cpu_seconds += own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
    if main != os.getpid():
        usage.cpu_seconds += sum(psutil.Process(main).cpu_times()[:2])
    usage.peak_bytes = max(usage.peak_bytes, max(own.ru_maxrss, children.ru_maxrss) * 1024)
    write_json(USAGE / f"{stage}.json", asdict(usage))


def _seconds_since_start(process: int) -> float:
    """Returns how long ago a process was started."""
    if sys.platform != "linux":
        return time.time() - psutil.Process(process).create_time()
    # Not from psutil, which takes the time of boot from the kernel in whole seconds.
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[19])  # since boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def read_usage(stage: str) -> Usage | None:
    """Returns the usage of the last run of `stage` in this workspace, or None."""
    path = USAGE / f"{stage}.json"
    return Usage(**read_json(path)) if path.exists() else None
