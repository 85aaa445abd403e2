"""Refuses parameters that break a composition rule, before any compute is spent."""

from pathlib import Path

from grpo.artifacts.files import write_json
from grpo.artifacts.usage import Usage
from grpo.build.objectives import findings
from grpo.errors import UnsoundError
from grpo.objective.rule import Severity
from grpo.params.parameters import read_params
from stages.entry import run


def main(usage: Usage, params: Path, out: Path) -> None:
    """Writes a constant: later stages depend on it, and do not run again for a new warning."""
    errors = [each for each in findings(read_params(params)) if each.severity is Severity.ERROR]
    if errors:
        raise UnsoundError(f"{params}: {errors[0]} ({len(errors)} errors; python -m grpo check)")
    write_json(out, {"sound": True})


if __name__ == "__main__":
    run(main, stage="check")
