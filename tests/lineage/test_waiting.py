"""MLflow is away for a whole run: its lineage waits, and is written later as if it had not been."""

import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow.entities import Run

from flows.lineage import record_pending_lineage
from flows.reproduce import main
from flows.server import free_port, mlflow_server
from grpo.errors import ArtifactError, BusyError
from grpo.lineage.lock import Lock, read_lock
from grpo.lineage.notes import WAITING, keep_note, read_note, take_note, waiting
from grpo.lineage.record import (
    EXPERIMENT,
    OWN_STAGE,
    PendingError,
    _alone,
    record,
    store_lock,
    tracking_uri,
)
from grpo.runtime.artifacts.files import exclusive, write_bytes
from tests import tiny_pipeline
from tests.faults import FaultLine
from tests.lineage.test_record import LINEAGE_STAGE, client_of, stages_with

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def runs_of(workspace: Path, lock: Lock) -> dict[str, list[Run]]:
    """Returns the runs of each stage's entry in a lock file."""
    client = client_of(workspace)
    experiment = client.get_experiment_by_name(EXPERIMENT)
    assert experiment is not None
    wanted = {name: f"tags.lock_entry = '{each.fingerprint}'" for name, each in lock.items()}
    return {name: client.search_runs([experiment.experiment_id], wanted[name]) for name in wanted}


def run_without_mlflow(workspace: Path) -> Lock:
    """Runs all stages anew, the last of which says that MLflow is away."""
    with (workspace / "dvc.yaml").open("a") as pipeline:
        pipeline.write(LINEAGE_STAGE)
    (workspace / "dvc.lock").unlink()
    shutil.rmtree(workspace / ".dvc/cache/runs")
    command = [sys.executable, "-m", "dvc", "repro", "-q"]
    environment = tiny_pipeline.environment()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        0,
        f"{tracking_uri(workspace)}: cannot record the lineage, it does not answer; "
        f"it is kept in {WAITING}, repair MLflow and run python -m grpo lineage\n",
    )
    found = dict(read_lock(workspace))
    del found[OWN_STAGE]
    return found


@pytest.mark.long
@pytest.mark.fault
def test_lineage_waits_while_mlflow_is_down(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, fault: FaultLine
) -> None:
    monkeypatch.chdir(workspace)
    undisturbed, port = read_lock(workspace), free_port()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    first = run_without_mlflow(workspace)
    assert first == undisturbed
    flops = json.loads((workspace / "artifacts/policies/b-1/summary.json").read_text())["cost"]
    # A later run replaces what that one made before MLflow can be told of it.
    tiny_pipeline.replace(workspace, "rate: 0.2", "rate: 0.3")
    tiny_pipeline.reproduce(workspace, "report")
    second = {name: each for name, each in read_lock(workspace).items() if name != OWN_STAGE}
    for _ in range(2):
        with pytest.raises(PendingError):
            record()
    assert len(waiting(workspace)) == 2
    with mlflow_server(f"sqlite:///{workspace}/mlflow.db", port):
        with fault.recovery():
            assert main(["report"]) == 0  # all is up to date
        assert record().new == ()  # nor is anything written twice
        found = [runs_of(workspace, lock) for lock in (first, second)]
        parents = stages_with(workspace, "").count("parent")
    (trained,) = found[0]["train@b-1"]
    assert trained.data.metrics["cost.flops"] == flops["flops"]
    assert (parents, waiting(workspace)) == (2, [])
    fault.tell(
        "MLflow down for two whole runs",
        "they ended well and said in one line that lineage waits; the next run wrote it",
        lost=[name for each in found for name, runs in each.items() if len(runs) != 1],
    )


def test_a_damaged_note_keeps_no_other_from_mlflow(
    history: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = history / WAITING / "00000001-a.json"
    write_bytes(damaged, b'{"state": 1}')
    note = take_note(history, read_lock(history))
    keep_note(history, replace(note, state="other", tags={"pipeline_state": "other"}))
    with pytest.raises(ArtifactError, match=r"00000001-a\.json: must be a note of lineage"):
        record(history)
    assert stages_with(history, "tags.pipeline_state = 'other'") == ["parent"]
    assert waiting(history) == [damaged, history / WAITING / f"00000002-{note.state}.json"]
    record_pending_lineage(history)  # a run of the flows is not stopped by it
    assert waiting(history) == [damaged]
    said = capsys.readouterr().err
    assert (str(damaged) in said, said.count("\n")) == (True, 1)


def test_both_pages_of_a_report_are_kept_for_mlflow(history: Path) -> None:
    lock = read_lock(history)
    folder = (history / lock["report"].outs[0].path).parent
    written = {"index.html": "<p>page</p>", "rollouts.html": "<p>all rollouts</p>"}
    for name, text in written.items():
        (folder / name).write_text(text)
    assert take_note(history, lock).pages == written


def test_workspaces_that_share_a_server_write_to_it_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    server, other = store_lock("http://mlflow:5000"), store_lock("http://other:5000")
    with _alone("http://mlflow:5000"):
        with pytest.raises(BusyError), exclusive(server, "a writer"):
            pass
        with exclusive(other, "a writer"):
            pass
    assert store_lock("sqlite:////a/mlflow.db") == Path("/a/mlflow.db.lock")


def test_a_damaged_note_is_named(tmp_path: Path) -> None:
    (tmp_path / "note.json").write_text('{"state": 1}')
    with pytest.raises(
        ArtifactError, match=r"note\.json: must be a note of lineage, .*; delete it"
    ):
        read_note(tmp_path / "note.json")
