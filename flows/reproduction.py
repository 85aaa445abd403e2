"""One run of the pipeline: its stages in the order of their dependencies, their results and errors.

Nothing here needs Prefect; `flows/pipeline.py` runs the same stages as Prefect tasks.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path

from flows.lineage import record_pending_lineage
from flows.live import FAILED, RUNNING, Row, announce, displayed
from flows.planning import Step, due_modules, plan
from flows.preloaded import preloaded
from flows.runner import (
    FLOW_LOCK,
    Outcome,
    Result,
    Runner,
    StageError,
    Stopped,
    environment_of_stages,
    stages_lock,
)
from grpo.errors import GrpoError
from grpo.lineage.lock import sort_lock
from grpo.runtime.artifacts import marks
from grpo.runtime.artifacts.files import exclusive
from grpo.runtime.artifacts.usage import read_usage

MOST_NAMED = 5  # stages that the verdict names


class Reproduction:
    """One run: the results of its stages, shared by the threads that run them."""

    def __init__(self, steps: Sequence[Step], runner: Runner) -> None:
        self.steps = {step.name: step for step in steps}
        self.runner = runner
        self.results: dict[str, Result] = {}
        self.failures: dict[str, GrpoError] = {}
        self.failed_after: dict[str, float] = {}  # seconds of the last attempt
        self.last_seconds: dict[str, float] = {}  # of stages that ran here before
        self.start = time.monotonic()
        self.guard = threading.Lock()

    def bring_up_to_date(self, name: str) -> Result:
        """Runs the stage if it changed or if an upstream stage ran."""
        step = self.steps[name]
        ran = any(self.results[each].outcome is not Outcome.UNCHANGED for each in step.upstream)
        try:
            is_due = step.is_changed or ran
            if is_due:
                self._remember_seconds(name)
            result = self.runner.run_stage(step) if is_due else Result.unchanged()
        except Stopped:
            raise
        except GrpoError as error:
            with self.guard:
                self.failures[name] = error
                if name in self.runner.started:  # not if it cannot run here
                    self.failed_after[name] = time.monotonic() - self.runner.started[name]
            marks.fail(name, error)  # a timed-out or remote stage cannot mark itself
            raise
        with self.guard:
            self.results[name] = result
        if is_due:
            marks.succeed(name)  # a restored or remote stage cannot mark itself
        return result

    def _remember_seconds(self, name: str) -> None:
        with suppress(GrpoError, TypeError):  # of another version, or broken
            usage = read_usage(name)
            if usage:
                self.last_seconds[name] = usage.seconds

    def rows(self) -> list[Row]:
        """Returns a row per stage that has started, in this order."""
        with self.guard:
            number = {name: index for index, name in enumerate(self.results, start=1)}
            state = {name: str(each.outcome) for name, each in self.results.items()}
            took = {name: each.seconds for name, each in self.results.items()} | self.failed_after
        state |= dict.fromkeys(self.failed_after, FAILED)
        now = time.monotonic()
        return [
            Row(
                stage=name,
                state=state.get(name, RUNNING),
                seconds=took.get(name, now - start),
                last_seconds=self.last_seconds.get(name),
                progress=self.runner.progress_of(name),
                number=number.get(name),
            )
            for name, start in self.runner.started.copy().items()
        ]

    def verdict(self) -> str:
        """Returns how many stages are up to date, which of them ran, and how long."""
        took = {name: each.seconds for name, each in self.results.items()}
        ran = [name for name, each in self.results.items() if each.outcome is Outcome.COMPLETED]
        ran.sort(key=took.__getitem__, reverse=True)
        named = ", ".join(f"{name} {took[name]:.1f} s" for name in ran[:MOST_NAMED])
        more = f" and {len(ran) - MOST_NAMED} more" if len(ran) > MOST_NAMED else ""
        restored = sum(each.outcome is Outcome.RESTORED for each in self.results.values())
        counts = {
            "restored": restored,
            "unchanged": len(self.results) - len(ran) - restored,
            "failed": len(self.failures),
            "not reached": len(self.steps) - len(self.results) - len(self.failures),
        }
        of = "" if len(self.results) == len(self.steps) else f"{len(self.results)} of "
        parts = [f"{of}{len(self.steps)} stages are up to date"]
        if ran:
            seconds = time.monotonic() - self.start
            parts.append(f"{len(ran)} ran in {seconds:.1f} s: {named}{more}")
        return "; ".join([*parts, *(f"{count} {word}" for word, count in counts.items() if count)])

    def require_all(self) -> None:
        """Raises the error of a stage that failed or was not reached.

        Before, prints the verdict and the errors of the other stages that failed.
        """
        missing = [name for name in self.steps if name not in self.results]
        if not missing:
            return
        print(self.verdict(), file=sys.stderr)
        first, *others = self.failures.values() or [
            StageError(f"{missing[0]}: was not reached, its task failed", code=1)
        ]
        for each in others:
            print(each, file=sys.stderr)
        raise first

    def percent(self) -> float:
        """Returns the percentage of stages that are up to date."""
        return 100 * len(self.results) / len(self.steps)

    def table(self) -> list[dict[str, str]]:
        """Returns a row per stage for the UI."""
        return [
            {
                "stage": name,
                "state": str(done.outcome) if done else missed,
                "seconds": f"{done.seconds:.1f}" if done else "",
            }
            for name in self.steps
            for done in [self.results.get(name)]
            for missed in ["Failed" if name in self.failures else "Not run"]
        ]


def reproduce_without_server(targets: Sequence[str] = (), at_once: int | None = None) -> str:
    """Brings the targets, by default all stages, up to date without Prefect; returns the verdict.

    Args:
      at_once: Maximum number of parallel stages; by default the number of processors.

    Raises:
      BusyError: If another reproduce, or a stage of a killed one, runs in this workspace.
      GrpoError: If a stage failed or cannot run here; stages that do not depend on it have run.
    """
    workspace = Path.cwd()
    with locked(workspace) as lock:
        record_pending_lineage(workspace)
        steps = plan(targets)
        if not any(step.is_changed for step in steps):
            return verdict_unchanged(steps)
        with local_runner(workspace, steps, at_once, show=announce, lock=lock) as runner:
            run = Reproduction(steps, runner)
            run_in_threads(run)
            return run.verdict()


def verdict_unchanged(steps: Sequence[Step]) -> str:
    """Returns the verdict of a run in which no stage had to run."""
    return f"everything is up to date: {len(steps)} stages unchanged"


@contextmanager
def locked(workspace: Path) -> Iterator[int]:
    """Locks the workspace for a run; yields the lock that its stages inherit.

    Raises:
      BusyError: If another run, or a stage of a killed run, holds the lock.
    """
    with exclusive(workspace / FLOW_LOCK, "reproduce"), stages_lock(workspace) as lock:
        yield lock


@contextmanager
def local_runner(
    workspace: Path,
    steps: Sequence[Step],
    at_once: int | None,
    *,
    show: Callable[[str, str], None],
    lock: int,
) -> Iterator[Runner]:
    """Yields a runner of stages with the preloaded processes of those that may run."""
    most = len(os.sched_getaffinity(0)) if at_once is None else at_once
    with preloaded(workspace, environment_of_stages(), due_modules(steps)) as processes:
        yield Runner(
            workspace,
            at_once=most,
            show=show,
            held=[lock],
            preloaded=processes,
            is_displayed=True,
        )


def run_in_threads(run: Reproduction) -> None:
    """Runs outdated stages, each when those that it reads from are up to date.

    Raises:
      GrpoError: If a stage failed, cannot run here or was not reached; stages that do not depend
        on it have run.
    """
    started: dict[str, Future[Result]] = {}

    def bring(name: str) -> Result:
        for each in run.steps[name].upstream:
            started[each].result()  # its error is this stage's, too
        return run.bring_up_to_date(name)

    # A thread per stage, for waiting stages need one, too; the runner limits running stages.
    with (
        displayed(run.rows, total=len(run.steps)),
        ThreadPoolExecutor(max_workers=len(run.steps)) as threads,
    ):
        try:
            for name in run.steps:
                started[name] = threads.submit(bring, name)
            wait(started.values())
        finally:
            run.runner.stop()  # a signal may have interrupted the wait
            sort_lock(run.runner.workspace)
    for each in started.values():
        error = each.exception()
        if error is not None and not isinstance(error, GrpoError):
            raise error
    run.require_all()
