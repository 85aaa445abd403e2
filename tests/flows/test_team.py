"""A team on this machine: servers, a worker and deployments by one command, driven over HTTP."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from flows.server import free_port
from grpo.lineage.lock import read_lock
from tests import tiny_pipeline

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
NAMES = {"reproduce/workspace", "reproduce/nightly", "sweep/workspace", "promote/workspace"}
ENDED = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


class Team:
    """What a member sees of `python -m flows.team`."""

    def __init__(self, workspace: Path, process: "subprocess.Popen[str]", api: str) -> None:
        self.workspace, self.process, self.api = workspace, process, api
        found = self.ask("deployments/filter", {})
        flows = {each["id"]: each["name"] for each in self.ask("flows/filter", {})}
        self.deployments = {f"{flows[each['flow_id']]}/{each['name']}": each for each in found}

    def ask(self, path: str, content: Any) -> Any:
        """Returns what the server answers."""
        request = urllib.request.Request(
            f"{self.api}/{path}",
            data=json.dumps(content).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def run(self, deployment: str, seconds: float = 0.0, **parameters: Any) -> dict[str, Any]:
        """Schedules a run and returns it when it has ended."""
        run = self.start(deployment, seconds, **parameters)
        for _ in range(600):
            (found,) = self.ask("flow_runs/filter", {"flow_runs": {"id": {"any_": [run]}}})
            if found["state_type"] in ENDED:
                return dict(found)
            time.sleep(0.1)
        raise AssertionError(f"the run has not ended: {found['state']}")

    def start(self, deployment: str, seconds: float = 0.0, **parameters: Any) -> str:
        """Schedules a run and returns its id."""
        due = datetime.now(UTC) + timedelta(seconds=seconds)
        made = self.ask(
            f"deployments/{self.deployments[deployment]['id']}/create_flow_run",
            {
                "parameters": parameters,
                "state": {
                    "type": "SCHEDULED",
                    "state_details": {"scheduled_time": due.isoformat()},
                },
            },
        )
        return str(made["id"])

    def starts_of(self, deployment: str) -> set[str]:
        """Returns the times of day at which it will run, once the server has planned them."""
        own = {"id": {"any_": [self.deployments[deployment]["id"]]}}
        for _ in range(300):
            planned = self.ask("flow_runs/filter", {"deployments": own})
            if planned:
                return {each["expected_start_time"][11:16] for each in planned}
            time.sleep(0.1)
        raise AssertionError(f"{deployment} is never run")

    def artifact(self, key: str, run: str) -> Any:
        """Returns the data of a run's artifact."""
        asked = {"key": {"any_": [key]}, "flow_run_id": {"any_": [run]}}
        (found,) = self.ask("artifacts/filter", {"artifacts": asked})
        return found["data"]


@contextmanager
def running_team(workspace: Path, **settings: str) -> Iterator[Team]:
    """Starts `python -m flows.team` in a workspace and kills what is left of it at the end."""
    port = free_port()
    ports = {"GRPO_PREFECT_PORT": str(port), "GRPO_MLFLOW_PORT": str(free_port())}
    environment = tiny_pipeline.environment()
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "PREFECT_HOME"):
        environment.pop(name, None)
    environment.update(ports, **settings)
    process = subprocess.Popen(
        [sys.executable, "-m", "flows.team"],
        cwd=workspace,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    try:
        assert any(line.startswith("Ctrl-C") for line in process.stdout)
        yield Team(workspace, process, f"http://127.0.0.1:{port}/api")
    finally:
        process.kill()
        process.communicate()


def wait_until(is_so: Callable[[], bool]) -> None:
    for _ in range(600):
        if is_so():
            return
        time.sleep(0.1)
    raise AssertionError("it never came")


def processes_in(workspace: Path) -> list[str]:
    """Returns the commands that run in a workspace."""
    found = []
    for each in Path("/proc").iterdir():
        if each.name.isdecimal() and int(each.name) != os.getpid():
            try:
                if Path(os.readlink(each / "cwd")).is_relative_to(workspace):
                    found.append((each / "cmdline").read_text())
            except OSError:
                continue
    return found


@pytest.fixture(scope="module")
def workspace(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline with deployments."""
    root = tiny_pipeline.copy(pristine, tmp_path_factory.mktemp("team") / "pipeline")
    (root / "prefect.yaml").write_text((tiny_pipeline.SOURCE / "prefect.yaml").read_text())
    return root


@pytest.fixture(scope="module")
def team(workspace: Path) -> Iterator[Team]:
    """A team where another was killed, all of it, while the pipeline ran."""
    marks = workspace / ".work/marks.txt"
    # It starts no server of MLflow, which has no part in this.
    with running_team(workspace, MLFLOW_TRACKING_URI="http://127.0.0.1:1") as killed:
        killed.start("reproduce/workspace")
        wait_until(lambda: marks.exists() and "start base" in marks.read_text())
        killed.process.kill()
        wait_until(lambda: processes_in(workspace) == [])
    with running_team(workspace) as team:
        yield team


@pytest.fixture(scope="module")
def done(team: Team) -> dict[str, Any]:
    """The pipeline's run on the worker."""
    return team.run("reproduce/workspace", seconds=1.0)


def test_a_team_that_was_killed_goes_on_to_the_same_bytes(
    done: dict[str, Any], workspace: Path, finished: Path
) -> None:
    assert done["state_type"] == "COMPLETED", done["state"]
    # Stages that ran side by side stand in the order in which they ended.
    assert read_lock(workspace) == read_lock(finished)
    assert (workspace / ".work/marks.txt").read_text().count("start prepare") == 1


def test_a_run_shows_its_stages_its_progress_and_where_the_report_is(
    done: dict[str, Any], team: Team, workspace: Path
) -> None:
    rows = {row["stage"]: row["state"] for row in json.loads(team.artifact("stages", done["id"]))}
    assert rows["prepare"] == "Unchanged"
    assert {rows["train@a-1"], rows["report"]} == {"Completed"}
    assert team.artifact("progress", done["id"]) == 100
    page = str(workspace / "artifacts/report/index.html")
    assert page in team.artifact("report", done["id"])


def test_deployments_are_there_and_what_is_scheduled_is_planned(team: Team) -> None:
    assert set(team.deployments) == NAMES
    assert team.starts_of("reproduce/nightly") == {"03:00"}


def test_a_refused_promotion_is_a_completed_run_that_says_why(
    done: dict[str, Any], team: Team
) -> None:
    refused = team.run("promote/workspace", model="solver", policy="a-1")
    (row,) = json.loads(team.artifact("promotion", refused["id"]))
    assert (refused["state_type"], row["outcome"]) == ("COMPLETED", "refused")


def test_a_team_that_is_stopped_leaves_no_process(team: Team, workspace: Path) -> None:
    team.process.terminate()
    assert team.process.wait(60) == 0
    assert processes_in(workspace) == []
