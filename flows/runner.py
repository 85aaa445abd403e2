"""Runs stages as `dvc repro -s` processes with log capture, timeouts, retries and clean stop."""

import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Self, TypeAlias

from flows import launcher
from flows.gpus import Slots, hold_gpus
from flows.planning import Step
from flows.preloaded import ForkedStage, Preloaded
from grpo.errors import ArtifactError, BusyError, GrpoError, ParameterError
from grpo.lineage.lock import LOCK, read_lock
from grpo.runtime.progress import CHANNEL, Progress, clear_progress, read_progress

GRACE_SECONDS = 20.0  # between SIGTERM and SIGKILL
POLL_SECONDS = 0.1
HOLD_SECONDS = 10.0  # before the last line is shown, which is the error's reason if a stage fails
LOGS = Path(".work/logs")
PROGRESS = Path(".work/progress")  # files of grpo/runtime/progress.py
FLOW_LOCK = Path(".work/reproduce.lock")
STAGES_LOCK = Path(".work/stages.lock")  # also held by every running stage
WAIT_SECONDS = 60.0
RECORD_SECONDS = 5.0  # dvc.lock is truncated for a moment while DVC records another stage
EXIT_WRONG_INPUT = 2
DVC = (sys.executable, "-m", "dvc")
Started: TypeAlias = "subprocess.Popen[bytes] | ForkedStage"

DVC_ERROR = "ERROR: "  # starts DVC's line on a failed stage
# Prefixes of DVC's own output, which is logged but not shown.
DVC_LINES = (
    "Running stage '",
    "Stage '",
    "Data and pipelines are up to date.",
    "> ",
    "Generating lock file '",
    "Updating lock file '",
    "To track the changes with git, run:",
    "\tgit add ",
    "To enable auto staging, run:",
    "\tdvc config ",
    "Use `dvc push` ",
)


class Outcome(StrEnum):
    """How a stage succeeded."""

    COMPLETED = "Completed"  # its command ran
    UNCHANGED = "Unchanged"  # nothing to do
    RESTORED = "Restored"  # its outputs came from DVC's run cache


@dataclass(frozen=True, kw_only=True)
class Result:
    outcome: Outcome
    seconds: float

    @classmethod
    def unchanged(cls) -> Self:
        return cls(outcome=Outcome.UNCHANGED, seconds=0.0)


class StageError(GrpoError, RuntimeError):
    """A stage failed; `code` is its exit code, 2 for wrong input."""

    def __init__(self, message: str, *, code: int) -> None:
        super().__init__(message)
        self.code = code


class Stopped(GrpoError, RuntimeError):
    """The run was stopped before this stage was finished."""


