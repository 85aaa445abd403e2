"""One stage at a time and side by side: outcomes, retries, timeouts, locks."""

import fcntl
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Self
from uuid import uuid4

import httpx
import pytest

import flows.pipeline
import flows.runner
from flows import gpus
from flows.gpus import hold_gpus
from flows.launcher import descendants
from flows.pipeline import bring_up_to_date
from flows.planning import Hints, Step, plan
from flows.preloaded import preloaded
from flows.reproduction import Reproduction
from flows.runner import Outcome, Result, Runner, StageError, Stopped, environment_of_stages
from grpo.errors import ParameterError
from grpo.lineage.lock import Lock, read_lock
from grpo.runtime.artifacts.marks import read_marks
from tests import tiny_pipeline
from tests.flows.test_launcher import is_alive, until

# DVC itself uses what pygtrie deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

Lines = list[tuple[str, str]]


@pytest.fixture
def shown() -> Lines:
    return []


@pytest.fixture(params=[pytest.param("fresh", marks=pytest.mark.long), "preloaded"])
def runner(
    request: pytest.FixtureRequest,
    finished_pipeline: Path,
    shown: Lines,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Runner]:
    """A runner of a pipeline whose train stages have changed."""
    monkeypatch.setenv("PYTHONPATH", str(tiny_pipeline.SOURCE))
    tiny_pipeline.replace(finished_pipeline, "seconds: 0.0", "seconds: 0.1")
    with ExitStack() as stack:
        processes = None
        if request.param == "preloaded":
            opened = preloaded(finished_pipeline, environment_of_stages(), [])
            processes = stack.enter_context(opened)
        yield Runner(
            finished_pipeline,
            at_once=2,
            show=lambda stage, line: shown.append((stage, line)),
            preloaded=processes,
        )


only_preloaded = pytest.mark.parametrize("runner", ["preloaded"], indirect=True)


@pytest.fixture
def step(runner: Runner) -> Callable[[str], Step]:
    """Finds a stage in the plan of the runner's pipeline as it is now."""
    return lambda name: {each.name: each for each in plan()}[name]


def marks(workspace: Path) -> list[list[str]]:
    """Returns what stages noted: start or end, name, time, process."""
    return [line.split() for line in (workspace / ".work/marks.txt").read_text().splitlines()]


def test_a_stage_runs_shows_its_own_lines_and_is_recorded(
    runner: Runner, step: Callable[[str], Step], shown: Lines
) -> None:
    assert runner.run_stage(step("train@a-1")).outcome is Outcome.COMPLETED
    assert shown == [("train@a-1", "working on a-1")]
    assert read_lock(runner.workspace)["train@a-1"].params["seconds"] == 0.1
    assert runner.run_stage(step("train@a-1")).outcome is Outcome.UNCHANGED


def test_a_stage_that_ran_before_is_restored(runner: Runner, step: Callable[[str], Step]) -> None:
    tiny_pipeline.replace(runner.workspace, "rate: 0.1", "rate: 0.3")
    assert runner.run_stage(step("train@a-1")).outcome is Outcome.COMPLETED
    tiny_pipeline.replace(runner.workspace, "rate: 0.3", "rate: 0.1")
    tiny_pipeline.replace(runner.workspace, "seconds: 0.1", "seconds: 0.0")
    assert runner.run_stage(step("train@a-1")).outcome is Outcome.RESTORED


def test_independent_stages_overlap_and_both_are_recorded(
    runner: Runner, step: Callable[[str], Step]
) -> None:
    tiny_pipeline.replace(runner.workspace, "seconds: 0.1", "seconds: 2.0")
    already = len(marks(runner.workspace))
    steps = [step("train@a-1"), step("train@b-1")]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(runner.run_stage, steps))
    assert [result.outcome for result in results] == [Outcome.COMPLETED, Outcome.COMPLETED]
    kinds = [kind for kind, *_ in marks(runner.workspace)[already:]]
    assert kinds == ["start", "start", "end", "end"]
    lock = read_lock(runner.workspace)
    assert {lock[each.name].params["seconds"] for each in steps} == {2.0}


@pytest.mark.parametrize(
    "cut",
    ["md5:", *(pytest.param(each, marks=pytest.mark.long) for each in ("schema", "  train@a-1:"))],
)
def test_a_record_is_found_although_dvc_is_writing_the_next_one(
    runner: Runner, step: Callable[[str], Step], monkeypatch: pytest.MonkeyPatch, cut: str
) -> None:
    """DVC writes its lock file in place: an empty file, fewer stages, half a mapping."""

    def cut_first(workspace: Path) -> Lock:
        path = workspace / "dvc.lock"
        whole = path.read_text()
        path.write_text(whole[: whole.index(cut)])
        monkeypatch.setattr(flows.runner, "read_lock", read_lock)
        threading.Timer(0.3, path.write_text, [whole]).start()
        return read_lock(workspace)

    monkeypatch.setattr(flows.runner, "read_lock", cut_first)
    assert runner.run_stage(step("train@a-1")).outcome is Outcome.COMPLETED


