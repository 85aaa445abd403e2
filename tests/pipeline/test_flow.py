"""The pipeline under flows, its processes killed again and again, against plain dvc."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flows.launcher import descendants
from tests.files import contents
from tests.pipeline.corruptions import set_param
from tests.pipeline.processes import is_alive, until
from tests.pipeline.workspaces import check_out, copy_for_dvc, environment, locked_stages

KILLS = 8
LOG = Path("flow.log")


def start_flow(workspace: Path) -> "subprocess.Popen[bytes]":
    with (workspace.parent / LOG).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "flows.reproduce"],
            cwd=workspace,
            env={**environment(), "PYTHONPATH": str(workspace)},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def kill_one(workspace: Path, draw: random.Random) -> None:
    """Runs the flow and kills one of its processes, or itself, while a stage runs."""
    flow = start_flow(workspace)
    at_work = workspace / ".work/logs"
    until(lambda: flow.poll() is not None or any(at_work.glob("*.log")))
    time.sleep(draw.uniform(0.0, 15.0))
    below = descendants(flow.pid)
    if flow.poll() is None:
        os.kill(draw.choice([flow.pid, *below]), signal.SIGKILL)
        time.sleep(draw.uniform(0.0, 1.0))
        flow.kill()
    flow.wait()
    until(lambda: not any(map(is_alive, below)))


@pytest.mark.long
def test_a_flow_of_which_processes_are_killed_writes_the_bytes_of_plain_dvc(
    finished: Path, tmp_path: Path
) -> None:
    workspace = check_out(tmp_path / "flow")
    draw = random.Random("kills")
    for _ in range(KILLS):
        kill_one(workspace, draw)
    assert start_flow(workspace).wait(600) == 0, (tmp_path / LOG).read_text()
    assert locked_stages(workspace) == locked_stages(finished)
    without_page = {
        name: each for name, each in contents(workspace / "artifacts").items() if "html" not in name
    }
    assert without_page.items() <= contents(finished / "artifacts").items()
    assert not (workspace / ".work/logs/preloaded.log").read_text()


@pytest.mark.parametrize(
    "options", [pytest.param((), marks=pytest.mark.long), ("--no-server",)], ids=["", "no server"]
)
@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        pytest.param(
            "arms.uniform.training.learning_rte",
            0.1,
            "learning_rte is unknown, got 0.1",
            marks=pytest.mark.long,
        ),
        ("arms.uniform.training.learning_rate", -1, "learning_rate must be greater than 0, got -1"),
    ],
)
def test_a_wrong_parameter_is_one_line_before_anything_starts(
    finished: Path, tmp_path: Path, options: tuple[str, ...], path: str, value: float, line: str
) -> None:
    workspace = copy_for_dvc(finished, tmp_path / "workspace")
    set_param(path, value)(workspace)
    done = reproduce(workspace, *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(rf"params.yaml: arms.uniform.training.{line}\n", done.stderr), done.stderr


@pytest.mark.long
def test_an_unsound_parameter_that_a_stage_refuses_is_said_once(
    finished: Path, tmp_path: Path
) -> None:
    workspace = copy_for_dvc(finished, tmp_path / "workspace")
    set_param("arms.uniform.objective", [{"grpo": {"low": 1.2, "high": 0.28, "beta": 0.0}}])(
        workspace
    )
    done = reproduce(workspace, "--no-server")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("clip_surrogate needs 0 < low < 1") == 1
    assert "ERROR" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("check: params.yaml: arms.uniform.objective[0]")
    assert not (workspace / ".work/logs/preloaded.log").read_text()  # all was preloaded


def reproduce(workspace: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "flows.reproduce", *options],
        cwd=workspace,
        env={**environment(), "PYTHONPATH": str(workspace)},
        capture_output=True,
        text=True,
        check=False,
    )
