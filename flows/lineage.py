"""Lineage that MLflow could not be told of in an earlier run."""

import sys
from pathlib import Path

from grpo.errors import ArtifactError
from grpo.lineage.notes import waiting


def record_what_waits(workspace: Path) -> None:
    """Writes it to MLflow; one line says so if some must wait on."""
    if not waiting(workspace):
        return
    # Here, not above: MLflow takes two seconds to import.
    from grpo.lineage.record import record_waiting

    try:
        record_waiting(workspace)
    except ArtifactError as error:
        print(error, file=sys.stderr)
