"""Two ranks: if either is lost, one line states it, no process is left, and a rerun resumes."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest

from grpo.errors import ParameterError
from grpo.runtime.ranks import process_group
from tests.files import contents
from tests.pipeline.corruptions import set_param, truncate
from tests.pipeline.processes import LOG, Finished, is_alive, run_stage, start_stage, until
from tests.pipeline.workspaces import copy_for_stages, locked_stages

STAGE = "train@uniform-1"
OUTS = ("artifacts/policies/uniform-1", "artifacts/training/uniform-1")
SECONDS = 20.0  # in which all must have ended


@pytest.fixture
def together(workspace: Path) -> Path:
    """Returns a workspace whose arm trains in two ranks."""
    return in_two_ranks(workspace)


def in_two_ranks(workspace: Path) -> Path:
    """Returns a workspace whose arm now trains in two ranks, in eight updates."""
    set_param("arms.uniform.training.ranks", 2)(workspace)
    set_param("arms.uniform.training.updates_per_iteration", 8)(workspace)
    return workspace


@contextmanager
def training(workspace: Path, updates: int) -> Iterator[tuple[BaseProcess, list[psutil.Process]]]:
    """Yields the stage and its ranks once so many updates are done; then none of them is left."""
    command = locked_stages(workspace)[STAGE]["cmd"]
    process = start_stage(workspace, STAGE, command)
    done = f".work/{STAGE}/*/iteration-0000/updates/checkpoint-*"
    while all(int(each.name[-8:]) < updates for each in workspace.glob(done)):
        assert process.is_alive(), (workspace / LOG).read_text()
        time.sleep(0.001)
    ranks = psutil.Process(process.pid).children()
    assert len(ranks) == 2
    yield process, ranks
    process.join(SECONDS)
    assert not process.is_alive()
    until(lambda: not any(is_alive(each.pid) for each in ranks))


def require_one_line(done: Finished) -> None:
    """Asserts that a stage succeeded and printed the line of its finished training alone."""
    assert done.code == 0
    assert re.fullmatch(r"train uniform-1 8/8, .*\n", done.stderr)


@pytest.mark.long
def test_killed_ranks_and_stages_go_on_to_the_same_bytes(
    together: Path, finished: Path, tmp_path: Path
):
    command = locked_stages(finished)[STAGE]["cmd"]
    with training(together, 1) as (stage, ranks):
        listening = [each for rank in ranks for each in rank.net_connections() if not each.raddr]
        assert listening
        assert {each.laddr.ip for each in listening} == {"127.0.0.1"}
        ranks[1].kill()
    assert stage.exitcode == 1
    assert (together / LOG).read_text() == (
        "rank 1 of 2 was killed by SIGKILL, and all ranks were stopped; run the stage again, it "
        "resumes from its last checkpoint\n"
    )
    with training(together, 3) as (stage, ranks):
        stage.kill()
    require_one_line(run_stage(together, STAGE, command))
    assert not list((together / ".work").glob(f"{STAGE}*[!k]"))  # a lock is left, nothing else

    undisturbed = in_two_ranks(copy_for_stages(finished, tmp_path / "undisturbed"))
    require_one_line(run_stage(undisturbed, STAGE, command))
    for out in OUTS:
        assert contents(together / out) == contents(undisturbed / out)
        assert contents(together / out).keys() == contents(finished / out).keys()


def test_wrong_input_is_one_line_however_many_ranks_find_it(together: Path):
    truncate("artifacts/rewards/uniform-1.parquet")(together)
    done = run_stage(together, STAGE, locked_stages(together)[STAGE]["cmd"])
    assert done.code == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("artifacts/rewards/uniform-1.parquet: ")


def test_another_number_of_ranks_than_torchrun_starts_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WORLD_SIZE", "3")
    for ranks in (1, 2):
        with (
            pytest.raises(ParameterError, match=rf"training\.ranks must be .*, 3, got {ranks}"),
            process_group(ranks, "cpu", store=tmp_path / "store"),
        ):
            pass
