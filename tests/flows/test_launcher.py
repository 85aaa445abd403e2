"""Nothing that a command started outlives its launcher, and finished work is still recorded."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flows import launcher
from flows.runner import launched
from tests.pipeline.processes import is_alive, until


def start(
    command: str, *, may_finish: bool, grace_seconds: float = 10
) -> "subprocess.Popen[bytes]":
    shell = ["/bin/sh", "-c", command]
    return subprocess.Popen(
        launched(shell, may_finish=may_finish, grace_seconds=grace_seconds), start_new_session=True
    )


def pid_in(path: Path) -> int:
    until(lambda: path.exists() and path.read_text().endswith("\n"))
    return int(path.read_text())


@pytest.mark.parametrize(("command", "code"), [("exit 7", 7), ("kill -9 $$", 137), ("true", 0)])
def test_the_exit_code_is_the_commands(command: str, code: int) -> None:
    assert start(command, may_finish=True).wait() == code


def test_an_unknown_command_is_127() -> None:
    command = launched(["/no/such/command"], may_finish=True, grace_seconds=1)
    assert subprocess.run(command, check=False, capture_output=True).returncode == 127


def test_what_runs_on_in_the_background_ends_with_the_command(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    process = start(f"setsid sleep 300 & echo $! > {file}", may_finish=True)
    assert process.wait() == 0
    assert not is_alive(pid_in(file))


def test_a_command_that_may_finish_records_after_its_stage_is_stopped(tmp_path: Path) -> None:
    file, record = tmp_path / "pid", tmp_path / "record"
    process = start(f"sleep 300 & echo $! > {file}; wait; echo done > {record}", may_finish=True)
    pid_in(file)
    process.terminate()
    assert process.wait() == 0
    assert record.read_text() == "done\n"


def test_a_command_that_may_not_finish_is_stopped_itself(tmp_path: Path) -> None:
    file, record = tmp_path / "pid", tmp_path / "record"
    process = start(f"sleep 300 & echo $! > {file}; wait; echo done > {record}", may_finish=False)
    stage = pid_in(file)
    process.terminate()
    assert process.wait() == 128 + signal.SIGTERM
    assert not is_alive(stage)
    assert not record.exists()


def test_who_ignores_the_request_is_killed_after_the_grace_period(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    command = f"trap '' TERM; echo $$ > {file}; while true; do sleep 0.1; done"
    process = start(command, may_finish=True, grace_seconds=0.3)
    stubborn = pid_in(file)
    process.terminate()
    assert process.wait() == 128 + signal.SIGKILL
    assert not is_alive(stubborn)


def test_a_killed_parent_takes_everything_along(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    code = (
        "import subprocess; from flows.runner import launched\n"
        f"command = ['/bin/sh', '-c', 'setsid sleep 300 & echo $! > {file}; wait']\n"
        "subprocess.run(launched(command, may_finish=True, grace_seconds=5))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2])
    stage = pid_in(file)
    below = launcher.descendants(parent.pid)
    assert stage in below
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    until(lambda: not any(map(is_alive, below)))
