"""Records lineage that earlier runs could not write to MLflow."""

import sys
from pathlib import Path

from grpo.errors import ArtifactError
from grpo.lineage.notes import waiting


def record_pending_lineage(workspace: Path) -> None:
    """Writes pending lineage to MLflow; prints one line if some stays pending."""
    if not waiting(workspace):
        return
    # Imported here: MLflow takes two seconds.
    from grpo.lineage.record import record_pending

    try:
        record_pending(workspace)
    except ArtifactError as error:
        print(error, file=sys.stderr)
