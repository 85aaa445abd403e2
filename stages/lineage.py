"""Records every stage of dvc.lock in MLflow; has no output."""

import sys
from pathlib import Path

from grpo.errors import GrpoError
from grpo.lineage.lock import sort_lock
from grpo.lineage.record import PendingError, record
from grpo.report.provenance import state_of_page
from grpo.runtime.artifacts.marks import ARTIFACTS
from grpo.runtime.artifacts.usage import Usage
from stages.entry import run


def main(usage: Usage, workspace: Path) -> None:
    sort_lock(workspace)  # DVC appends the entry of this stage when the stage has ended
    with usage.part("record"):
        try:
            record(workspace)
        except PendingError as error:  # a later run records it
            print(error, file=sys.stderr)
    if state_of_page():  # DVC restores the outputs of the report, but not the page
        # Imported here: the import takes seconds and is rarely needed.
        from grpo.report.page import redraw_page

        try:
            redraw_page(ARTIFACTS)
        except GrpoError as error:  # the page is marked as outdated; recording has succeeded
            print(error, file=sys.stderr)


if __name__ == "__main__":
    run(main, stage="lineage")
