"""Stage: writes what dvc.lock says of every stage to MLflow; has no output of its own."""

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
    sort_lock(workspace)  # DVC adds this stage's own entry, the last one, when it has ended
    with usage.part("record"):
        try:
            record(workspace)
        except PendingError as error:  # nothing is lost: a later run writes it
            print(error, file=sys.stderr)
    if state_of_page():  # DVC has restored what the report wrote, but knows no page
        # Here, not above: it takes seconds to import, and is seldom needed.
        from grpo.report.page import draw_again

        try:
            draw_again(ARTIFACTS)
        except (
            GrpoError
        ) as error:  # a page that cannot be drawn is marked as old; this was recorded
            print(error, file=sys.stderr)


if __name__ == "__main__":
    run(main, stage="lineage")
