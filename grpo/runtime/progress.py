"""Progress of a running stage: a small file that a flow reads, and its words for people.

The variable GRPO_PROGRESS names the directory of these files. Without it nobody listens, and a
stage shows its progress itself. A file has the latest state only; it is no artifact.
"""

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

CHANNEL = "GRPO_PROGRESS"
SECONDS_PER_WRITE = 0.2  # at least, between two states
SECONDS_PER_LINE = 30.0  # between two lines without a terminal


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The state of a part of a stage.

    Instance::

        Progress(part="train sgpo-1", done=3, total=4, numbers={"reward": 0.4, "grad norm": 1.2})
    """

    part: str
    done: int
    total: int
    numbers: Mapping[str, float] = field(default_factory=dict)  # of the latest update, by name

    def __str__(self) -> str:
        numbers = "".join(f", {name} {each:.3g}" for name, each in self.numbers.items())
        return f"{self.part} {self.done}/{self.total}{numbers}"


class ProgressFile:
    """Writes the latest state of a stage; a failure to write is ignored."""

    def __init__(self, directory: Path, stage: str) -> None:
        self.path = _path(directory, stage)
        self.due = 0.0

    def __call__(self, progress: Progress) -> None:
        if time.monotonic() < self.due and progress.done != progress.total:
            return
        self.due = time.monotonic() + SECONDS_PER_WRITE
        with suppress(OSError):  # progress is worth no failure of a stage
            temporary = self.path.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps(asdict(progress)))
            temporary.replace(self.path)  # not fsynced: a lost state is no loss


def read_progress(directory: Path, stage: str) -> Progress | None:
    """Returns the latest state of a stage; None if it has written none."""
    try:
        return Progress(**json.loads(_path(directory, stage).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def clear_progress(directory: Path, stage: str) -> None:
    """Removes the state of an earlier run of a stage."""
    _path(directory, stage).unlink(missing_ok=True)


def _path(directory: Path, stage: str) -> Path:
    return directory / f"{stage.replace(os.sep, '_')}.json"


def format_duration(seconds: float) -> str:
    """Returns e.g. `7 s`, `12:05` (minutes and seconds) or `3:07:00`."""
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
