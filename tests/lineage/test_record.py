"""dvc.lock in MLflow: once, complete, and searchable from either end."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient

from grpo.errors import ArtifactError
from grpo.lineage.lock import read_lock
from grpo.lineage.record import EXPERIMENT, find_users, record, tracking_uri
from grpo.params.yaml import parse_yaml
from tests import tiny_pipeline

# MLflow itself uses what SQLAlchemy deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

STAGES = {
    "prepare", "base", "train@a-1", "train@b-1", "evaluate@a-1", "evaluate@b-1", "report",
}  # fmt: skip

LINEAGE_STAGE = """\
  lineage:
    cmd: python -m stages.lineage .
    deps: [artifacts/report/metrics.json]
"""


def client_of(workspace: Path) -> MlflowClient:
    return MlflowClient(tracking_uri=tracking_uri(workspace))


def lock_of(workspace: Path) -> str:
    return (workspace / "dvc.lock").read_text()


def stages_with(workspace: Path, condition: str) -> list[str]:
    client = client_of(workspace)
    experiment = client.get_experiment_by_name(EXPERIMENT)
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], condition)
    return sorted(run.data.tags.get("stage", "parent") for run in runs)


def test_recording_twice_changes_nothing(history: Path) -> None:
    first, second = record(history), record(history)
    assert first.new == second.new == ()
    assert first == second
    assert stages_with(history, "") == sorted([*STAGES, "parent"])


def test_a_state_says_in_mlflow_what_has_changed_since_the_last_one(history: Path) -> None:
    first = client_of(history).get_run(record(history).parent)
    revision = first.data.tags["git_revision"]
    assert first.info.run_name == f"pipeline ({revision[:7]})"
    assert first.data.params["rounds.a-1.rate"] == "0.1"
    assert "changed_parameters" not in first.data.tags
    params = history / "params.yaml"
    for rate in ("0.3", "0.4"):  # the first state was recorded in another workspace
        params.write_text(re.sub(r"rate: 0\.[134]\}", f"rate: {rate}}}", params.read_text()))
        tiny_pipeline.reproduce_in_process(history)
        second = client_of(history).get_run(record(history).parent)
    assert second.info.run_name == f"pipeline ({revision[:7]}, dirty)"
    assert second.data.tags["changed_parameters"] == "rounds.a-1.rate"


def test_a_digest_finds_its_producer_and_its_consumers(recorded: Path) -> None:
    lock = read_lock(recorded)
    policy = lock["base"].outs[0].digest
    users = ["base", "report", "train@a-1", "train@b-1"]  # report reads the directory above it
    assert stages_with(recorded, f"dataset.digest = '{policy}'") == users
    roles = [(user.role, user.stage) for user in find_users(policy, recorded)]
    assert roles == [("dep", "report"), ("dep", "train@a-1"), ("dep", "train@b-1"), ("out", "base")]
    evaluation = lock["evaluate@a-1"].outs[0].digest
    assert stages_with(recorded, f"dataset.digest = '{evaluation}'") == ["evaluate@a-1", "report"]
    prompts = lock["prepare"].deps[0].digest
    assert stages_with(recorded, f"dataset.digest = '{prompts}'") == ["prepare"]


def test_a_run_holds_parameters_metrics_curves_usage_and_revision(recorded: Path) -> None:
    found = record(recorded)
    run = client_of(recorded).get_run(found.runs["train@a-1"])
    assert run.data.params == {
        "rounds.a-1.rate": "0.1",
        "rounds.a-1.start": "base",
        "seconds": "0.0",
    }
    summary = json.loads((recorded / "artifacts/policies/a-1/summary.json").read_text())
    assert run.data.metrics == {
        "cost.flops": summary["cost"]["flops"],
        "system/cpu_seconds": 3.0,
        "system/peak_memory_megabytes": 5e-6,
        "update.loss": 0.25,
        "usage.cpu_seconds": 3.0,
        "usage.peak_bytes": 5.0,
        "usage.seconds": 4.0,
        "usage.seconds_by_part.update": 2.0,
    }
    curve = client_of(recorded).get_metric_history(run.info.run_id, "update.loss")
    assert [(point.step, point.value) for point in curve] == [(1, 0.5), (2, 0.25)]
    head = tiny_pipeline.run(recorded, "git", "rev-parse", "HEAD").strip()
    assert run.data.tags["git_revision"] == head
    assert run.data.tags["git_modified"] == "false"
    assert run.data.tags["mlflow.parentRunId"] == found.parent
    assert run.info.end_time - run.info.start_time == 4000


def test_only_stages_that_ran_again_get_new_runs_and_an_old_state_finds_its_own(
    history: Path,
) -> None:
    before, old = record(history), (history / "dvc.lock").read_bytes()
    tiny_pipeline.replace(history, "rate: 0.2", "rate: 0.3")
    tiny_pipeline.reproduce_in_process(history)
    after = record(history)
    assert set(after.new) == {"train@b-1", "evaluate@b-1", "report"}
    assert after.parent != before.parent
    kept = STAGES - set(after.new)
    assert {name: after.runs[name] for name in kept} == {name: before.runs[name] for name in kept}
    tags = client_of(history).get_run(after.runs["train@b-1"]).data.tags
    assert tags["git_modified"] == "true"
    assert all(run in client_of(history).get_run(after.parent).data.tags["mlflow.note.content"]
               for run in after.runs.values())  # fmt: skip
    (history / "dvc.lock").write_bytes(old)
    assert record(history).parent == before.parent


def test_a_run_that_was_left_half_written_is_written_anew(history: Path) -> None:
    before = record(history)
    client = client_of(history)
    client.update_run(before.runs["base"], status="RUNNING")
    client.update_run(before.parent, status="RUNNING")
    after = record(history)
    assert after.new == ("base",)
    assert after.parent == before.parent
    assert stages_with(history, "") == sorted([*STAGES, "parent"])


@pytest.mark.long
def test_two_first_users_of_a_new_database_do_not_collide(workspace: Path) -> None:
    command = [sys.executable, "-c", "from grpo.lineage.record import record; record()"]
    both = [
        subprocess.Popen(command, cwd=workspace, env=tiny_pipeline.environment()) for _ in range(2)
    ]
    assert [process.wait() for process in both] == [0, 0]
    assert stages_with(workspace, "") == sorted([*STAGES, "parent"])


@pytest.mark.parametrize("obstacle", ["a directory", "another file"])
def test_a_database_that_cannot_be_written_is_one_line(workspace: Path, obstacle: str) -> None:
    database = workspace / "mlflow.db"
    if obstacle == "a directory":
        database.mkdir()
    else:
        database.write_text("no database" * 100)
    with pytest.raises(
        ArtifactError, match=r"mlflow\.db: cannot record the lineage, .*python -m grpo lineage$"
    ):
        record(workspace)


def test_the_address_is_absolute_and_the_environment_wins(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace)
    assert tracking_uri(Path()) == f"sqlite:///{workspace}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking.invalid")
    assert tracking_uri(Path()) == "http://tracking.invalid"


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.long)])
def test_plain_dvc_repro_records_every_stage_and_locks_the_same_bytes(
    committed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """The same as without that stage and, in make test-long, as in another workspace."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    locks = []
    for number in range(times):
        workspace = tiny_pipeline.copy(committed, tmp_path / str(number))
        with (workspace / "dvc.yaml").open("a") as pipeline:
            pipeline.write(LINEAGE_STAGE)
        (workspace / "dvc.lock").unlink()
        tiny_pipeline.reproduce(workspace)
        assert stages_with(workspace, "") == sorted([*STAGES, "parent"])
        assert record(workspace).new == ()  # its own entry, written after it ran, is no news
        locks.append(lock_of(workspace))
    assert len({*locks}) == 1
    entries, before = (parse_yaml(each)["stages"] for each in (locks[0], lock_of(committed)))
    assert entries.pop("lineage")["cmd"] == "python -m stages.lineage ."
    assert entries == before
