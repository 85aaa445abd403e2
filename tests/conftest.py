"""Fixtures of all tests: one torch thread, no telemetry, a fault table, a browser."""

import gc

gc.disable()  # until all is collected: imports create many objects and no garbage

import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("DO_NOT_TRACK", "true")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

import tests.shapes  # noqa: F401 (what jaxtyping's hook in `make test-long` names)
from benchmarks.browser import HOW_TO_GET, Page, find_chromium, open_browser
from tests.faults import REPEATS, FaultLine

torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Excludes imported modules and collected tests from garbage collection."""
    gc.freeze()
    gc.enable()


@pytest.fixture(params=REPEATS)
def fault(request: pytest.FixtureRequest) -> FaultLine:
    """The row of the fault table that the test writes."""
    return FaultLine(request.node.originalname)


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pipeline that has not run."""
    from tests import tiny_pipeline  # here, because DVC takes a second to import

    return tiny_pipeline.build(tmp_path_factory.mktemp("pristine") / "pipeline")


@pytest.fixture(scope="session")
def reproduced(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pipeline that has run."""
    from tests import tiny_pipeline

    root = tiny_pipeline.copy(pristine, tmp_path_factory.mktemp("reproduced") / "pipeline")
    tiny_pipeline.reproduce_in_process(root)
    return root


@pytest.fixture(scope="module")
def idle_browser() -> Iterator[Page]:
    chromium = find_chromium()
    if chromium is None:
        pytest.skip(HOW_TO_GET)
    with open_browser(chromium) as page:
        yield page.resize(1280, 860)


@pytest.fixture
def browser(idle_browser: Page) -> Iterator[Page]:
    """A page of the module's browser; empty before and after, since animations take CPU time."""
    yield idle_browser
    idle_browser.open("about:blank")
