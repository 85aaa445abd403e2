"""A tiny pipeline that has not run, one that has, and one Prefect server for all tests."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from flows.server import free_port, prefect_server
from flows.settings import SETTINGS
from tests import tiny_pipeline
from tests.exposure import PLANTED


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_pipeline.build(tmp_path_factory.mktemp("flows") / "pipeline")


@pytest.fixture(scope="session")
def finished(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tiny_pipeline.copy(pristine, tmp_path_factory.mktemp("finished") / "pipeline")
    tiny_pipeline.reproduce(root)
    return root


@pytest.fixture
def fresh_pipeline(pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of the test."""
    monkeypatch.chdir(tiny_pipeline.copy(pristine, tmp_path / "pipeline"))
    return tmp_path / "pipeline"


@pytest.fixture
def finished_pipeline(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of the test."""
    monkeypatch.chdir(tiny_pipeline.copy(finished, tmp_path / "pipeline"))
    return tmp_path / "pipeline"


@pytest.fixture(scope="session")
def prefect_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a flow that reports to the session's server."""
    home = tmp_path_factory.mktemp("prefect")
    with ExitStack() as servers:
        with pytest.MonkeyPatch.context() as patch:  # for the server alone, not for later tests
            patch.chdir(home)
            for name, value in {**SETTINGS, **PLANTED, "PREFECT_HOME": str(home)}.items():
                patch.setenv(name, value)
            address = servers.enter_context(prefect_server(free_port()))
            settings = {"PREFECT_API_URL": f"{address}/api", "PREFECT_HOME": str(home)}
            environment = {**tiny_pipeline.environment(), **PLANTED, **settings}
        yield environment
