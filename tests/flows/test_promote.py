"""Promotions as a person makes them: exit codes, what is said, and what Prefect keeps."""

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests import tiny_pipeline

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
Environment = dict[str, str]


def promote(
    workspace: Path, environment: Environment, *words: str
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "flows.promote", "solver", *words],
        cwd=workspace,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def newest(address: str, what: str, asked: dict[str, Any], sort: str) -> dict[str, Any]:
    """Returns what Prefect's server made last of some kind."""
    request = urllib.request.Request(
        f"{address}/{what}/filter",
        data=json.dumps({what: asked, "sort": sort, "limit": 1}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        return dict(json.load(answer)[0])


def test_a_refusal_is_said_kept_by_prefect_and_has_its_own_exit_code(
    finished_pipeline: Path, prefect_environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiny pipeline's policies are no safetensors and were not evaluated as a table."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    tiny_pipeline.commit(finished_pipeline, "results")
    done = promote(finished_pipeline, prefect_environment, "a-1")
    assert done.returncode == 1, done.stderr
    reason = "artifacts/evaluations/a-1.parquet: its lineage is missing"
    assert done.stdout.startswith(f"refused: solver: {reason}")
    address = prefect_environment["PREFECT_API_URL"]
    made = newest(address, "artifacts", {"key": {"any_": ["promotion"]}}, "CREATED_DESC")
    (row,) = json.loads(made["data"])
    assert row["outcome"] == "refused"
    assert row["policy"] == "a-1"
    assert row["reason"].startswith(reason)
    run = newest(address, "flow_runs", {"id": {"any_": [made["flow_run_id"]]}}, "START_TIME_DESC")
    assert (run["state_type"], run["state_name"]) == ("FAILED", "Refused")
    assert run["state"]["message"].startswith(f"solver: {reason}")


@pytest.mark.long
def test_what_names_no_policy_or_no_bound_is_wrong_input(
    fresh_pipeline: Path, prefect_environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for words, reason in {
        ("",): "policy: must name a base or a round, got ''; to go back",
        ("a-1", "--margin", "2"): "margin must be in [0, 1)",
    }.items():
        done = promote(fresh_pipeline, prefect_environment, *words)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert done.stderr.startswith(reason)
