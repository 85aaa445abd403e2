"""A worker or Prefect's server is killed, or two pipelines start, while stages are at work."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from flows.launcher import descendants
from flows.team import POOL, prefect_worker
from grpo.lineage.lock import read_lock
from tests import tiny_pipeline
from tests.faults import FaultLine
from tests.flows.conftest import Prefect, processes_with
from tests.flows.teams import Team
from tests.flows.test_launcher import is_alive, until
from tests.flows.test_reproduce import Environment, at_work, run, running

pytestmark = [
    pytest.mark.long,
    pytest.mark.fault,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
ROUND = "b-1"  # its evaluation and the report are left
# 2 s instead of a minute: any outage here is longer than Prefect itself waits.
SHORT_PATIENCE = {"PREFECT_CLIENT_MAX_RETRIES": "1"}


@pytest.fixture(scope="module")
def halfway(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline of which two stages are left."""
    root = tiny_pipeline.copy(pristine, tmp_path_factory.mktemp("halfway") / "pipeline")
    tiny_pipeline.reproduce(root, "evaluate@a-1", f"train@{ROUND}")
    (root / ".work/marks.txt").unlink()
    (root / f".work/hold-{ROUND}").touch()  # the next stage does, until `go_on`
    return root


@pytest.fixture
def workspace(halfway: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of the test."""
    monkeypatch.chdir(tiny_pipeline.copy(halfway, tmp_path / "pipeline"))
    return tmp_path / "pipeline"


def go_on(workspace: Path, name: str = ROUND) -> None:
    (workspace / f".work/hold-{name}").unlink()


def until_at_work(workspace: Path) -> None:
    until(lambda: at_work(workspace) == [ROUND])


def lost_in(workspace: Path, reproduced: Path) -> list[str]:
    """Returns stages without the record that an undisturbed run leaves."""
    found = read_lock(workspace)
    return [name for name, entry in read_lock(reproduced).items() if found.get(name) != entry]


class Worker:
    """A worker of the session's server, which can be killed and started again."""

    def __init__(self, prefect: Prefect, home: Path) -> None:
        self.given = {**prefect.environment, **SHORT_PATIENCE}
        self.home = home
        self.running = ExitStack()

    def start(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.home)
            self.running.enter_context(prefect_worker(self.given))

    def kill(self) -> list[int]:
        """Returns what ran below it."""
        (process,) = processes_with(f"worker start --pool {POOL}")
        below = descendants(process.pid)
        process.kill()
        return below


@pytest.fixture(scope="module")
def worker(prefect: Prefect, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    found = Worker(prefect, tmp_path_factory.mktemp("worker"))
    with found.running:
        found.start()
        yield found


@pytest.fixture
def team(prefect: Prefect, worker: Worker, workspace: Path) -> Team:
    """Whoever schedules runs in the workspace, as `deployment`."""
    ports = {"PREFECT": str(prefect.port), "MLFLOW": "0", "S3": "0"}  # it has no part of these
    team = Team(workspace, None, ports)
    flow = team.ask("flows/", {"name": "reproduce"})
    step = {"prefect.deployments.steps.set_working_directory": {"directory": str(workspace)}}
    team.ask(
        "deployments/",
        {
            "name": "fault",
            "flow_id": flow["id"],
            "entrypoint": "flows.pipeline.reproduce",
            "work_pool_name": POOL,
            "pull_steps": [step],
        },
    )
    return Team(workspace, None, ports)


DEPLOYMENT = "reproduce/fault"


def test_after_a_killed_worker_no_process_is_left_and_the_next_run_goes_on(
    team: Team, worker: Worker, workspace: Path, reproduced: Path, fault: FaultLine
) -> None:
    lost = team.start(DEPLOYMENT)
    until_at_work(workspace)
    below = worker.kill()
    assert len(below) >= 4  # the flow, a launcher, dvc and a stage
    until(lambda: not any(map(is_alive, below)))
    go_on(workspace)
    with fault.recovery():
        worker.start()
        done = team.run(DEPLOYMENT)
    assert done["state_type"] == "COMPLETED", done["state"]["message"]
    assert team.ended(lost)["state_type"] == "CRASHED"
    fault.tell(
        "worker killed while a stage ran",
        "the stage ended with it, its run is Crashed; the next run began with that stage",
        lost=lost_in(workspace, reproduced),
    )


def test_a_run_outlasts_its_server(
    team: Team, prefect: Prefect, workspace: Path, reproduced: Path, fault: FaultLine
) -> None:
    (workspace / ".work/hold-report").touch()
    marks = workspace / ".work/marks.txt"
    begun = team.start(DEPLOYMENT)
    until_at_work(workspace)
    start = time.monotonic()
    try:
        prefect.kill()
        go_on(workspace)  # the stage ends while nobody can be told
        until(lambda: "start report" in marks.read_text())
        time.sleep(max(0.0, fault.outage_seconds - (time.monotonic() - start)))
    finally:
        prefect.start()
    with fault.recovery():
        go_on(workspace, "report")
        done = team.ended(begun)
    assert done["state_type"] == "COMPLETED", done["state"]["message"]
    fault.tell(
        f"Prefect's server killed for {fault.outage_seconds:g} s, its clients wait 2 s",
        "one stage ended meanwhile and the next began; the run is Completed",
        lost=lost_in(workspace, reproduced),
    )


def test_of_two_pipelines_in_a_workspace_one_runs(
    workspace: Path, reproduced: Path, prefect_environment: Environment, fault: FaultLine
) -> None:
    with (
        running(workspace, prefect_environment) as first,
        running(workspace, prefect_environment) as second,
    ):
        both = [first, second]
        until(lambda: any(each.poll() is not None for each in both))
        go_on(workspace)
        said = {each.wait(): each.communicate()[1] for each in both}
    assert set(said) == {0, 2}
    assert said[2].count("\n") == 1
    assert "reproduce is already running here; wait for it or stop it" in said[2]
    with fault.recovery():
        again = run(workspace, prefect_environment)
    assert again.stdout.startswith("everything is up to date")
    fault.tell(
        "two pipelines started in one workspace",
        "one ran; the other said so in one line, exit code 2",
        lost=lost_in(workspace, reproduced),
    )
