"""Machine-wide GPU locks: one stage per GPU; the kernel frees them when the stage exits."""

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from grpo.errors import ParameterError
from grpo.runtime.executors.gpus import visible_gpus

POLL_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class Slots:
    """GPUs of a stage, for CUDA_VISIBLE_DEVICES, and the descriptors of their locks."""

    gpus: tuple[str, ...]
    descriptors: tuple[int, ...]


@contextmanager
def hold_gpus(count: int, *, stage: str, is_stopped: Callable[[], bool]) -> Iterator[Slots]:
    """Waits until `count` GPUs are free at the same time and locks them.

    Yields no GPUs on a machine without GPUs. A process that inherits the descriptors keeps the
    GPUs until it exits. Yields fewer GPUs if `is_stopped` becomes true.

    Raises:
      ParameterError: If the machine has GPUs, but fewer than `count`.
    """
    gpus = visible_gpus()
    if not gpus or not count:
        yield Slots(gpus=(), descriptors=())
        return
    if count > len(gpus):
        raise ParameterError(
            f"dvc.yaml: {stage}.meta.exec.gpu must be at most {len(gpus)} here, got {count}"
        )
    with ExitStack() as stack:
        slots = _take(gpus, count, stack)
        while len(slots.gpus) < count and not is_stopped():
            stack.close()  # holding some GPUs while waiting for others could deadlock two stages
            time.sleep(POLL_SECONDS)
            slots = _take(gpus, count, stack)
        yield slots


def _take(gpus: tuple[str, ...], count: int, stack: ExitStack) -> Slots:
    """Locks up to `count` free GPUs."""
    folder = Path(tempfile.gettempdir()) / f"grpo-gpus-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    taken: dict[str, int] = {}
    for gpu in gpus:
        file = (folder / gpu.replace("/", "_")).open("a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            continue
        taken[gpu] = stack.enter_context(file).fileno()
        if len(taken) == count:
            break
    return Slots(gpus=tuple(taken), descriptors=tuple(taken.values()))
