"""Lineage that MLflow could not be told of in an earlier run."""

import sys
from pathlib import Path

from grpo.lineage.notes import waiting


def record_what_waits(workspace: Path) -> None:
    """Writes it to MLflow; one line says so if it must wait on."""
    if not waiting(workspace):
        return
    # Here, not above: MLflow takes two seconds to import.
    from grpo.lineage.record import WaitingError, record_waiting

    try:
        record_waiting(workspace)
    except WaitingError as error:
        print(error, file=sys.stderr)