def test_a_stage_that_is_never_recorded_fails(
    runner: Runner, step: Callable[[str], Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_pipeline.replace(runner.workspace, "seed: 1", "seed: 2")
    monkeypatch.setattr(flows.runner, "RECORD_SECONDS", 0.2)
    monkeypatch.setattr(flows.runner, "read_lock", lambda workspace: {})
    with pytest.raises(StageError, match=r"^prepare: ran but is not in dvc\.lock; see "):
        runner.run_stage(step("prepare"))


def test_wrong_input_is_one_line_and_not_tried_again(
    runner: Runner, step: Callable[[str], Step]
) -> None:
    tiny_pipeline.replace(runner.workspace, "rate: 0.1", "rate: 0.1, fails: 2")
    already = len(marks(runner.workspace))
    with pytest.raises(StageError, match=r"^train@a-1: rounds\.a-1\.fails must be absent") as error:
        runner.run_stage(step("train@a-1"))
    assert error.value.code == 2
    assert len(marks(runner.workspace)) == already + 1


def test_another_failure_is_tried_again(
    runner: Runner, step: Callable[[str], Step], shown: Lines
) -> None:
    tiny_pipeline.replace(runner.workspace, "rate: 0.1", "rate: 0.1, fails: 3")
    already = len(marks(runner.workspace))
    with pytest.raises(StageError) as error:
        runner.run_stage(step("train@a-1"))
    assert error.value.code == 3
    assert len(marks(runner.workspace)) == already + 2
    assert any("attempt 2 of 2" in line for _, line in shown)


def test_a_stage_that_takes_too_long_is_stopped(
    runner: Runner, step: Callable[[str], Step]
) -> None:
    tiny_pipeline.replace(runner.workspace, "seconds: 0.1", "seconds: 300.0")
    pipeline = runner.workspace / "dvc.yaml"
    hints = "{retries: 0, timeout_s: 2}"
    pipeline.write_text(pipeline.read_text().replace("{retries: 1, timeout_s: 60}", hints))
    with pytest.raises(StageError, match=r"ran longer than meta\.exec\.timeout_s = 2"):
        runner.run_stage(step("train@a-1"))
    assert not is_alive(int(marks(runner.workspace)[-1][3]))


def test_stopping_ends_running_stages_and_starts_no_more(
    runner: Runner, step: Callable[[str], Step]
) -> None:
    tiny_pipeline.replace(runner.workspace, "seconds: 0.1", "seconds: 300.0")
    already = len(marks(runner.workspace))
    wanted = step("train@a-1")
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(runner.run_stage, wanted)
        until(lambda: len(marks(runner.workspace)) > already)
        runner.stop()
        assert isinstance(future.exception(), Stopped)
    assert not is_alive(int(marks(runner.workspace)[-1][3]))
    with pytest.raises(Stopped):
        runner.run_stage(wanted)


@only_preloaded
@pytest.mark.parametrize(
    "who",
    [
        *("preloaded process", "stage"),
        *(pytest.param(each, marks=pytest.mark.long) for each in ("launcher", "dvc")),
    ],
)
def test_a_kill_ends_all_processes_of_a_stage_which_is_tried_again(
    runner: Runner, step: Callable[[str], Step], who: str
) -> None:
    tiny_pipeline.replace(runner.workspace, "seconds: 0.1", "seconds: 300.0")
    already = len(marks(runner.workspace))
    wanted = step("train@a-1")
    (server,) = [each.pid for each in runner.preloaded.processes]
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(runner.run_stage, wanted)
        until(lambda: len(marks(runner.workspace)) > already)
        launcher, dvc, *_, stage = below = descendants(server)
        assert stage == int(marks(runner.workspace)[-1][3])
        tiny_pipeline.replace(runner.workspace, "seconds: 300.0", "seconds: 0.2")
        named = {"preloaded process": server, "launcher": launcher, "dvc": dvc, "stage": stage}
        os.kill(named[who], signal.SIGKILL)
        until(lambda: not any(map(is_alive, below)))
        assert future.result().outcome is Outcome.COMPLETED
    assert len(marks(runner.workspace)) == already + 3  # two starts and an end


@only_preloaded
def test_dvc_is_forked_and_locks_are_held_until_all_has_ended(
    runner: Runner, step: Callable[[str], Step], tmp_path: Path
) -> None:
    tiny_pipeline.replace(runner.workspace, "seconds: 0.1", "seconds: 0.5")
    already = len(marks(runner.workspace))
    wanted, lock = step("train@a-1"), tmp_path / "lock"
    with ThreadPoolExecutor(1) as pool:
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            runner.held = (file.fileno(),)
            future = pool.submit(runner.run_stage, wanted)
            until(lambda: len(marks(runner.workspace)) > already)
        (server,) = runner.preloaded.processes
        assert len(descendants(server.pid)) >= 3  # a launcher, dvc and a stage
        with lock.open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        future.result()
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_gpu_belongs_to_one_stage_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    given_up = threading.Event()
    with hold_gpus(1, stage="a", is_stopped=given_up.is_set) as first:
        with hold_gpus(1, stage="b", is_stopped=given_up.is_set) as second:
            assert sorted(first.gpus + second.gpus) == ["0", "1"]
            given_up.set()
            with hold_gpus(1, stage="c", is_stopped=given_up.is_set) as third:
                assert third.gpus == ()
        given_up.clear()
        with hold_gpus(1, stage="d", is_stopped=given_up.is_set) as fourth:
            assert fourth.gpus == second.gpus
    with (
        pytest.raises(ParameterError, match=r"e\.meta\.exec\.gpu must be at most 2 here, got 3"),
        hold_gpus(3, stage="e", is_stopped=given_up.is_set),
    ):
        pass
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with hold_gpus(3, stage="f", is_stopped=given_up.is_set) as none:
        assert none.gpus == ()


def test_a_stage_that_cannot_run_here_fails_the_run(
    finished_pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = finished_pipeline / "dvc.yaml"
    pipeline.write_text(pipeline.read_text().replace("exec: {", "exec: {gpu: 3, "))
    tiny_pipeline.replace(finished_pipeline, "rate: 0.1", "rate: 0.3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    runner = Runner(finished_pipeline, at_once=1, show=print)
    run = Reproduction(plan(["train@a-1"]), runner)
    for name in ("prepare", "base"):
        run.bring_up_to_date(name)
    with pytest.raises(ParameterError, match="gpu must be at most 1 here, got 3") as error:
        run.bring_up_to_date("train@a-1")
    assert run.failures == {"train@a-1": error.value}


class Inline:
    """A task that fails at once and here, and its runner."""

    workspace = Path()

    def __init__(self) -> None:
        self.started: dict[str, float] = {}

    def with_options(self, task_run_name: str) -> Self:
        return self

    def submit(self, run: Reproduction, name: str, *_: object, **__: object) -> SimpleNamespace:
        with suppress(StageError):
            run.bring_up_to_date(name)
        return SimpleNamespace(wait=lambda: None)

    def run_stage(self, step: Step) -> None:
        raise StageError(f"{step.name}: failed", code=1)

    def stop(self) -> None:
        pass


class Scripted:
    """A runner whose stage ends as it is told to."""

    def __init__(self, *ends: Result | StageError) -> None:
        self.ends = list(ends)
        self.started: dict[str, float] = {}

    def run_stage(self, step: Step) -> Result:
        end = self.ends.pop(0)
        if isinstance(end, StageError):
            raise end
        return end


def test_a_stage_that_fails_without_a_word_of_its_own_is_marked_until_it_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took too long, or ran on another machine, or DVC refused to start it."""
    monkeypatch.chdir(tmp_path)
    failure = StageError("train@a-1: ran longer than meta.exec.timeout_s = 2", code=1)
    restored = Result(outcome=Outcome.RESTORED, seconds=0.1)
    step = Step(name="train@a-1", upstream=(), hints=Hints(), is_changed=True)
    run = Reproduction([step], Scripted(failure, restored))
    with pytest.raises(StageError):
        run.bring_up_to_date(step.name)
    (mark,) = read_marks()
    assert (mark.stage, mark.reason) == (step.name, "ran longer than meta.exec.timeout_s = 2")
    run.bring_up_to_date(step.name)
    assert read_marks() == []


def test_a_server_that_is_away_at_the_end_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def away(*_: object, **__: object) -> None:
        raise httpx.ConnectError("nobody there")

    monkeypatch.setattr(flows.pipeline, "_stage", Inline())
    monkeypatch.setattr(flows.pipeline, "create_progress_artifact", lambda *_, **__: uuid4())
    monkeypatch.setattr(flows.pipeline, "create_table_artifact", away)
    monkeypatch.setattr(flows.pipeline, "update_progress_artifact", away)
    step = Step(name="train@a-1", upstream=(), hints=Hints(), is_changed=True)
    with pytest.raises(StageError, match=r"^train@a-1: failed$"):
        bring_up_to_date(Reproduction([step], Inline()))
