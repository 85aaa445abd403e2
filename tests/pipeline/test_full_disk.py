"""A full disk ends a stage with one line; a rerun with room writes the same bytes."""

import os
import re
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from grpo.runtime.artifacts.files import remove
from tests.faults import FaultLine
from tests.files import contents
from tests.pipeline.corruptions import leave, write
from tests.pipeline.processes import LOG, run_stage, start_stage
from tests.pipeline.test_bad_inputs import Bad, refuses
from tests.pipeline.workspaces import locked_stages

MOUNT = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs"]
FILLER = "filler"


@pytest.fixture(scope="module")
def mounting(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips where no small disk can be mounted: in most containers not even by root."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk takes root")
    folder = tmp_path_factory.mktemp("disk")
    tried = subprocess.run([*MOUNT, folder], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {tried.stderr.strip()}")
    subprocess.run(["umount", folder], check=True)


@contextmanager
def full_disk(folder: Path, free_pages: int) -> Iterator[None]:
    """Puts `folder`, with what is in it, on a disk with room for a few pages more."""
    kept = contents(folder)
    subprocess.run([*MOUNT, folder], check=True)
    try:
        for name, content in kept.items():
            write(name, content)(folder)
        free = os.statvfs(folder).f_bfree - free_pages
        (folder / FILLER).write_bytes(bytes(free * os.statvfs(folder).f_bsize))
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.usefixtures("mounting")
@pytest.mark.parametrize(
    ("stage", "folder", "free_pages"),
    [
        pytest.param("prepare", "artifacts/prompts", 0, marks=pytest.mark.long),
        pytest.param("base", "artifacts/training", 0, marks=pytest.mark.long),
        pytest.param("base", "artifacts/policies", 0, marks=pytest.mark.long),
        # Less than the weights need.
        pytest.param("base", "artifacts/policies", 8, marks=pytest.mark.long),
        ("profile", "artifacts/profile", 0),
        pytest.param("curriculum@sgpo", "artifacts/curricula", 0, marks=pytest.mark.long),
        pytest.param("rollout@sgpo-1", ".work", 1, marks=pytest.mark.long),
        pytest.param("rollout@sgpo-1", "artifacts/rollouts", 0, marks=pytest.mark.long),
        ("rollout@sgpo-1", "artifacts/rollouts", 3),  # the table, not the tensors
        pytest.param("score@sgpo-1", "artifacts/rewards", 0, marks=pytest.mark.long),
        ("train@sgpo-1", ".work", 1),
        ("train@sgpo-1", "artifacts/training", 1),
        ("evaluate@sgpo-1", "artifacts/evaluations", 0),
        ("report", "artifacts/report", 0),
    ],
)
def test_a_full_disk_is_one_line_and_loses_nothing(
    workspace: Path, stage: str, folder: str, free_pages: int
):
    (workspace / ".work").mkdir()
    message = rf"{folder}/\S+: .*No space left on device.*; make room"
    with full_disk(workspace / folder, free_pages):
        refuses(workspace, Bad("full", stage, leave, message))


def lost_after_rerun(workspace: Path, finished: Path, stage: str) -> list[str]:
    """Runs a stage, now that there is room; returns artifacts that are not those of a whole run."""
    assert run_stage(workspace, stage, locked_stages(workspace)[stage]["cmd"]).code == 0
    found = contents(workspace / "artifacts")
    expected = contents(finished / "artifacts")
    return sorted(name for name in found | expected if found.get(name) != expected.get(name))


@pytest.mark.usefixtures("mounting")
@pytest.mark.fault
def test_training_on_a_full_disk_is_done_once_there_is_room(
    workspace: Path, finished: Path, fault: FaultLine
):
    (workspace / ".work").mkdir()
    folder, stage = workspace / "artifacts/policies", "train@sgpo-1"
    message = r"artifacts/policies/\S+: .*No space left on device.*; make room"
    with full_disk(folder, 40):  # pages for the weights, not the moments
        refuses(workspace, Bad("full", stage, leave, message))
        remove(folder / FILLER)
        with fault.recovery():
            lost = lost_after_rerun(workspace, finished, stage)
    fault.tell(
        "disk full while a policy was written",
        "training ended in one line, exit code 2, and left what was there",
        lost=lost,
    )


def test_a_stage_within_a_limit_of_file_sizes_is_done_without_it(workspace: Path, finished: Path):
    """The limit of `ulimit -f`, which needs no root."""
    before, stage = contents(workspace / "artifacts"), "score@sgpo-1"
    # First without it: Python leaves a damaged .pyc where it has no room to write a whole one.
    assert lost_after_rerun(workspace, finished, stage) == []
    process = start_stage(workspace, stage, locked_stages(workspace)[stage]["cmd"])
    assert process.pid
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (2**10, 2**10))
    process.join(60)
    said = (workspace / LOG).read_text()
    assert process.exitcode == 2, said
    assert re.fullmatch(r"\.work/score@\S+: File too large; make room, then rerun\n", said)
    assert contents(workspace / "artifacts") == before
    assert lost_after_rerun(workspace, finished, stage) == []
