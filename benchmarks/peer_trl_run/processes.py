"""Runs a command and measures CPU seconds, wall seconds and peak memory of its process tree."""

import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

SECONDS_PER_SAMPLE = 0.1  # of memory
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


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
            env={**os.environ, **ONE_THREAD, **(environment or {})},
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
    left = [each for each in memory.seen if _is_alive(each)]
    if left:
        raise SystemExit(f"{' '.join(command)} left processes behind: {left}")
    return Timed(usage.ru_utime + usage.ru_stime, wall, peak, text)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class _Memory:
    """Samples the memory of a process tree in a thread."""

    def __init__(self, root: int) -> None:
        self.seen: set[psutil.Process] = set()
        self.peak = 0
        self._root = psutil.Process(root)
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
            try:
                tree = [self._root, *self._root.children(recursive=True)]
            except psutil.Error:
                continue
            self.seen.update(tree[1:])
            self.peak = max(self.peak, sum(map(_proportional_bytes, tree)))


def _proportional_bytes(process: psutil.Process) -> int:
    """Returns a process's memory, in which a page shared by n processes counts 1/n."""
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    except (OSError, StopIteration):  # the process has ended
        return 0
