"""The account of workers on a real server: it records lineage and moves no alias."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from flows.server import HOST, free_port, running_server
from grpo.errors import ArtifactError
from grpo.lineage.record import EXPERIMENT, record
from grpo.registry.store import Registry
from tests import tiny_pipeline
from tests.infra.files import INFRA, ROOT

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
ADMIN, WORKER = "password-of-admin", "password-of-worker"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An MLflow server with the permissions of infra/mlflow-auth.ini, on SQLite."""
    monkeypatch.chdir(tmp_path)
    settings = (INFRA / "mlflow-auth.ini").read_text()
    assert "postgresql+psycopg2:///mlflow" in settings
    Path("auth.ini").write_text(
        settings.replace("postgresql+psycopg2:///mlflow", f"sqlite:///{tmp_path}/auth.db")
    )
    port = free_port()
    address = f"http://{HOST}:{port}"
    command = [sys.executable, "-m", "mlflow", "server", "--app-name", "basic-auth"]
    with running_server(
        [*command, "--host", HOST, "--port", str(port), "--workers", "1"],
        name="mlflow-server",
        health=f"{address}/health",
        extra={
            "MLFLOW_AUTH_CONFIG_PATH": str(tmp_path / "auth.ini"),
            "MLFLOW_AUTH_ADMIN_PASSWORD": ADMIN,
            "MLFLOW_FLASK_SERVER_SECRET_KEY": "signs sessions of this test",
            "MLFLOW_BACKEND_STORE_URI": f"sqlite:///{tmp_path}/mlflow.db",
            "MLFLOW_ARTIFACTS_DESTINATION": str(tmp_path / "mlartifacts"),
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        },
    ):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        yield address


def client_of(user: str, password: str, monkeypatch: pytest.MonkeyPatch) -> MlflowClient:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", user)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", password)
    return MlflowClient()


def make_accounts(password: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", INFRA / "mlflow_accounts.py"],
        env={**os.environ, "MLFLOW_WORKER_PASSWORD": password, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_worker_records_lineage_and_moves_no_alias(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    admin = client_of("admin", ADMIN, monkeypatch)
    for password in ("password-of-before", WORKER):  # also a second time
        done = make_accounts(password)
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
    experiment = admin.get_experiment_by_name(EXPERIMENT)
    assert experiment is not None
    run = admin.create_run(experiment.experiment_id).info.run_id
    admin.create_registered_model("policy")
    for _ in range(2):
        admin.create_model_version("policy", f"runs:/{run}/policy", run_id=run)
    admin.set_registered_model_alias("policy", "champion", "1")

    workspace = tiny_pipeline.build(tmp_path / "pipeline")
    tiny_pipeline.reproduce(workspace)
    worker = client_of("worker", WORKER, monkeypatch)
    recorded = record(workspace)
    assert len(recorded.new) == len(recorded.runs) == 7
    assert worker.get_run(recorded.parent).info.experiment_id == experiment.experiment_id
    assert worker.get_model_version_by_alias("policy", "champion").version == "1"
    for forbidden in (
        lambda: worker.set_registered_model_alias("policy", "champion", "2"),
        lambda: worker.delete_registered_model_alias("policy", "champion"),
        lambda: worker.create_model_version("policy", f"runs:/{run}/policy", run_id=run),
        lambda: worker.set_model_version_tag("policy", "1", "eval_reward", "1.0"),
        lambda: worker.delete_registered_model("policy"),
        lambda: worker.delete_experiment(experiment.experiment_id),
    ):
        with pytest.raises(MlflowException, match="Permission denied"):
            forbidden()
    with pytest.raises(ArtifactError, match=r"cannot be read or written, .*Permission denied"):
        Registry("policy", workspace).roll_back()
    assert worker.get_model_version_by_alias("policy", "champion").version == "1"


def test_a_wrong_password_of_the_administrator_is_one_line(
    server: str, monkeypatch: pytest.MonkeyPatch
):
    client_of("admin", "password-of-nobody", monkeypatch)
    done = make_accounts(WORKER)
    assert done.returncode == 1
    assert done.stderr.startswith(f"{server}: cannot make the account worker, ")
    assert done.stderr.count("\n") == 1
    assert "password-of" not in done.stderr
