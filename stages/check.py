"""Checks parameters against the composition rules before any compute is spent."""

from pathlib import Path
from typing import get_args

from grpo.errors import UnsoundError
from grpo.objective.rules import Severity
from grpo.params.manifests import Part, Reader, describe_data, describe_plugins
from grpo.params.parameters import read_params
from grpo.runtime.artifacts.files import write_json
from grpo.runtime.artifacts.usage import Usage
from grpo.wiring.allocation import is_profile_needed
from grpo.wiring.checks import findings
from stages.entry import run


def main(
    usage: Usage, file: Path, data: Path, needed_out: Path, data_out: Path, plugins_out: Path
) -> None:
    """Writes whether an arm reads the profile, and manifests of files under data/ and plugins/.

    Later stages depend on these outputs, so that they do not rerun for unrelated changes of
    params.yaml or of those folders.
    """
    params = read_params(file)
    errors = [each for each in findings(params) if each.severity is Severity.ERROR]
    if errors:
        raise UnsoundError(f"{file}: {errors[0]} ({len(errors)} errors; python -m grpo check)")
    if params.machine.memory_gb is not None:
        # Imported here: the classes of models take seconds.
        from grpo.wiring.stage_memory import require_memory

        require_memory(params, show=print)
    write_json(needed_out, {"needed": is_profile_needed(params)})
    for reader in get_args(Reader):
        write_json(data_out / f"{reader}.json", describe_data(params, data, reader))
    for part in get_args(Part):
        write_json(plugins_out / f"{part}.json", describe_plugins(params, part))


if __name__ == "__main__":
    run(main, stage="check")
