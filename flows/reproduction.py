"""One run of the pipeline: its stages in the order of their dependencies, their results and errors.

Nothing here needs Prefect; `flows/pipeline.py` runs the same stages as Prefect tasks.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.text import Text

from flows.lineage import record_pending_lineage
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

console = Console(stderr=True, highlight=False)


class Reproduction:
    """One run: the results of its stages, shared by the threads that run them."""

    def __init__(self, steps: Sequence[Step], runner: Runner) -> None:
        self.steps = {step.name: step for step in steps}
        self.runner = runner
        self.results: dict[str, Result] = {}
        self.failures: dict[str, GrpoError] = {}
        self.guard = threading.Lock()

    def bring_up_to_date(self, name: str) -> Result:
        """Runs the stage if it changed or if an upstream stage ran."""
        step = self.steps[name]
        ran = any(self.results[each].outcome is not Outcome.UNCHANGED for each in step.upstream)
        try:
            is_due = step.is_changed or ran
            result = self.runner.run_stage(step) if is_due else Result.unchanged()
        except Stopped:
            raise
        except GrpoError as error:
            with self.guard:
                self.failures[name] = error
            marks.fail(name, error)  # a timed-out or remote stage cannot mark itself
            announce(step.name, str(error), style="red")
            raise
        with self.guard:
            self.results[name] = result
        if is_due:
            marks.succeed(name)  # a restored or remote stage cannot mark itself
            count = f"{len(self.results)}/{len(self.steps)}"
            announce(name, f"{result.outcome} in {result.seconds:.1f} s ({count})", style="green")
        return result

    def require_all(self) -> None:
        """Raises the error of a stage that failed or was not reached."""
        for name in self.steps:
            if name not in self.results:
                missed = StageError(f"{name}: was not reached, its task failed", code=1)
                raise next(iter(self.failures.values()), missed)

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


def reproduce_without_server(
    targets: Sequence[str] = (), at_once: int | None = None
) -> tuple[Step, ...]:
    """Brings the targets, by default all stages, up to date without Prefect; returns the stages.

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
        if any(step.is_changed for step in steps):
            with local_runner(workspace, steps, at_once, show=announce, lock=lock) as runner:
                run_in_threads(Reproduction(steps, runner))
    return steps


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
        yield Runner(workspace, at_once=most, show=show, held=[lock], preloaded=processes)


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
    with ThreadPoolExecutor(max_workers=len(run.steps)) as threads:
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


def announce(name: str, line: str, style: str = "") -> None:
    """Prints a line about a stage on the console."""
    console.print(Text.assemble((f"{name} ", "cyan"), (line, style)), soft_wrap=True)
