"""Jobs in processes on this host: the same bytes, whoever does them and whatever becomes of him."""

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from grpo.errors import GrpoError, WorkerError
from grpo.runtime.child import Process
from grpo.runtime.executors.base import Executor, Job, Local, Weights
from grpo.runtime.executors.pool import TRIES, Handle, Pool
from grpo.runtime.executors.worker import written
from grpo.runtime.memory import MemoryFile
from grpo.runtime.process import freezing_imports
from tests.files import contents
from tests.pipeline.processes import until
from tests.runtime.work import DEADLINE_SECONDS, MAKE, jobs_of, make, marked, pool, setup_of

ROOT = Path(__file__).parents[2]


def squares(
    folder: Path, executor: Executor, what: dict[int, str] | None = None
) -> dict[str, bytes]:
    executor.finish(jobs_of(folder, what))
    return contents(folder / "out")


EXPECTED = {f"job-{n}/{name}": text for n in range(6) for name, text in [
    ("half.txt", b"of what is to be there"), ("square.txt", str(n * n).encode())]}  # fmt: skip


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_results_are_the_same_for_any_number_of_workers(tmp_path: Path, workers: int):
    if workers == 0:
        assert squares(tmp_path, Local(make(setup_of(tmp_path)))) == EXPECTED
        return
    with pool(tmp_path, workers=workers) as executor:
        assert squares(tmp_path, executor) == EXPECTED
        assert executor.seconds() == {"load": 2.0}


def test_they_are_the_same_whatever_the_order_in_which_jobs_end(tmp_path: Path):
    last = tmp_path / "out" / "job-5"
    with pool(tmp_path) as executor:
        ended = list(executor.run(jobs_of(tmp_path, {0: f"waits {last}"})))
    assert {job.out.name for job in ended[-2:]} == {"job-5", "job-0"}  # in either order
    assert contents(tmp_path / "out") == EXPECTED


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_every_job_has_the_latest_weights_also_if_its_worker_is_lost(tmp_path: Path, workers: int):
    """The worker that replaces a lost one has started with other weights."""

    def weighed(executor: Executor, name: str, what: str = "") -> set[bytes]:
        jobs = [
            Job("weigh", {"what": what if n == 3 else ""}, tmp_path / name / str(n))
            for n in range(6)
        ]
        executor.finish(jobs)
        return set(contents(tmp_path / name).values())

    with ExitStack() as stack:
        executor: Executor = Local(make(setup_of(tmp_path)))
        if workers:
            executor = stack.enter_context(pool(tmp_path, workers=workers))
        assert weighed(executor, "start") == {b"first"}
        for version, content in enumerate((b"second", b"third"), start=1):
            file = MemoryFile(lambda file, content=content: file.write(content))
            stack.callback(file.close)
            executor.load_weights(Weights(version, file.path))
            lost = "dies-once" if workers and version == 2 else ""
            assert weighed(executor, str(version), lost) == {content}


def test_a_thread_that_waits_for_jobs_ends_when_they_are_abandoned(tmp_path: Path):
    never = tmp_path / "never"
    with pool(tmp_path) as executor, ThreadPoolExecutor(1) as thread:
        jobs = jobs_of(tmp_path, dict.fromkeys(range(6), f"waits {never}"))
        waiting = thread.submit(executor.finish, jobs)
        until((tmp_path / "waits").exists)
        before = time.monotonic()
        executor.abandon()
        with pytest.raises(WorkerError, match="rerun it"):
            waiting.result()
        with pytest.raises(WorkerError, match="rerun it"):
            executor.finish(jobs)
    assert time.monotonic() - before < DEADLINE_SECONDS / 2


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_every_worker_sleeps_when_told_and_goes_on(tmp_path: Path, workers: int):
    with ExitStack() as stack:
        executor: Executor = Local(make(setup_of(tmp_path)))
        if workers:
            executor = stack.enter_context(pool(tmp_path, workers=workers))
            executor.sleep()  # none has started
        # With two workers, one waits until the other has done the last job: both are at work.
        last = tmp_path / "out" / "job-5"
        what = {0: f"waits {last}"} if workers == 2 else {}
        assert squares(tmp_path, executor, what) == EXPECTED
        executor.sleep()
        slept = marked(tmp_path / "slept")
        assert len(set(slept)) == len(slept) == max(workers, 1)
        again = Job("square", {"number": 7}, tmp_path / "again")
        executor.finish([again])
        assert contents(again.out)["square.txt"] == b"49"


def test_a_worker_that_is_lost_while_it_sleeps_is_replaced(tmp_path: Path):
    before = set(psutil.Process().children())
    with pool(tmp_path, workers=1) as executor:
        assert squares(tmp_path / "first", executor) == EXPECTED
        (lost,) = set(psutil.Process().children()) - before
        lost.kill()
        executor.sleep()
        assert squares(tmp_path / "second", executor) == EXPECTED


@pytest.mark.parametrize("what", ["dies-once", "leaves-a-child"])
def test_a_job_whose_worker_is_lost_is_done_by_another(tmp_path: Path, what: str):
    with pool(tmp_path) as executor:
        assert squares(tmp_path, executor, {3: what}) == EXPECTED
    first, second = marked(tmp_path / what)
    assert first != second
    assert not psutil.pid_exists(first)
    for child in marked(tmp_path / "child") if what == "leaves-a-child" else []:
        os.kill(child, signal.SIGKILL)


