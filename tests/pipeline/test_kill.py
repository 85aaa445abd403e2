"""A stage killed at any moment goes on to the very bytes of one that was left alone."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.pipeline.workspaces import contents, copy_for_dvc, dvc, start_dvc

LONGEST_SECONDS = 6.0  # about what a stage takes under dvc, most of it imports
ROLLOUT, TRAIN = "rollout@uniform-1", "train@uniform-1"
MOMENTS: dict[str, list[str]] = {
    ROLLOUT: [
        f".work/{ROLLOUT}/*/batch-00000/table.parquet",
        f".work/{ROLLOUT}/*/batch-00001/table.parquet",
        "artifacts/rollouts/.uniform-1.*.tmp/*",
    ],
    TRAIN: [
        f".work/{TRAIN}/*/checkpoint-00000001",
        f".work/{TRAIN}/*/.checkpoint-00000003.*.tmp/*",
        "artifacts/policies/.uniform-1.*.tmp/*",
    ],
}


def run_anew(stage: str) -> list[str]:
    """Returns dvc's arguments to run a stage although its output is in the cache."""
    return ["repro", "--quiet", "--single-item", "--force", stage]


def kill(workspace: Path, stage: str, moment: str | float) -> bool:
    """Runs a stage and kills it with its dvc; returns whether it was still running.

    Args:
      moment: Seconds from the start, or a pattern: once a path that fits it appears.
    """
    process = start_dvc(workspace, *run_anew(stage))
    start = time.monotonic()
    while process.poll() is None:
        if isinstance(moment, float):
            is_time = time.monotonic() - start > moment
        else:
            is_time = any(workspace.glob(moment))
        if is_time:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return True
        time.sleep(0.001)
    return False


@pytest.mark.parametrize("stage", MOMENTS)
def test_a_killed_stage_goes_on_to_the_same_bytes(finished: Path, tmp_path: Path, stage: str):
    workspace = copy_for_dvc(finished, tmp_path / "workspace")
    draw = random.Random(stage)
    first, last = (draw.uniform(0.5, LONGEST_SECONDS) for _ in range(2))
    kill(workspace, stage, first)
    for pattern in MOMENTS[stage]:
        assert kill(workspace, stage, pattern), f"finished before {pattern} appeared"
    kill(workspace, stage, last)
    dvc(workspace, *run_anew(stage))
    assert (workspace / "dvc.lock").read_bytes() == (finished / "dvc.lock").read_bytes()
    assert contents(workspace / "artifacts") == contents(finished / "artifacts")
    assert not (workspace / ".work" / stage).exists()
