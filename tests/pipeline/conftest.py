"""A run of the two small arms in a fresh workspace, shared by all tests of the pipeline."""

import warnings
from pathlib import Path

import pytest

from benchmarks.workspaces import NO_RESULT, commands_in_order
from tests.pipeline.processes import LOG, run_stage
from tests.pipeline.workspaces import (
    check_out,
    copy_for_stages,
    dvc,
    environment,
)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a workspace as after `dvc repro`; tests must not change it.

    Faster than `dvc repro`: most stages are forked from a process that has imported torch.
    `make test-long` shows that `dvc repro` writes the same bytes.
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


@pytest.fixture
def workspace(finished: Path, tmp_path: Path) -> Path:
    """Returns a copy of the finished run in which one stage can be run by hand."""
    return copy_for_stages(finished, tmp_path / "workspace")
