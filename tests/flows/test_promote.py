"""Promotions as a person makes them: exit codes, what is said, and what Prefect keeps."""

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

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


def rows_of(address: str) -> list[dict[str, str]]:
    """Returns what the newest promotion's artifact shows."""
    asked = {"artifacts": {"key": {"any_": ["promotion"]}}, "sort": "CREATED_DESC", "limit": 1}
    request = urllib.request.Request(
        f"{address}/artifacts/filter",
        data=json.dumps(asked).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        rows: list[dict[str, str]] = json.loads(json.load(answer)[0]["data"])
        return rows


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
    (row,) = rows_of(prefect_environment["PREFECT_API_URL"])
    assert row["outcome"] == "refused"
    assert row["policy"] == "a-1"
    assert row["reason"].startswith(reason)
