"""Refuses parameters that break a composition rule, before any compute is spent."""

from pathlib import Path

from grpo.artifacts.files import write_json
from grpo.artifacts.usage import Usage
from grpo.build.objectives import findings
from grpo.build.profiles import is_profile_needed
from grpo.errors import UnsoundError
from grpo.objective.rule import Severity
from grpo.params.parameters import read_params
from stages.entry import run


def main(usage: Usage, file: Path, out: Path, needed_out: Path) -> None:
    """Writes a constant, and whether anything reads a profile.

    Later stages depend on these, and do not run again for a new warning or another curriculum.
    """
    params = read_params(file)
    errors = [each for each in findings(params) if each.severity is Severity.ERROR]
    if errors:
        raise UnsoundError(f"{file}: {errors[0]} ({len(errors)} errors; python -m grpo check)")
    write_json(out, {"sound": True})
    write_json(needed_out, {"needed": is_profile_needed(params)})


if __name__ == "__main__":
    run(main, stage="check")