class Runner:
    """Runs stages of one workspace, at most `at_once` in parallel.

    Args:
      show: Called with the stage's name and each line that it prints.
      held: Descriptors of locks that stay locked while a stage runs.
      preloaded: Processes that fork dvc and the stages instead of starting them.
      is_displayed: Whether somebody reads what stages write into PROGRESS. Otherwise they print it.

    Raises:
      ParameterError: If `at_once` is less than 1.
    """

    def __init__(
        self,
        workspace: Path,
        *,
        at_once: int,
        show: Callable[[str, str], None],
        held: Sequence[int] = (),
        grace_seconds: float = GRACE_SECONDS,
        preloaded: Preloaded | None = None,
        is_displayed: bool = False,
    ) -> None:
        self.workspace = workspace
        self.show = show
        self.held = tuple(held)
        self.grace_seconds = grace_seconds
        self.preloaded = preloaded
        self.progress = workspace / PROGRESS if is_displayed else None  # None: nobody reads it
        self.started: dict[str, float] = {}  # when the last attempt at each stage has started
        require_places(at_once)
        self.places = threading.BoundedSemaphore(at_once)
        self.stopped = threading.Event()
        self.running: dict[int, Started] = {}
        self.guard = threading.Lock()

    def run_stage(self, step: Step) -> Result:
        """Runs one stage; retries after failures other than wrong input.

        Raises:
          StageError: If all attempts failed; one line with the reason and the path of the log.
          Stopped: If `stop` was called.
        """
        attempts = 1 + step.hints.retries
        for attempt in range(1, attempts + 1):
            try:
                with self._place(), self._gpus(step) as slots:
                    self.started[step.name] = time.monotonic()
                    return self._attempt(step, slots)
            except StageError as error:
                # A retry does not cure wrong input; other failures may be the machine's.
                if error.code == EXIT_WRONG_INPUT or attempt == attempts:
                    raise
                self.show(step.name, f"{error}; attempt {attempt + 1} of {attempts}")
        raise AssertionError("unreachable")

    def command(self, step: Step) -> list[str]:
        """Returns the command line that runs a step."""
        return [*DVC, "--wait-for-lock", "repro", "-s", step.name]

    def is_recorded(self, step: Step) -> bool:
        """Returns whether dvc.lock lists the stage; False if the file cannot be read now."""
        is_stage_of_pipeline = ":" not in step.name and not step.name.endswith(".dvc")
        try:
            return not is_stage_of_pipeline or step.name in read_lock(self.workspace)
        except ArtifactError:
            return False

    def progress_of(self, name: str) -> Progress | None:
        """Returns what a stage has told of its progress."""
        return read_progress(self.progress, name) if self.progress else None

    def stop(self) -> None:
        """Stops all running stages and waits until all their processes have exited."""
        self.stopped.set()
        with self.guard:
            running = list(self.running.values())
        for process in running:
            process.send_signal(signal.SIGTERM)
        for process in running:
            process.wait()

    @contextmanager
    def _place(self) -> Iterator[None]:
        while not self.places.acquire(timeout=POLL_SECONDS):
            self._check_stopped()
        try:
            yield
        finally:
            self.places.release()

    @contextmanager
    def _gpus(self, step: Step) -> Iterator[Slots]:
        wanted = step.hints.gpu
        with hold_gpus(wanted, stage=step.name, is_stopped=self.stopped.is_set) as slots:
            yield slots

    def _attempt(self, step: Step, slots: Slots) -> Result:
        start = time.monotonic()
        log = self.workspace / LOGS / f"{step.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        log.touch()
        if self.progress:
            self.progress.mkdir(parents=True, exist_ok=True)
            clear_progress(self.progress, step.name)
        process = self._start(step, slots, log)
        shown = _Shown(partial(self.show, step.name))
        lines = self._follow(step, process, log, shown)
        seconds = time.monotonic() - start
        if process.returncode:
            self._check_stopped()
            error = _failure(step, lines, process.returncode, seconds, log)
            shown.finish(error)
            raise error
        shown.finish()
        outcome = _outcome(step.name, lines)
        if outcome is not Outcome.UNCHANGED:
            self._check_recorded(step, log)
        return Result(outcome=outcome, seconds=seconds)

    def _start(self, step: Step, slots: Slots, log: Path) -> "Started":
        held = (*self.held, *slots.descriptors)
        with self.guard, log.open("ab") as output:
            self._check_stopped()
            process = self._fork(step, slots, output.fileno(), held) or subprocess.Popen(
                launched(self.command(step), may_finish=True, grace_seconds=self.grace_seconds),
                cwd=self.workspace,
                env=self._environment(slots),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=held,
                start_new_session=True,
            )
            self.running[process.pid] = process
        return process

    def _environment(self, slots: Slots) -> Mapping[str, str]:
        channel = {CHANNEL: str(self.progress.absolute())} if self.progress else {}
        return {**environment_of_stages(slots.gpus), **channel}

    def _fork(
        self, step: Step, slots: Slots, output: int, held: Sequence[int]
    ) -> ForkedStage | None:
        if self.preloaded is None:
            return None
        return self.preloaded.start(
            self.command(step)[len(DVC) :],
            environment=self._environment(slots),
            log=output,
            held=held,
            grace_seconds=self.grace_seconds,
        )

    def _follow(self, step: Step, process: "Started", log: Path, shown: "_Shown") -> list[str]:
        """Shows the stage's lines as they are printed and returns them; enforces its timeout."""
        limit = step.hints.timeout_s
        deadline = time.monotonic() + limit if limit else None
        lines: list[str] = []
        with log.open(errors="replace") as stream:
            is_over = False
            while not is_over:
                is_over = process.poll() is not None  # checked before the last read
                for line in _whole_lines(stream.read(), lines):
                    if not line.startswith(DVC_LINES):
                        shown.add(line)
                shown.show_older()
                if deadline and time.monotonic() > deadline:
                    process.send_signal(signal.SIGTERM)
                    deadline = None
                if not is_over:
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(POLL_SECONDS)
        with self.guard:
            del self.running[process.pid]
        return [line for line in lines if line.strip()]

    def _check_stopped(self) -> None:
        if self.stopped.is_set():
            raise Stopped("stopped")

    def _check_recorded(self, step: Step, log: Path) -> None:
        deadline = time.monotonic() + RECORD_SECONDS
        while not self.is_recorded(step):
            if time.monotonic() > deadline:
                raise StageError(f"{step.name}: ran but is not in {LOCK}; see {log}", code=1)
            time.sleep(POLL_SECONDS)


