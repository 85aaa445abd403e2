"""Runs a command and measures CPU seconds, wall seconds and peak memory of its process tree."""

import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

SECONDS_PER_SAMPLE = 0.1  # of memory
GROWTH = 1.01  # of resident memory, before the proportional set size is read again
# One thread; compiled modules are kept, so that only an environment's first run compiles them.
SETTINGS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}


class Timed(NamedTuple):
    """The measurements of a process with all its descendants, from its start to its end."""

    cpu_seconds: float
    wall_seconds: float
    peak_bytes: int  # proportional set size summed over the tree, sampled
    output: str


def run_timed(
    command: Sequence[str], *, folder: Path, environment: Mapping[str, str] | None = None
) -> Timed:
    """Returns the measurements of a command.

    CPU seconds are those that the kernel reports when it reaps the process: its own and those of
    all descendants that were waited for. Others that still run are refused.

    Raises:
      SystemExit: If the command fails, or leaves a process behind.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        start = time.perf_counter()
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **SETTINGS, **(environment or {})},
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        memory = _Memory(process.pid)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        peak = memory.stop()
        for stream in (output, errors):
            stream.seek(0)
        text, said = output.read().decode(), errors.read().decode()
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{text}\n{said}")
    left = [each for each in memory.seen if _is_running(each)]
    if left:
        raise SystemExit(f"{' '.join(command)} left processes behind: {left}")
    return Timed(usage.ru_utime + usage.ru_stime, wall, peak, text)


class _Memory:
    """Samples the memory of a process tree in a thread.

    The proportional set size takes the kernel milliseconds, during which the process may wait. It
    is read only when the resident memory, which is cheap to read, has grown.
    """

    def __init__(self, root: int) -> None:
        self.seen: set[int] = set()
        self.peak = 0
        self._largest = 0.0  # resident bytes that the next reading must exceed
        self._root = root
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """Returns the largest sum of all samples in bytes."""
        self._done.set()
        self._thread.join()
        return self.peak

    def _watch(self) -> None:
        while not self._done.wait(SECONDS_PER_SAMPLE):
            tree = list(_descendants(self._root))
            self.seen.update(tree)
            resident = sum(_read_kilobytes(each, "status", "VmRSS:") for each in tree)
            if resident > self._largest:
                self._largest = GROWTH * resident
                proportional = sum(_read_kilobytes(each, "smaps_rollup", "Pss:") for each in tree)
                self.peak = max(self.peak, 1024 * proportional)


def _descendants(process: int) -> Iterator[int]:
    """Yields a process and all that descend from it."""
    yield process
    with suppress(OSError):  # it has ended
        for thread in Path(f"/proc/{process}/task").iterdir():
            for child in (thread / "children").read_text().split():
                yield from _descendants(int(child))


def _read_kilobytes(process: int, file: str, name: str) -> int:
    """Returns a field of a file of a process; 0 if the process has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{process}/{file}").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1])
    return 0


def _is_running(process: int) -> bool:
    """Returns whether a process exists and is no zombie, which has no memory."""
    return _read_kilobytes(process, "status", "VmRSS:") > 0