def test_a_job_that_no_worker_survives_ends_in_one_line_and_others_stay_done(tmp_path: Path):
    with pool(tmp_path) as executor, pytest.raises(WorkerError) as error:
        squares(tmp_path, executor, {5: "dies"})
    assert str(error.value).startswith(
        f"{tmp_path}/out/job-5: no worker survives it, 3 were lost, the last: ended by signal 9; "
    )
    assert len(set(marked(tmp_path / "dies"))) == TRIES == 3
    done = {job.out: job.out.stat().st_ino for job in jobs_of(tmp_path) if job.out.exists()}
    assert {out.name for out in done} == {f"job-{number}" for number in range(5)}
    with pool(tmp_path) as executor:  # what ended workers is gone
        assert squares(tmp_path, executor) == EXPECTED
    assert {out: out.stat().st_ino for out in done} == done  # not done again


def test_workers_that_do_not_start_end_in_one_line(tmp_path: Path):
    with pool(tmp_path, what="dies") as executor, pytest.raises(WorkerError) as error:
        squares(tmp_path, executor)
    assert str(error.value).startswith("no worker starts, 3 were lost, the last: ended by signal 9")


@pytest.mark.parametrize("workers", [1, 2])
def test_what_a_person_can_mend_is_said_at_once(tmp_path: Path, workers: int):
    said = r"^artifacts/a\.parquet: row 3:\nmust be scored$"
    with pool(tmp_path, workers=workers) as executor, pytest.raises(GrpoError, match=said):
        squares(tmp_path, executor, {0: "raises"})
    assert len(marked(tmp_path / "raises")) == 1


def test_a_bug_keeps_its_traceback_and_is_not_tried_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    with pool(tmp_path) as executor, pytest.raises(RuntimeError, match="exit code 1"):
        squares(tmp_path, executor, {0: "fails"})
    assert len(marked(tmp_path / "fails")) == 1
    assert "ZeroDivisionError: a bug" in capfd.readouterr().err


def test_workers_end_with_their_pool(tmp_path: Path):
    never = tmp_path / "never"
    with pool(tmp_path) as executor:
        for job in executor.run(jobs_of(tmp_path, {0: f"waits {never}"})):
            if job.out.name == "job-5":  # the other worker is at work
                break
        (worker,) = marked(tmp_path / "waits")
        assert psutil.pid_exists(worker)
    assert not psutil.pid_exists(worker)


def test_idle_workers_end_in_order_unless_there_was_an_error(tmp_path: Path):
    """So that what they have started ends before them, and its processor seconds are counted."""
    with pool(tmp_path) as executor:
        assert squares(tmp_path, executor, dict.fromkeys(range(6), "ends-in-order")) == EXPECTED
    assert set(marked(tmp_path / "ended")) == set(marked(tmp_path / "ends-in-order"))
    failed = tmp_path / "failed"
    failed.mkdir()
    with pytest.raises(GrpoError), pool(failed) as executor:
        squares(failed, executor, {**dict.fromkeys(range(5), "ends-in-order"), 5: "raises"})
    assert not (failed / "ended").exists()


def test_a_long_line_is_sent_however_shortly_an_answer_is_waited_for(tmp_path: Path):
    process = Process("grpo.runtime.executors.worker", MAKE)
    order = {"number": 3, "long": "a" * 2**24}
    for line in (setup_of(tmp_path), written(Job("square", order, tmp_path / "out"), None)):
        process.send(line)
        assert answer_of(process) == '{"seconds": {"load": 2.0}}'
    assert (tmp_path / "out" / "square.txt").read_text() == "9"
    assert process.stop(DEADLINE_SECONDS) == 0


def answer_of(process: Process) -> str:
    while True:
        with suppress(TimeoutError):
            return process.read_line(1e-3)


class Lost(Handle):
    """A worker of Ray's that is no more."""

    lost = (ConnectionError,)

    def ask(self, line: str) -> "Future[str]":
        answer = Future[str]()
        known = "The actor died before finishing this task.\n\tpid: 7\n\tip: 127.0.0.1\n"
        answer.set_exception(ConnectionError(f"{known}Its host was lost."))
        return answer

    def close_input(self) -> None:
        pass

    def stop(self, grace_seconds: float = 0.0) -> None:
        pass


def test_of_a_lost_worker_is_said_why_and_not_what_it_was(tmp_path: Path):
    with (
        Pool(lambda slot: Lost(), workers=1, setup="") as executor,
        pytest.raises(WorkerError) as it,
    ):
        squares(tmp_path, executor)
    assert str(it.value).startswith("no worker starts, 3 were lost, the last: Its host was lost.; ")


STAGE = """\
from stages.entry import run
from tests.runtime.work import jobs_of, pool

def main(usage, folder, what):
    with pool(folder) as executor:
        executor.finish(jobs_of(folder, {0: what.name}))

run(main, stage="any")
"""


def run_stage(folder: Path, what: str) -> Sequence[str | int]:
    """Returns how a stage ends that has these jobs to do, and what it says."""
    command = [sys.executable, "-c", STAGE, str(folder), what]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("what", "exit_code", "line"),
    [
        ("raises", 2, "artifacts/a.parquet: row 3: must be scored"),
        ("dies", 1, "no worker survives it"),
    ],
)
def test_a_stage_ends_in_one_line_and_says_whether_a_rerun_may_help(
    tmp_path: Path, what: str, exit_code: int, line: str
):
    code, said = run_stage(tmp_path, what)
    assert code == exit_code
    assert line in said
    assert said.count("\n") == 1


def test_what_a_worker_loads_is_not_looked_at_for_garbage_even_if_it_cannot_be_used():
    before = gc.get_freeze_count()
    with suppress(ValueError), freezing_imports():
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled()
    assert gc.get_freeze_count() > before