class _Shown:
    """Shows the lines of a stage, the last one later: it is the reason if the stage fails.

    The error then has it, and nobody reads it twice.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self.show = show
        self.held: list[str] = []  # one line, and that of DVC
        self.since = 0.0

    def add(self, line: str) -> None:
        if not line.startswith(DVC_ERROR):
            self.finish()
        self.held.append(line)
        self.since = time.monotonic()

    def show_older(self) -> None:
        """Shows the held lines if no other has come for a while."""
        if time.monotonic() - self.since > HOLD_SECONDS:
            self.finish()

    def finish(self, error: StageError | None = None) -> None:
        """Shows the held lines, but those that the error of the stage has, and DVC's."""
        for line in self.held:
            if error is None or not (line in str(error) or line.startswith(DVC_ERROR)):
                self.show(line)
        self.held = []


def require_places(at_once: int | None) -> None:
    """Raises ParameterError if `at_once` is less than 1; None means no explicit limit."""
    if at_once is not None and at_once < 1:
        raise ParameterError(f"--at-once: must be at least 1, got {at_once}; raise it or omit it")


@contextmanager
def stages_lock(workspace: Path) -> Iterator[int]:
    """Waits until no stage of an earlier, killed run holds the lock; yields its descriptor.

    Raises:
      BusyError: If a stage still runs after a minute.
    """
    path = workspace / STAGES_LOCK
    deadline = time.monotonic() + WAIT_SECONDS
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BusyError(
                        f"{path}: a stage of an earlier run is still running; stop it"
                    ) from None
                time.sleep(POLL_SECONDS)
        yield file.fileno()


def launched(command: list[str], *, may_finish: bool, grace_seconds: float) -> list[str]:
    """Returns `command` under the launcher, which stops it when this process ends."""
    how = "finish" if may_finish else "stop"
    start = [sys.executable, "-S", "-E", launcher.__file__, str(os.getpid()), str(grace_seconds)]
    return [*start, how, *command]


def environment_of_stages(gpus: Sequence[str] = ()) -> Mapping[str, str]:
    """Returns a stage's environment: this Python first in PATH, no buffering, its GPUs."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    own = {"PATH": path, "PYTHONUNBUFFERED": "1", "DVC_NO_ANALYTICS": "true"}
    if gpus:
        own["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return {**os.environ, **own}


def _whole_lines(text: str, lines: list[str]) -> list[str]:
    """Appends text to `lines`, whose last line may be incomplete; returns newly complete lines."""
    rest = lines.pop() if lines else ""
    before = len(lines)
    lines += (rest + text).split("\n")
    return [line.rsplit("\r", 1)[-1] for line in lines[before:-1] if line.strip()]


def _outcome(name: str, lines: list[str]) -> Outcome:
    """Returns the outcome according to DVC's output."""
    if any(line.startswith(f"Stage '{name}' is cached - skipping run") for line in lines):
        return Outcome.RESTORED
    if any(line == f"Running stage '{name}':" for line in lines):
        return Outcome.COMPLETED
    return Outcome.UNCHANGED


def _failure(step: Step, lines: list[str], code: int, seconds: float, log: Path) -> StageError:
    """Returns the error of a failed attempt; the reason is the stage's last line, or DVC's."""
    dvc_line = next((line for line in lines if line.startswith(DVC_ERROR)), "")
    said = [
        line
        for line in lines[: lines.index(dvc_line) if dvc_line else None]
        if not line.startswith(DVC_LINES)
    ]
    found = re.search(r"failed to run: .*, exited with (-?\d+)$", "\n".join(lines), re.S | re.M)
    reason = said[-1] if said and found else dvc_line.removeprefix(DVC_ERROR) or f"exit code {code}"
    if step.hints.timeout_s and seconds > step.hints.timeout_s:
        reason = f"ran longer than meta.exec.timeout_s = {step.hints.timeout_s:g}"
    return StageError(f"{step.name}: {reason} (log: {log})", code=int(found[1]) if found else 1)
