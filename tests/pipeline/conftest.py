"""One finished run of the smoke recipe, shared by all tests of the pipeline."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipeline.workspaces import check_out, copy_for_stages, dvc, start_dvc


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a workspace after `dvc repro`; tests leave it as it is."""
    workspace = check_out(tmp_path_factory.mktemp("finished"))
    dvc(workspace, "repro", "-q")
    return workspace


@pytest.fixture(scope="session")
def second_run(
    tmp_path_factory: pytest.TempPathFactory, finished: Path
) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """Yields another fresh workspace and the `dvc repro` in it, which goes on beside the tests.

    Without the lineage stage: it has no output, and MLflow takes ten seconds to set up.
    """
    workspace = check_out(tmp_path_factory.mktemp("second"))
    process = start_dvc(workspace, "repro", "-q", "report")
    yield workspace, process
    process.kill()
    process.wait()


@pytest.fixture
def workspace(finished: Path, tmp_path: Path) -> Path:
    """Returns a copy of the finished run in which one stage can be run by hand."""
    return copy_for_stages(finished, tmp_path / "workspace")
