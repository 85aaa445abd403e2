"""Stages through Prefect's server to workers, one of which is killed."""

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from http import HTTPStatus
from pathlib import Path
from uuid import UUID, uuid4

import httpx
import pytest
from dvc.repo import Repo
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, WorkPoolCreate
from prefect.client.schemas.objects import Artifact, State, StateType
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling, Completed, Crashed, Running

import flows.dispatch
import flows.runner
from flows import remote_stage
from flows.dispatch import TAKEN, Dispatcher, reproduce_remotely
from flows.launcher import descendants
from flows.planning import Hints, Step
from flows.remote_stage import ANSWER, DEPLOYMENTS, stage
from flows.runner import StageError, stages_lock
from flows.team import prefect_worker
from flows.wire import Answer, Order
from grpo.errors import BusyError, ParameterError
from grpo.params.yaml import parse_yaml
from tests import tiny_pipeline
from tests.flows.test_launcher import until

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
Environment = dict[str, str]
BEAT_TIMEOUT_SECONDS = 6.0
CODE = f"""
import sys, flows.dispatch, flows.reproduce
flows.dispatch.POLL_SECONDS, flows.dispatch.BEAT_TIMEOUT_SECONDS = 0.2, {BEAT_TIMEOUT_SECONDS}
sys.exit(flows.reproduce.main(sys.argv[1:]))
"""
STEP = Step(name="train@a-1", upstream=(), hints=Hints(), is_changed=True)
ORDER = Order(commit="0" * 40, stage="train@a-1", entries={})


@pytest.fixture(scope="module")
def client(prefect_environment: Environment) -> Iterator[SyncPrefectClient]:
    with (
        temporary_settings({PREFECT_API_URL: prefect_environment["PREFECT_API_URL"]}),
        get_client(sync_client=True) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def dispatcher(client: SyncPrefectClient) -> Dispatcher:
    """With the deployments that prefect.yaml lists."""
    written = parse_yaml((tiny_pipeline.SOURCE / "prefect.yaml").read_text())
    own = [each for each in written["deployments"] if f"stage/{each['name']}" in DEPLOYMENTS]
    client.create_work_pool(WorkPoolCreate(name="grpo", type="process"))
    for each in own:
        assert each["work_pool"]["name"] == "grpo"
        client.create_deployment(
            client.create_flow(stage),
            name=each["name"],
            entrypoint=each["entrypoint"],
            work_pool_name="grpo",
            work_queue_name=each["work_pool"]["work_queue_name"],
            pull_steps=written["pull"],
        )
    return Dispatcher(client, show=print)


def start_worker(stack: ExitStack, host: Path, environment: Environment) -> set[int]:
    """Starts a worker in a directory of its own; returns its processes as they are then."""
    before = set(descendants(os.getpid()))
    use_store(host)
    with contextlib.chdir(host):
        stack.enter_context(prefect_worker({**environment, "GRPO_WORKSPACE": str(host)}))
    return set(descendants(os.getpid())) - before


def use_store(workspace: Path) -> None:
    """Writes where data is into settings that are in no commit, as `make team` does."""
    (workspace / ".dvc").mkdir(parents=True, exist_ok=True)
    text = "[core]\n    remote = store\n['remote \"store\"']\n    url = ../../store\n"
    (workspace / ".dvc" / "config.local").write_text(text)


def kill(processes: set[int]) -> None:
    """Kills processes and what is below them, as when a host fails."""
    doomed = {below for one in processes for below in (one, *descendants(one))}
    # All stand still before the first one dies: else a worker may tell of its dead run.
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for each in doomed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, number)


def run_remotely(workspace: Path, environment: Environment) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", CODE, "--remote", "train@a-1"],
        cwd=workspace,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def repository(reproduced: Path, tmp_path: Path) -> Path:
    """A pipeline that has run, its data in a directory that all hosts reach, a stage now other."""
    root = tiny_pipeline.copy(reproduced, tmp_path / "repository")
    use_store(root)
    with Repo(str(root)) as repo:
        repo.push()
    tiny_pipeline.replace(root, "seconds: 0.0", "seconds: 0.1")
    tiny_pipeline.commit(root, "slower")
    return root


@pytest.mark.long
def test_the_stage_of_a_killed_worker_is_run_by_another(
    repository: Path, dispatcher: Dispatcher, prefect_environment: Environment, tmp_path: Path
) -> None:
    environment = {**prefect_environment, "GRPO_REPOSITORY": str(repository)}
    clone = tmp_path / "clone"
    tiny_pipeline.run(tmp_path, "git", "clone", "-q", str(repository), str(clone))
    use_store(clone)
    before = (clone / "dvc.lock").read_text()
    place = tmp_path / "one" / ".work" / "worker" / "0" / ".work"
    place.mkdir(parents=True)
    (place / "hold-a-1").touch()  # there it would never end
    marks = place / "marks.txt"
    with ExitStack() as hosts:
        one = start_worker(hosts, tmp_path / "one", environment)
        process = hosts.enter_context(run_remotely(clone, environment))
        hosts.callback(process.kill)
        until(lambda: marks.exists() and "start a-1" in marks.read_text())
        kill(one)
        start_worker(hosts, tmp_path / "two", environment)
        out, said = process.communicate()
        assert process.returncode == 0, said
        assert out == "3 stages are up to date; dvc pull train@a-1 brings what the last one wrote\n"
    lost = f"its worker on {platform.node()} sent no heartbeat for {BEAT_TIMEOUT_SECONDS:g} s"
    assert f"train@a-1: {lost}; attempt 2 of 2" in said
    assert "train@a-1 working on a-1" in said
    assert "train@a-1 Completed in " in said
    lock = (clone / "dvc.lock").read_text()
    assert lock.replace("seconds: 0.1", "seconds: 0.0") == before != lock


