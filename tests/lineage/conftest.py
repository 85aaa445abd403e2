"""A tiny pipeline whose results are committed, recorded once, and copied for each test."""

from pathlib import Path

import pytest

from grpo.runtime.artifacts.files import write_json
from tests import tiny_pipeline


@pytest.fixture(scope="session")
def committed(reproduced: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tiny_pipeline.copy(reproduced, tmp_path_factory.mktemp("committed") / "pipeline")
    tiny_pipeline.commit(root, "results")
    return root


@pytest.fixture
def workspace(committed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished pipeline of its own, with its results committed."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return tiny_pipeline.copy(committed, tmp_path / "pipeline")


@pytest.fixture(scope="session")
def recorded(committed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded pipeline; the first record of a database takes seconds."""
    # Here, not above: MLflow takes two seconds to import.
    from grpo.lineage.record import record

    workspace = tiny_pipeline.copy(committed, tmp_path_factory.mktemp("recorded") / "pipeline")
    usage = {
        "seconds_by_part": {"update": 2.0},
        "cpu_seconds": 3.0,
        "seconds": 4.0,
        "peak_bytes": 5,
    }
    write_json(workspace / ".runs/train@a-1.json", usage)
    record(workspace)
    return workspace


@pytest.fixture
def history(recorded: Path, tmp_path: Path) -> Path:
    return tiny_pipeline.copy(recorded, tmp_path / "pipeline")
