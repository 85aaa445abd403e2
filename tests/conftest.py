"""Shared by all tests: one torch thread, and no tracker that phones home."""

import os
from pathlib import Path

os.environ.setdefault("DO_NOT_TRACK", "true")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps on one worker what shares a finished run: tests/pipeline; else the tests of a file."""
    pipeline = Path(__file__).parent / "pipeline"
    for item in items:
        shared = pipeline if pipeline in item.path.parents else item.path
        item.add_marker(pytest.mark.xdist_group(str(shared)))
