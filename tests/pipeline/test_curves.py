"""MLflow shows the curve of an arm while its rounds train, and misses nothing in the end."""

import base64
import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, chdir
from pathlib import Path
from typing import Any

import mlflow
import pytest
from mlflow import MlflowClient

from flows.server import free_port, mlflow_server
from grpo.runtime.artifacts.files import read_json
from grpo.runtime.curves import EXPERIMENT, Curve, RoundCurve, curve_path, read_curve
from tests.pipeline.processes import start_stage, until
from tests.pipeline.test_iterations import ITERATIONS, NAME, command_of, online
from tests.pipeline.workspaces import environment
from tests.rewards.servers import Response, as_json, serving, serving_paths

# MLflow itself uses what SQLAlchemy deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
NAMES = ("reward_mean", "grad_norm")


class Tracking:
    """A server of MLflow that can be stopped and started again."""

    def __init__(self, folder: Path) -> None:
        self.port, self.store = free_port(), f"sqlite:///{folder}/mlflow.db"
        self.uri = f"http://127.0.0.1:{self.port}"
        self.running = ExitStack()

    def start(self) -> None:
        self.running.enter_context(mlflow_server(self.store, self.port))

    def stop(self) -> None:
        self.running.close()

    @property
    def client(self) -> MlflowClient:
        """A client of the store, which answers while the server is stopped, too."""
        return MlflowClient(tracking_uri=self.store)

    def runs(self, arm: str) -> list[Any]:
        """Returns the runs of an arm, the newest first."""
        experiment = self.client.get_experiment_by_name(EXPERIMENT)
        where = f"tags.arm = '{arm}'"
        return self.client.search_runs([experiment.experiment_id], where) if experiment else []

    def steps(self, run: Any, name: str = "reward_mean") -> list[tuple[int, float]]:
        found = self.client.get_metric_history(run.info.run_id, name)
        return sorted((each.step, each.value) for each in found)


@pytest.fixture(scope="module")
def tracking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tracking]:
    server = Tracking(tmp_path_factory.mktemp("mlflow"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def workspace(
    tracking: Tracking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking.uri)
    with chdir(tmp_path):
        yield tmp_path


def rows(first: int, count: int, scale: float = 1.0) -> list[Mapping[str, Any]]:
    """Returns rows of updates.csv."""
    return [
        {"update": update, "reward_mean": scale * update, "grad_norm": 0.5, "learning_rate": None}
        for update in range(first, first + count)
    ]


def train(arm: str, *parts: tuple[str, str, int, int]) -> None:
    """Writes the curves of rounds: name, key, first update, and number of updates."""
    before = None
    for name, key, first, count in parts:
        curve = RoundCurve(arm=arm, name=name, key=key, before=before)
        for done in range(1, count + 1):
            curve.update(rows(first, done))
        assert not curve.is_behind
        before = name


@pytest.mark.usefixtures("workspace")
def test_a_curve_goes_on_over_the_rounds_of_an_arm_and_a_new_training_has_a_new_run(
    tracking: Tracking,
):
    train("one", ("one-1", "a", 0, 3), ("one-2", "b", 3, 2))
    train("one", ("one-1", "a", 0, 3), ("one-2", "b", 3, 2))  # again, as after a resume
    (run,) = tracking.runs("one")
    assert run.info.run_name == "arm one"
    for name in NAMES:
        found = tracking.steps(run, name)
        assert found == [(n, float(n) if name == "reward_mean" else 0.5) for n in range(5)]
    RoundCurve(arm="one", name="one-2", key="c", before="one-1").update(rows(3, 1, scale=2.0))
    (again,) = [each for each in tracking.runs("one") if each.data.tags["curve"] == "c"]
    assert tracking.steps(again) == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 6.0)]
    train("one", ("one-1", "d", 0, 1))
    assert sorted(len(tracking.steps(each)) for each in tracking.runs("one")) == [1, 4, 5]


