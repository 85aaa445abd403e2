"""A stage killed at any moment goes on to the very bytes of one that was left alone."""

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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


def run_with_kills(workspace: Path, stage: str) -> None:
    """Kills a stage at five moments, two of them drawn, and then lets it finish."""
    draw = random.Random(stage)
    first, last = (draw.uniform(0.5, LONGEST_SECONDS) for _ in range(2))
    kill(workspace, stage, first)
    for pattern in MOMENTS[stage]:
        assert kill(workspace, stage, pattern), f"finished before {pattern} appeared"
    kill(workspace, stage, last)
    dvc(workspace, *run_anew(stage))


def test_killed_stages_go_on_to_the_same_bytes(finished: Path, tmp_path: Path):
    """At the same time, each in a workspace of its own: most of it is waiting for imports."""
    workspaces = {stage: copy_for_dvc(finished, tmp_path / stage) for stage in MOMENTS}
    with ThreadPoolExecutor() as pool:
        for ended in [pool.submit(run_with_kills, workspaces[stage], stage) for stage in MOMENTS]:
            ended.result()
    for stage, workspace in workspaces.items():
        assert (workspace / "dvc.lock").read_bytes() == (finished / "dvc.lock").read_bytes()
        assert contents(workspace / "artifacts") == contents(finished / "artifacts")
        assert not (workspace / ".work" / stage).exists()
