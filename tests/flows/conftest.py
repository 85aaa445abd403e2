"""Copies of the tiny pipelines, a Prefect server and a team for all tests."""

import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows.server import HOST, free_port, prefect_server
from flows.settings import SETTINGS
from grpo.registry.gate import Bounds
from grpo.registry.store import PROMOTED, Registry
from tests import tiny_pipeline, tiny_policies
from tests.flows.teams import MODEL, Team, processes_in, running_team
from tests.modalities.exposure import PLANTED, asked_below
from tests.pipeline.processes import until


@pytest.fixture
def fresh_pipeline(pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of the test."""
    monkeypatch.chdir(tiny_pipeline.copy(pristine, tmp_path / "pipeline"))
    return tmp_path / "pipeline"


@pytest.fixture
def finished_pipeline(reproduced: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of the test."""
    monkeypatch.chdir(tiny_pipeline.copy(reproduced, tmp_path / "pipeline"))
    return tmp_path / "pipeline"


class Prefect:
    """A server of Prefect that can be killed and started again on its port and database."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.port = free_port()
        address = f"http://{HOST}:{self.port}"
        settings = {"PREFECT_API_URL": f"{address}/api", "PREFECT_HOME": str(home)}
        self.environment = {**tiny_pipeline.environment(), **PLANTED, **settings}
        self.running = ExitStack()

    def start(self) -> None:
        with pytest.MonkeyPatch.context() as patch:  # for the server alone, not for later tests
            patch.chdir(self.home)
            for name, value in {**SETTINGS, **PLANTED, "PREFECT_HOME": str(self.home)}.items():
                patch.setenv(name, value)
            self.running.enter_context(prefect_server(self.port))

    def kill(self) -> None:
        (server,) = processes_with(f"server start --host {HOST} --port {self.port}")
        server.kill()
        self.running.close()


def processes_with(words: str) -> list[psutil.Process]:
    """Returns what runs below this process with these words, without its launcher."""
    return [
        process
        for process, command in asked_below(lambda process: " ".join(process.cmdline()))
        if words in command and "launcher.py" not in command
    ]


@pytest.fixture(scope="session")
def prefect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prefect]:
    """One server for all tests."""
    server = Prefect(tmp_path_factory.mktemp("prefect"))
    with server.running:
        server.start()
        yield server


@pytest.fixture(scope="session")
def prefect_environment(prefect: Prefect) -> dict[str, str]:
    """The environment of a flow that reports to the session's server."""
    return prefect.environment


@pytest.fixture(scope="session")
def learning(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline whose policies get better, with deployments, not run."""
    return tiny_policies.rebuild(pristine, tmp_path_factory.mktemp("learning") / "pipeline")


@pytest.fixture(scope="session")
def undisturbed(learning: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same after plain `dvc repro`, its lineage left out."""
    root = tiny_pipeline.copy(learning, tmp_path_factory.mktemp("undisturbed") / "pipeline")
    tiny_pipeline.reproduce(root, "report")
    return root


@pytest.fixture(scope="session")
def team(learning: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    """A team where another was killed, all of it, while the pipeline ran."""
    workspace = tiny_pipeline.copy(learning, tmp_path_factory.mktemp("team") / "pipeline")
    marks = workspace / ".work/marks.txt"
    # It starts no server of MLflow, which has no part in this.
    with running_team(workspace, MLFLOW_TRACKING_URI="http://127.0.0.1:1") as killed:
        kept = urllib.request.Request(
            f"{killed.s3}/grpo/kept", data=b"by the team that was killed", method="PUT"
        )
        urllib.request.urlopen(kept, timeout=30).close()
        lost = killed.start("reproduce/pipeline", push=True)
        until(lambda: marks.exists() and "start base" in marks.read_text())
        killed.process.kill()
        until(lambda: processes_in(workspace) == [])
    with running_team(workspace) as team:
        team.lost_run = lost
        yield team


@pytest.fixture(scope="session")
def done(team: Team) -> dict[str, Any]:
    """The pipeline's run on the worker."""
    return team.run("reproduce/pipeline", seconds=1.0, push=True)


@pytest.fixture(scope="session")
def promoted(done: dict[str, Any], team: Team) -> dict[str, Any]:
    """What the worker decides on a policy that is better than the champion of a member."""
    tiny_pipeline.commit(team.workspace, "results")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(team.workspace)
        patch.setenv("MLFLOW_TRACKING_URI", team.mlflow)
        assert Registry(MODEL).promote("a-1", Bounds()).outcome == PROMOTED
    return team.decide("promote/promote", policy="a-2")
