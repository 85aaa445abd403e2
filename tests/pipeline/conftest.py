"""Two runs of the two small arms in fresh workspaces, shared by all tests of the pipeline."""

import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.workspaces import NO_RESULT, commands_in_order
from tests.pipeline.processes import LOG, run_stage
from tests.pipeline.workspaces import (
    check_out,
    copy_for_stages,
    dvc,
    environment,
    start_stages,
    two_arms,
)

Running = tuple[Path, subprocess.Popen[str]]


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a workspace as after `dvc repro`; tests leave it as it is.

    What `dvc repro` does, in less time: most stages are forked from a process that has imported
    torch. `make test-long` shows that `dvc repro` leaves the same bytes.
    """
    workspace = check_out(tmp_path_factory.mktemp("finished"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dvc's own
        commands = {stage: command for stage, command, _ in commands_in_order(workspace)}
    forked = [stage for stage in commands if stage not in NO_RESULT]
    for stage in forked:
        done = run_stage(workspace, stage, commands[stage], environment=environment())
        assert done.code == 0, done.stderr
    (workspace / LOG).unlink()
    dvc(workspace, "commit", "--quiet", "--force", *forked)
    dvc(workspace, "repro", "--quiet")
    return workspace


@pytest.fixture(scope="session")
def second_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Yields another fresh workspace and the process that runs its stages, without dvc."""
    workspace = tmp_path_factory.mktemp("second") / "workspace"
    process = start_stages(workspace, two_arms())
    yield workspace, process
    process.kill()
    process.wait()


@pytest.fixture(scope="session", autouse=True)
def _second_run_beside_the_first(request: pytest.FixtureRequest) -> None:
    """Starts the second run, if a test asks for it, before the first one is waited for."""
    if any("second_run" in item.fixturenames for item in request.session.items):
        request.getfixturevalue("second_run")


@pytest.fixture
def workspace(finished: Path, tmp_path: Path) -> Path:
    """Returns a copy of the finished run in which one stage can be run by hand."""
    return copy_for_stages(finished, tmp_path / "workspace")
