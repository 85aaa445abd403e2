"""`python -m flows.sweep --set PATH=VALUE,VALUE`: a DVC experiment per combination, then a table.

Every experiment runs in a checkout of its own and shares DVC's cache: stages that two of them have
in common run once. `dvc exp apply NAME` brings one into the workspace.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flows.runner import EXIT_WRONG_INPUT, StageError
from flows.server import report_to_server
from flows.settings import prepare_environment
from grpo.errors import GrpoError


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 after a failed experiment, 2 if the input was wrong."""
    parser = argparse.ArgumentParser(prog="python -m flows.sweep", description=__doc__)
    parser.add_argument("--set", action="append", required=True, metavar="PATH=VALUE,VALUE")
    parser.add_argument("--at-once", type=int, default=1, help="experiments side by side")
    chosen = parser.parse_args(arguments)
    workspace = Path.cwd()
    prepare_environment(workspace)
    try:
        # Here, not above: Prefect reads its settings when it is imported.
        from flows.experiments import combinations, sweep

        wanted = combinations(workspace, chosen.set)
        report_to_server(workspace)
        print(sweep(wanted, at_once=chosen.at_once))
    except StageError as error:
        print(error, file=sys.stderr)
        return EXIT_WRONG_INPUT if error.code == EXIT_WRONG_INPUT else 1
    except GrpoError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return EXIT_WRONG_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main())
