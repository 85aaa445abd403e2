"""Shared by all tests: one torch thread, no tracker that phones home, the fault table."""

import gc
import os

os.environ.setdefault("DO_NOT_TRACK", "true")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from tests.faults import FaultLine

torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Leaves what is imported and collected out of garbage collection: it stays to the end."""
    gc.freeze()


@pytest.fixture
def fault(request: pytest.FixtureRequest) -> FaultLine:
    """The line of the fault table that the test fills."""
    return FaultLine(request.node.nodeid)
