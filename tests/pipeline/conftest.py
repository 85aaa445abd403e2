"""A run of the two small arms in a fresh workspace, shared by all tests of the pipeline."""

from pathlib import Path

import pytest

from benchmarks.workspaces import NO_RESULT, commands_in_order
from tests.pipeline.processes import LOG, run_stage
from tests.pipeline.workspaces import check_out, copy_for_stages, environment, opened


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a workspace as after `dvc repro`; tests must not change it.

    Faster than `dvc repro`: stages are forked from a process that has imported torch, and DVC
    writes dvc.lock once, not once per stage. `make test-long` shows that `dvc repro` writes the
    same bytes.
    """
    return reproduce(check_out(tmp_path_factory.mktemp("finished")))


def reproduce(workspace: Path) -> Path:
    """Runs all stages of a fresh workspace and writes dvc.lock, as `dvc repro` does."""
    with opened(workspace) as repo:
        commands = {stage: command for stage, command, _ in commands_in_order(workspace)}
        for stage, command in commands.items():
            if stage not in NO_RESULT:
                run(workspace, stage, command)
        repo.commit(force=True, allow_missing=True)
        for stage in NO_RESULT:  # they read dvc.lock
            run(workspace, stage, commands[stage])
            repo.commit(stage, force=True)
    (workspace / LOG).unlink()
    return workspace


def run(workspace: Path, stage: str, command: str) -> None:
    done = run_stage(workspace, stage, command, environment=environment(), timeout_seconds=300)
    assert done.code == 0, done.stderr


@pytest.fixture
def workspace(finished: Path, tmp_path: Path) -> Path:
    """Returns a copy of the finished run in which one stage can be run by hand."""
    return copy_for_stages(finished, tmp_path / "workspace")