@pytest.mark.long
def test_without_its_deployments_a_server_is_refused(
    client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flows.dispatch, "DEPLOYMENTS", ("stage/none",))
    with pytest.raises(ParameterError, match=r"^prefect\.yaml: deployments stage/none must be at"):
        Dispatcher(client, show=print)


def test_the_run_of_a_killed_orchestrator_is_taken_over(
    client: SyncPrefectClient, dispatcher: Dispatcher
) -> None:
    def start(state: State | None = None) -> UUID:
        """Returns the run that an orchestrator starts, or finds, before it gets a state."""
        run = dispatcher.start(STEP, ORDER)
        if state:
            client.set_flow_run_state(run.id, state, force=True)
        return run.id

    first = start()
    assert start(Running()) == start(Completed()) == start() == first
    client.update_flow_run(first, tags=[TAKEN])
    second = start(Crashed())
    third = start(Cancelling())
    assert len({first, second, third, start()}) == 4
    assert client.read_flow_run(start()).work_queue_name == "stages"
    on_gpu = replace(STEP, hints=Hints(gpu=1))
    other = replace(ORDER, stage="train@b-1")
    assert dispatcher.start(on_gpu, other).work_queue_name == "gpu-stages"


def test_a_worker_that_falls_silent_is_given_up_and_its_place_is_free(
    client: SyncPrefectClient, dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flows.dispatch, "POLL_SECONDS", 0.1)
    monkeypatch.setitem(dispatcher.patience, StateType.RUNNING, 0.3)
    order = replace(ORDER, stage="train@c-1")
    run = dispatcher.start(STEP, order).id
    client.set_flow_run_state(run, Running(), force=True)
    with pytest.raises(StageError, match=r"sent no heartbeat for 0\.3 s$") as error:
        dispatcher.send(STEP, order, threading.Event()).__enter__()
    assert error.value.code == 1
    assert client.read_flow_run(run).state_type is StateType.CRASHED


def test_another_attempt_gets_another_run(
    client: SyncPrefectClient, dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flows.dispatch, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(dispatcher, "patience", dict.fromkeys(StateType, 5.0))
    order = replace(ORDER, stage="train@d-1")

    def begin(state: State, answer: Answer | None) -> str:
        """Returns the id of the run that the next attempt gets, once it has come to that."""
        run = dispatcher.start(STEP, order).id
        if answer:
            data = json.dumps([asdict(answer)])
            made = ArtifactCreate(type="table", key=ANSWER, data=data, flow_run_id=run)
            client.create_artifact(made)
        client.set_flow_run_state(run, state, force=True)
        return str(run)

    def refuse() -> None:
        with dispatcher.send(STEP, order, threading.Event()) as found:
            assert found == answer
            raise StageError("refused", code=1)

    answer = Answer(host="one")
    runs = set[str]()
    for state, left in [(Running(), answer), (Completed(), answer), (Completed(), None)]:
        runs.add(begin(state, left))
        with pytest.raises(StageError):
            refuse()
    assert len({*runs, str(dispatcher.start(STEP, order).id)}) == 4


class Refusing:
    """A server that lets nobody read runs, or has none."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def read_deployment_by_name(self, name: str) -> Artifact:
        return Artifact(id=uuid4())

    create_artifact = read_deployment_by_name

    def update_artifact(self, *_: object) -> None:
        pass

    def read_flow_run(self, run: UUID) -> None:
        raise self.error


def status_error(code: HTTPStatus) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "http://127.0.0.1/api")
    response = httpx.Response(code, request=request)
    return httpx.HTTPStatusError(f"said {code.phrase}", request=request, response=response)


def test_a_server_that_refuses_ends_the_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    forbidden = status_error(HTTPStatus.FORBIDDEN)
    monkeypatch.setattr(flows.dispatch, "POLL_SECONDS", 0.01)
    watcher = Dispatcher(Refusing(forbidden), show=print)
    with pytest.raises(StageError, match=r"^train@a-1: Prefect's server, said Forbidden$"):
        watcher._watch(STEP, uuid4(), threading.Event())

    def refuse_once(*_: object, **__: object) -> None:
        monkeypatch.setattr(remote_stage, "create_table_artifact", print)
        raise forbidden

    monkeypatch.setattr(remote_stage, "create_table_artifact", refuse_once)
    with pytest.raises(httpx.HTTPStatusError):
        remote_stage._hand_back(Answer(host="one"))


@pytest.mark.parametrize(
    "error",
    [
        status_error(HTTPStatus.SERVICE_UNAVAILABLE),
        status_error(HTTPStatus.TOO_MANY_REQUESTS),
        httpx.ConnectError("nobody there"),
    ],
    ids=str,
)
def test_a_server_that_is_away_is_asked_again(error: httpx.HTTPError) -> None:
    assert not remote_stage.is_refusal(error)


def test_a_worker_whose_run_was_deleted_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    deleted = Refusing(ObjectNotFound(status_error(HTTPStatus.NOT_FOUND)))
    monkeypatch.setattr(
        remote_stage, "get_client", lambda sync_client: contextlib.nullcontext(deleted)
    )
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", str(uuid4()))
    has_given_up = threading.Event()
    with remote_stage._heartbeats(0.01, give_up=has_given_up.set):
        assert has_given_up.wait(5.0)


def test_remote_runs_wait_for_stages_of_a_killed_local_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(flows.runner, "WAIT_SECONDS", 0.0)
    (tmp_path / ".work").mkdir()
    with (
        stages_lock(tmp_path),
        pytest.raises(BusyError, match="a stage of an earlier run is still running"),
    ):
        reproduce_remotely.fn()
