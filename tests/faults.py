"""Rows of the fault table: fault tests write them, `python -m benchmarks.faults` collects them."""

import json
import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

ROWS = os.environ.get("GRPO_FAULT_ROWS")  # where lines are kept, if they are
OUTAGE_SECONDS = 20.0 if ROWS else 0.0  # at least
REPEATS = range(3) if ROWS else None  # of every test


class FaultLine:
    """The effect of a fault, recorded by the test that caused it."""

    def __init__(self, test: str) -> None:
        self.test = test
        self.outage_seconds = OUTAGE_SECONDS
        self.recovery_seconds = 0.0

    @contextmanager
    def recovery(self) -> Iterator[None]:
        """Measures the block: from the end of the fault to complete recovery."""
        start = time.monotonic()
        yield
        self.recovery_seconds = time.monotonic() - start

    def tell(self, fault: str, happened: str, *, lost: Collection[str]) -> None:
        """Ends the test and asserts that nothing was lost.

        Args:
          lost: Names of outputs of an undisturbed run that this run lacks.
        """
        assert not lost
        row = {"test": self.test, "fault": fault, "happened": happened}
        if ROWS:
            with Path(ROWS).open("a") as file:
                file.write(json.dumps({**row, "recovery_seconds": self.recovery_seconds}) + "\n")
