"""Stage: writes what dvc.lock says of every stage to MLflow; has no output of its own."""

import sys
from pathlib import Path

from grpo.artifacts.usage import Usage
from grpo.lineage.record import WaitingError, record
from stages.entry import run


def main(usage: Usage, workspace: Path) -> None:
    with usage.part("record"):
        try:
            record(workspace)
        except WaitingError as error:  # nothing is lost: a later run writes it
            print(error, file=sys.stderr)


if __name__ == "__main__":
    run(main, stage="lineage")
