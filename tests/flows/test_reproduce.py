"""The command: all stages, nothing to do, failures, and every way to be stopped."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import flows.reproduce
import flows.sweep
from flows.launcher import descendants
from flows.planning import plan
from grpo.lineage.lock import read_lock
from tests import tiny_pipeline
from tests.flows.test_launcher import is_alive, until
from tests.modalities.exposure import leaks

# DVC itself uses what pygtrie deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

COMMAND = [sys.executable, "-m", "flows.reproduce"]
SERVERLESS = "--no-server"
Environment = dict[str, str]


@contextmanager
def running(
    workspace: Path, environment: Environment, *options: str
) -> Iterator["subprocess.Popen[str]"]:
    """Starts the command; kills it if the test fails, which ends its stages too."""
    process = subprocess.Popen(
        [*COMMAND, *options],
        cwd=workspace,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def run(
    workspace: Path, environment: Environment, *targets: str
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*COMMAND, *targets],
        cwd=workspace,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def at_work(workspace: Path) -> list[str]:
    """Returns the rounds of which a stage has started and not ended."""
    path = workspace / ".work/marks.txt"
    words = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    started = {name for kind, name, *_ in words if kind == "start" and "-" in name}
    return sorted(started - {name for kind, name, *_ in words if kind == "end"})


def test_all_stages_then_nothing_quickly(
    fresh_pipeline: Path, prefect_environment: Environment
) -> None:
    done = run(fresh_pipeline, prefect_environment)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(
        r"7 stages are up to date; 7 ran in [\d.]+ s: .* s and 2 more\n", done.stdout
    )
    assert "base working on base" in done.stderr
    assert not any(step.is_changed for step in plan())
    report = fresh_pipeline / "artifacts/report/index.html"
    report.write_text("")
    start = time.monotonic()
    again = run(fresh_pipeline, prefect_environment)
    assert again.stdout == (
        "everything is up to date: 7 stages unchanged; report: artifacts/report/index.html\n"
    )
    assert time.monotonic() - start < 8  # about 1 on a quiet machine
    logs = fresh_pipeline / ".work/logs"
    assert "working on base" in (logs / "base.log").read_text()
    assert leaks(fresh_pipeline) == leaks(Path(prefect_environment["PREFECT_HOME"])) == []


@pytest.mark.parametrize("options", [pytest.param((), marks=pytest.mark.long), (SERVERLESS,)])
def test_a_failed_stage_stops_what_depends_on_it_only(
    finished_pipeline: Path, prefect_environment: Environment, options: tuple[str, ...]
) -> None:
    tiny_pipeline.replace(finished_pipeline, "rate: 0.1", "rate: 0.1, fails: 2")
    tiny_pipeline.replace(finished_pipeline, "rate: 0.2", "rate: 0.4")
    done = run(finished_pipeline, prefect_environment, *options)
    assert done.returncode == 2
    *_, verdict, last = done.stderr.splitlines()
    assert re.match("4 of 7 stages are up to date; 2 ran in .*; 1 failed; 2 not reached", verdict)
    assert last.startswith("train@a-1: rounds.a-1.fails must be absent (log: ")
    assert done.stderr.count("must be absent") == 1
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    changed = [step.name for step in plan() if step.is_changed]
    assert changed == ["train@a-1", "evaluate@a-1", "report"]
    assert (
        read_lock(finished_pipeline)["evaluate@b-1"].deps[0]
        == (read_lock(finished_pipeline)["train@b-1"].outs[0])
    )


@pytest.mark.parametrize(
    ("number", "options"),
    [
        pytest.param(signal.SIGTERM, (), marks=pytest.mark.long),
        pytest.param(signal.SIGINT, (), marks=pytest.mark.long),
        (signal.SIGKILL, ()),
        pytest.param(signal.SIGTERM, (SERVERLESS,), marks=pytest.mark.long),
        pytest.param(signal.SIGINT, (SERVERLESS,), marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, (SERVERLESS,), marks=pytest.mark.long),
    ],
)
def test_no_process_outlives_a_stopped_run_and_no_record_is_lost(
    fresh_pipeline: Path,
    prefect_environment: Environment,
    number: signal.Signals,
    options: tuple[str, ...],
) -> None:
    tiny_pipeline.replace(fresh_pipeline, "seconds: 0.0", "seconds: 300.0")
    with running(fresh_pipeline, prefect_environment, *options) as process:
        until(lambda: at_work(fresh_pipeline) == ["a-1", "b-1"])  # side by side
        below = descendants(process.pid)
        assert len(below) >= 6  # a launcher, dvc and a stage, twice
        os.kill(process.pid, number)
        _, said = process.communicate()
        until(lambda: not any(map(is_alive, below)))
    assert process.returncode == {signal.SIGTERM: 143, signal.SIGINT: 130}.get(number, -number), (
        said
    )
    assert set(read_lock(fresh_pipeline)) == {"prepare", "base"}
    changed = {step.name for step in plan() if step.is_changed}
    assert changed.isdisjoint({"prepare", "base"})


@pytest.mark.long
def test_the_order_of_the_lock_is_not_that_in_which_stages_ended(
    fresh_pipeline: Path, prefect_environment: Environment
) -> None:
    hold, lock = fresh_pipeline / ".work/hold-a-1", fresh_pipeline / "dvc.lock"
    hold.parent.mkdir()
    hold.touch()
    with running(fresh_pipeline, prefect_environment) as process:
        until(lambda: lock.exists() and "  evaluate@b-1:" in lock.read_text())
        assert "  train@a-1:" not in lock.read_text()
        hold.unlink()
        _, said = process.communicate()
    assert process.returncode == 0, said
    assert list(read_lock(fresh_pipeline)) == [step.name for step in plan()]


def test_its_own_server_ends_with_a_killed_run(fresh_pipeline: Path, tmp_path: Path) -> None:
    home = {**tiny_pipeline.environment(), "PREFECT_HOME": str(tmp_path / "prefect")}
    home.pop("PREFECT_API_URL", None)
    log = fresh_pipeline / ".work/logs/prefect-server.log"
    with running(fresh_pipeline, home) as process:
        until(lambda: log.exists() and len(descendants(process.pid)) > 1)
        below = descendants(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        until(lambda: not any(map(is_alive, below)))


def test_without_a_server_the_same_stages_run_and_prefect_is_not_imported(
    fresh_pipeline: Path, prefect_environment: Environment
) -> None:
    code = (
        "import sys\nfrom flows.reproduce import main\n"
        f"code = main(['{SERVERLESS}'])\nassert 'prefect' not in sys.modules\nsys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=fresh_pipeline,
        env=prefect_environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{len(plan())} stages are up to date")
    assert list(read_lock(fresh_pipeline)) == [step.name for step in plan()]
    assert not any(step.is_changed for step in plan())
    again = run(fresh_pipeline, prefect_environment, SERVERLESS)
    assert again.stdout.startswith(f"everything is up to date: {len(plan())} stages unchanged")


def test_an_unknown_target_and_a_missing_pipeline_are_one_line(
    fresh_pipeline: Path, prefect_environment: Environment
) -> None:
    unknown = run(fresh_pipeline, prefect_environment, SERVERLESS, "nothing")
    assert (unknown.returncode, unknown.stderr.count("\n")) == (2, 1)
    assert "nothing" in unknown.stderr


@pytest.mark.usefixtures("fresh_pipeline")
def test_no_stage_at_once_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for main, words in ((flows.reproduce.main, []), (flows.sweep.main, ["--set", "seed=1"])):
        assert main(["--at-once", "0", *words]) == 2
        said = capsys.readouterr().err
        assert said == "--at-once: must be at least 1, got 0; raise it or omit it\n"


def test_planning_and_running_import_neither_torch_nor_prefect() -> None:
    code = (
        "import sys, flows.reproduce\n"
        "sys.exit(bool({'torch', 'mlflow', 'prefect'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
