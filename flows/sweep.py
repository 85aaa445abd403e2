"""`python -m flows.sweep --set PATH=VALUE,VALUE`: a DVC experiment per combination, then a table.

Every experiment runs in a separate checkout and shares DVC's cache: stages that two experiments
have in common run once. `dvc exp apply NAME` applies an experiment to the workspace.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flows.exits import exit_code
from flows.planning import require_pipeline
from flows.runner import require_places
from flows.server import report_to_server
from flows.settings import prepare_environment


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 after a failed experiment, 2 if the input was wrong."""
    parser = argparse.ArgumentParser(prog="python -m flows.sweep", description=__doc__)
    parser.add_argument("--set", action="append", required=True, metavar="PATH=VALUE,VALUE")
    parser.add_argument("--at-once", type=int, default=1, help="parallel experiments")
    chosen = parser.parse_args(arguments)
    return exit_code(lambda: _sweep(chosen.set, chosen.at_once))


def _sweep(given: Sequence[str], at_once: int) -> int:
    require_places(at_once)
    require_pipeline()
    workspace = Path.cwd()
    prepare_environment(workspace)
    # Imported here: Prefect reads its settings on import.
    from flows.experiments import combinations, sweep

    combinations(workspace, given)  # reports wrong settings before a server starts
    report_to_server(workspace)
    print(sweep(given, at_once=at_once))
    return 0


if __name__ == "__main__":
    sys.exit(main())