@pytest.mark.long
@pytest.mark.usefixtures("workspace")
def test_what_a_stopped_server_misses_it_gets_later(
    tracking: Tracking, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("grpo.runtime.curves.PAUSE_SECONDS", 0.0)
    curve = RoundCurve(arm="two", name="two-1", key="a", before=None)
    curve.update(rows(0, 1))
    tracking.stop()
    for done in (2, 3):
        curve.update(rows(0, done))
    assert curve.is_behind
    tracking.start()
    curve.update(rows(0, 4))
    assert not curve.is_behind
    (run,) = tracking.runs("two")
    assert tracking.steps(run) == [(n, float(n)) for n in range(4)]


@pytest.mark.usefixtures("workspace")
@pytest.mark.parametrize(
    "uri",
    [
        "http://127.0.0.1:1",
        "http://a:planted0password@127.0.0.1:1",
        "http://a:planted0password@127.0.0.1:planted0password",
        "https://a:planted0password@127.0.0.1",
        "http://[",
    ],
)
def test_training_goes_on_without_an_answer_and_keeps_no_password(
    monkeypatch: pytest.MonkeyPatch, uri: str
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_TRACKING_SERVER_CERT_PATH", "nowhere.pem")
    curve = RoundCurve(arm="three", name="three-1", key="a", before=None)
    start = time.monotonic()
    for done in range(1, 50):
        curve.update(rows(0, done))
    assert time.monotonic() - start < 5  # it does not ask again at once
    assert curve.is_behind
    kept = read_curve("three-1")
    assert kept is not None
    assert len(kept.points) == 49
    assert "planted0password" not in curve_path("three-1").read_text()


@pytest.mark.usefixtures("workspace")
@pytest.mark.parametrize("found", [{}, [], {"experiment": 5}, {"experiment": {}}, "x", 5, None])
def test_training_goes_on_if_what_answers_is_no_mlflow(
    monkeypatch: pytest.MonkeyPatch, found: object
):
    with serving(lambda body: as_json(found)) as asked:
        place = asked.url.removeprefix("http://")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://a%40b:c@{place}")
        curve = RoundCurve(arm="five", name="five-1", key="a", before=None)
        curve.update(rows(0, 2))
    assert curve.is_behind
    assert asked.keys == ["Basic " + base64.b64encode(b"a@b:c").decode()]


@pytest.mark.usefixtures("workspace")
@pytest.mark.parametrize("last", ["/runs/search", "/runs/create"])
@pytest.mark.parametrize("found", [{}, {"runs": [{}], "run": {}}, {"runs": 5, "run": 5}, "x"])
def test_training_goes_on_if_a_later_answer_is_not_mlflows(
    monkeypatch: pytest.MonkeyPatch, last: str, found: object
):
    paths = list[str]()

    def respond(path: str, body: Any) -> Response:
        paths.append(path)
        if "/experiments/" in path:
            return as_json({"experiment": {"experiment_id": "1"}})
        return as_json(found if path.endswith(last) else {})

    with serving_paths(respond) as asked:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", asked.url)
        curve = RoundCurve(arm="six", name="six-1", key="a", before=None)
        curve.update(rows(0, 2))
    assert curve.is_behind
    assert any(each.endswith(last) for each in paths)


@pytest.mark.usefixtures("workspace")
@pytest.mark.parametrize("content", ["", "{}", '{"arm": 1', "\0"])
def test_a_file_that_is_no_curve_is_replaced(content: str):
    curve_path("four-1").parent.mkdir(parents=True)
    curve_path("four-1").write_text(content)
    train("four", ("four-1", "a", 0, 2))
    assert isinstance(read_curve("four-1"), Curve)


def test_the_curve_grows_while_a_stage_trains(finished: Path, tmp_path: Path, tracking: Tracking):
    workspace = online(finished, tmp_path / "online")
    given = {**environment(), "MLFLOW_TRACKING_URI": tracking.uri}
    command = command_of(workspace, "train")
    stage = start_stage(workspace, f"train@{NAME}", command, environment=given)
    seen = set[int]()

    def has_grown() -> bool:
        seen.update(len(tracking.steps(each)) for each in tracking.runs("uniform"))
        return not stage.is_alive()

    until(has_grown)
    assert stage.exitcode == 0
    assert len(seen - {0}) > 1, seen  # while it trained, not at its end
    (run,) = tracking.runs("uniform")
    assert [step for step, _ in tracking.steps(run)] == [*range(ITERATIONS)]


def client_of(finished: Path) -> tuple[MlflowClient, str]:
    """Returns a client of a workspace's store and the id of its experiment."""
    client = MlflowClient(tracking_uri=f"sqlite:///{finished}/mlflow.db")
    experiment = client.get_experiment_by_name(EXPERIMENT)
    assert experiment is not None
    return client, experiment.experiment_id


@pytest.mark.parametrize("name", ["uniform-1", "sgpo-1"])
def test_without_a_server_the_lineage_writes_the_curve(finished: Path, name: str):
    with chdir(finished):
        curve = read_curve(name)
    assert curve is not None
    client, experiment = client_of(finished)
    (run,) = client.search_runs([experiment], f"tags.arm = '{curve.arm}'")
    found = client.get_metric_history(run.info.run_id, "reward_mean")
    assert len(found) == len(curve.points) > 0
    assert run.info.status == "FINISHED"
    assert "mlflow.parentRunId" in run.data.tags


def test_the_run_of_a_pipeline_shows_its_results(finished: Path):
    client, experiment = client_of(finished)
    (run,) = client.search_runs(
        [experiment], "params.`task.kind` = 'reasoning_gym' AND tags.stage IS NULL"
    )
    assert re.fullmatch(r"reasoning_gym: uniform, sgpo \([0-9a-f]{7}.*\)", run.info.run_name)
    report = read_json(finished / "artifacts/report/metrics.json")["arms"]
    for arm, results in report.items():
        assert run.data.metrics[f"{arm}/mean_at_k"] == results["mean_at_k"]["value"]
        assert run.data.metrics[f"{arm}/flops"] == results["cost"]["flops"]
    drawings = [each.path for each in client.list_artifacts(run.info.run_id, "figures")]
    assert drawings == ["figures/reward_by_cost.svg"]
    samples = [each.path for each in client.list_artifacts(run.info.run_id, "samples")]
    assert samples == [f"samples/{name}.jsonl" for name in ("base", "sgpo-1", "uniform-1")]
    text = mlflow.artifacts.load_text(f"{run.info.artifact_uri}/{samples[0]}")
    assert {"prompt_id", "text"} <= json.loads(text.splitlines()[0]).keys()
