"""Stage: writes what dvc.lock says of every stage to MLflow; has no output of its own."""

from pathlib import Path

from grpo.artifacts.usage import Usage
from grpo.lineage.record import record
from stages.entry import run


def main(usage: Usage, workspace: Path) -> None:
    with usage.part("record"):
        record(workspace)


if __name__ == "__main__":
    run(main, stage="lineage")
