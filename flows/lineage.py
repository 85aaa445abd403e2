"""Lineage that MLflow could not be told of in an earlier run."""

import sys
from pathlib import Path

from grpo.errors import ArtifactError
from grpo.lineage.notes import waiting


def record_pending_lineage(workspace: Path) -> None:
    """Writes it to MLflow; one line says so if some must wait on."""
    if not waiting(workspace):
        return
    # Here, not above: MLflow takes two seconds to import.
    from grpo.lineage.record import record_pending

    try:
        record_pending(workspace)
    except ArtifactError as error:
        print(error, file=sys.stderr)
