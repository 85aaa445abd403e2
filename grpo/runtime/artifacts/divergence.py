"""Record of a diverged training: the reason, and the training curves up to the divergence.

A diverged stage has no outputs, and DVC removes those of its last run. The record is therefore
kept in `.runs/diverged/` until the stage succeeds, and the report shows it.
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
    """The reason why a stage's training diverged, and the rows of updates.csv before that."""

    stage: str  # full name, e.g. train@sgpo-2
    reason: str
    updates: pd.DataFrame


@contextmanager
def curves_kept(
    stage: str, updates: Sequence[Mapping[str, Any]] = (), *, writes: bool = True
) -> Iterator[None]:
    """Records the reason and curves of a DivergedError in the block; on success removes the record.

    Args:
      updates: The rows so far, used if the error has none.
      writes: Whether this process writes the record; False if another rank does.
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
    """Returns the records of the given stages that diverged in their last run in this workspace.

    Raises:
      ArtifactError: If a file is broken.
    """
    return [_read(stage) for stage in stages if (DIVERGED / stage).is_dir()]


def _read(stage: str) -> Divergence:
    directory = DIVERGED / stage
    content = read_json(directory / REASON)
    try:
        updates = pd.read_csv(directory / UPDATES)
    except pd.errors.EmptyDataError:  # the first update diverged
        updates = pd.DataFrame()
    except (FileNotFoundError, pd.errors.ParserError, UnicodeDecodeError) as error:
        message = f"{directory / UPDATES}: must be CSV, {error}; delete {directory}"
        raise ArtifactError(message) from None
    return Divergence(stage, str(content["reason"]), updates)
