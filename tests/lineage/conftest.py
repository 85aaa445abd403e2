"""A finished tiny pipeline, made once and copied for each test."""

from pathlib import Path

import pytest

from tests import tiny_pipeline


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tiny_pipeline.build(tmp_path_factory.mktemp("lineage") / "pipeline")
    tiny_pipeline.reproduce(root)
    tiny_pipeline.commit(root, "results")
    return root


@pytest.fixture
def workspace(pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished pipeline of its own, with its results committed."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return tiny_pipeline.copy(pristine, tmp_path / "pipeline")
