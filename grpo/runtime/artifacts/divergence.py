"""Record of a diverged training: the reason, and the training curves up to the divergence.

A diverged stage has no outputs, and DVC removes those of its last run. The record is therefore
kept in `.runs/diverged/` until the stage succeeds, and the report shows it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pandas as pd

from grpo.errors import DivergedError
from grpo.runtime.artifacts.files import atomic_path, remove, write_json
from grpo.runtime.artifacts.usage import USAGE

DIVERGED = USAGE / "diverged"
REASON, UPDATES = "reason.json", "updates.csv"


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
