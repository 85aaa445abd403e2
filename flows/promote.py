"""`python -m flows.promote MODEL POLICY`: makes a policy the model's champion if it is better.

`python -m flows.promote MODEL --rollback` makes the previous champion champion again.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flows.exits import exit_code
from flows.planning import require_pipeline
from flows.server import report_to_server
from flows.settings import prepare_environment

EXIT_REFUSED = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 if the promotion was refused, 2 if the input was wrong."""
    parser = argparse.ArgumentParser(prog="python -m flows.promote", description=__doc__)
    parser.add_argument("model", metavar="MODEL", help="a name in MLflow's registry")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("policy", metavar="POLICY", nargs="?", help="a round, e.g. sgpo-3")
    which.add_argument("--rollback", action="store_true")
    parser.add_argument("--margin", type=float, help="minimum gain in mean@k; default 0")
    parser.add_argument(
        "--family-bound", type=float, help="maximum loss of a prompt family; default 0.1"
    )
    chosen = parser.parse_args(arguments)
    bounds = {"margin": chosen.margin, "family_bound": chosen.family_bound}
    given = {name: value for name, value in bounds.items() if value is not None}
    return exit_code(lambda: _promote(chosen.model, chosen.policy, given))


def _promote(model: str, policy: str | None, bounds: dict[str, float]) -> int:
    require_pipeline()
    workspace = Path.cwd()
    prepare_environment(workspace)
    report_to_server(workspace)
    # Imported here: Prefect reads its settings on import.
    from flows.promotion import STATES, promote, roll_back
    from grpo.registry.store import REFUSED

    if policy is None:
        state = roll_back(model, return_state=True)
    else:
        state = promote(model, policy, **bounds, return_state=True)
    outcomes = {name: outcome for outcome, name in STATES.items()}
    if state.name not in outcomes:
        state.result()  # raises the run's error
    outcome = outcomes[str(state.name)]
    print(f"{outcome}: {state.message}")
    return EXIT_REFUSED if outcome == REFUSED else 0


if __name__ == "__main__":
    sys.exit(main())
