"""A stage that is killed at any moment resumes and writes the bytes of an uninterrupted one."""

import os
import random
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from grpo.runtime.artifacts.files import remove
from tests.files import contents
from tests.pipeline.processes import start_stage
from tests.pipeline.workspaces import copy_for_dvc, dvc, locked_stages, start_dvc

LONGEST_SECONDS = 6.0  # about what a stage takes under dvc, most of it imports
ATTEMPTS = 5
ROLLOUT, TRAIN = "rollout@uniform-1", "train@uniform-1"
MOMENTS = {  # a file of these appears
    ROLLOUT: [
        f".work/{ROLLOUT}/*/batch-00000/table.parquet",
        f".work/{ROLLOUT}/*/batch-00001/table.parquet",
        "artifacts/rollouts/.uniform-1.*.grpo-tmp/*",
    ],
    TRAIN: [
        f".work/{TRAIN}/*/iteration-0000/updates/checkpoint-00000001",
        f".work/{TRAIN}/*/iteration-0000/updates/.checkpoint-00000003.*.grpo-tmp/*",
        "artifacts/policies/.uniform-1.*.grpo-tmp/*",
    ],
}


def run_anew(stage: str) -> list[str]:
    """Returns dvc's arguments to run a stage although its output is in the cache."""
    return ["repro", "--quiet", "--single-item", "--force", stage]


def kill_with_dvc(workspace: Path, stage: str, seconds: float) -> None:
    """Runs a stage under dvc and kills both after some seconds, if they still run."""
    process = start_dvc(workspace, *run_anew(stage))
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def kill_stage(workspace: Path, stage: str, command: str, pattern: str) -> None:
    """Runs a stage and kills it as soon as a path matches the pattern.

    Some paths exist for milliseconds, which a busy machine may miss: then the stage runs again.
    """
    for _ in range(ATTEMPTS):
        process = start_stage(workspace, stage, command)
        while process.is_alive() and not any(workspace.glob(pattern)):
            time.sleep(0.001)
        is_killed = process.is_alive()
        process.kill()
        process.join()
        if is_killed:
            return
    raise AssertionError(f"finished {ATTEMPTS} times before {pattern} appeared")


def run_with_kills(workspace: Path, stage: str, with_dvc: int) -> None:
    """Kills a stage at three moments, and with DVC at drawn ones; then lets it finish."""
    draw = random.Random(stage)
    locked = locked_stages(workspace)[stage]
    for out in locked["outs"]:
        remove(workspace / out["path"])
    for pattern in MOMENTS[stage]:
        kill_stage(workspace, stage, locked["cmd"], pattern)
    for _ in range(with_dvc):
        kill_with_dvc(workspace, stage, draw.uniform(0.5, LONGEST_SECONDS))
    dvc(workspace, *run_anew(stage))


# tests/sampling/test_rollout.py interrupts rollouts.
@pytest.mark.parametrize(
    ("stages", "with_dvc"),
    [((TRAIN,), 0), pytest.param((ROLLOUT, TRAIN), 4, marks=pytest.mark.long)],
    ids=["train", "both"],
)
def test_killed_stages_go_on_to_the_same_bytes(
    finished: Path, tmp_path: Path, stages: tuple[str, ...], with_dvc: int
):
    """Runs concurrently, each in a separate workspace, because imports take most of the time."""
    workspaces = {stage: copy_for_dvc(finished, tmp_path / stage) for stage in stages}
    with ThreadPoolExecutor() as pool:
        runs = [pool.submit(run_with_kills, workspaces[stage], stage, with_dvc) for stage in stages]
        for ended in runs:
            ended.result()
    for stage, workspace in workspaces.items():
        assert (workspace / "dvc.lock").read_bytes() == (finished / "dvc.lock").read_bytes()
        assert contents(workspace / "artifacts") == contents(finished / "artifacts")
        assert not (workspace / ".work" / stage).exists()
