"""What a stage leaves when its training diverges: the reason, and its curves up to there.

It has no outputs then, and DVC removes those of its last run. So this lies in `.runs/diverged/`
until the stage succeeds, and the report shows it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pandas as pd

from grpo.errors import ArtifactError, DivergedError
from grpo.runtime.artifacts.files import atomic_path, read_json, remove, write_json
from grpo.runtime.artifacts.usage import USAGE

DIVERGED = USAGE / "diverged"
REASON, UPDATES = "reason.json", "updates.csv"


class Divergence(NamedTuple):
    """Why the training of a stage ended, and the rows of updates.csv before that."""

    stage: str  # its full name, e.g. train@sgpo-2
    reason: str
    updates: pd.DataFrame


@contextmanager
def curves_kept(
    stage: str, updates: Sequence[Mapping[str, Any]] = (), *, writes: bool = True
) -> Iterator[None]:
    """Keeps reason and curves of a DivergedError of the block; forgets them if there is none.

    Args:
      updates: The rows so far, where the error does not bring them.
      writes: False: another process does.
    """
    try:
        yield
    except DivergedError as error:
        if writes:
            with atomic_path(DIVERGED / stage) as temporary:
                temporary.mkdir()
                write_json(temporary / REASON, {"reason": str(error)})
                rows = pd.DataFrame([dict(each) for each in error.updates or updates])
                (temporary / UPDATES).write_bytes(rows.to_csv(index=False).encode())
        raise
    if writes:
        remove(DIVERGED / stage)


def read_divergences(stages: Iterable[str]) -> list[Divergence]:
    """Returns what is known of those of some stages that diverged when they last ran here.

    Raises:
      ArtifactError: If a file is broken.
    """
    return [_read(stage) for stage in stages if (DIVERGED / stage).is_dir()]


def _read(stage: str) -> Divergence:
    directory = DIVERGED / stage
    content = read_json(directory / REASON)
    try:
        updates = pd.read_csv(directory / UPDATES)
    except pd.errors.EmptyDataError:  # the first update
        updates = pd.DataFrame()
    except (FileNotFoundError, pd.errors.ParserError, UnicodeDecodeError) as error:
        message = f"{directory / UPDATES}: must be CSV, {error}; delete {directory}"
        raise ArtifactError(message) from None
    return Divergence(stage, str(content["reason"]), updates)
