"""The pipeline as a Prefect flow: a task per DVC stage, with DVC's own dependencies.

Import it after `flows.settings.prepare_environment`; `python -m flows.reproduce` does.
"""

import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import cast
from uuid import UUID

from prefect import State, flow, get_run_logger, task
from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture
from prefect.states import Completed
from prefect.task_runners import ThreadPoolTaskRunner
from rich.console import Console
from rich.text import Text

from flows.planning import Step, plan
from flows.runner import FLOW_LOCK, Outcome, Result, Runner, StageError, stages_lock
from grpo.artifacts.files import exclusive
from grpo.lineage.lock import flatten

METRICS = "artifacts/report/metrics.json"
PAGE = "artifacts/report/index.html"
SHOWN = ("mean_at_k.value", "gain_over_base.value", "gain_over_base.low", "cost.flops")
MOST_STAGES = 4096  # threads; a waiting stage takes one, and the runner limits those at work

console = Console(stderr=True, highlight=False)


@flow(
    name="reproduce",
    task_runner=ThreadPoolTaskRunner(max_workers=MOST_STAGES),  # type: ignore[arg-type]
    persist_result=False,
    validate_parameters=False,
)
def reproduce(targets: Sequence[str] = (), at_once: int | None = None) -> None:
    """Brings the targets, by default all stages, up to date; independent stages side by side.

    Args:
      at_once: Stages that may run at the same time; by default the machine's processors.

    Raises:
      BusyError: If another reproduce runs in this workspace.
      StageError: If a stage failed; what does not depend on it has run.
    """
    workspace = Path.cwd()
    with exclusive(workspace / FLOW_LOCK, "reproduce"), stages_lock(workspace) as lock:
        steps = plan(targets)
        run = Reproduction(
            workspace, steps, at_once=at_once or len(os.sched_getaffinity(0)), held=[lock]
        )
        futures: dict[str, PrefectFuture[State]] = {}
        try:
            for step in steps:
                futures[step.name] = _stage.with_options(task_run_name=step.name).submit(
                    run,
                    step.name,
                    wait_for=[futures[name] for name in step.upstream],
                    return_state=False,
                )
            for future in futures.values():
                future.wait()
        finally:
            run.runner.stop()  # a signal may have ended the waiting
        create_table_artifact(run.table(), key="stages", description="What became of each stage")
        update_progress_artifact(run.progress, progress=run.percent())  # tasks overtake each other
        if run.failures:
            raise run.failures[0]
        if (workspace / METRICS).exists():
            create_markdown_artifact(_report(workspace), key="report")


@task(cache_policy=NO_CACHE, persist_result=False)
def _stage(run: "Reproduction", name: str) -> State:
    result = run.bring_up_to_date(name)
    update_progress_artifact(run.progress, progress=run.percent())
    return Completed(name=str(result.outcome), message=f"{result.seconds:.1f} s")


class Reproduction:
    """One run of the flow: what each stage came to, shared by the tasks' threads."""

    def __init__(
        self, workspace: Path, steps: Sequence[Step], *, at_once: int, held: Sequence[int]
    ) -> None:
        self.steps = {step.name: step for step in steps}
        self.runner = Runner(workspace, at_once=at_once, show=show, held=held)
        self.progress = cast(UUID, create_progress_artifact(0.0, key="progress"))
        self.results: dict[str, Result] = {}
        self.failures: list[StageError] = []
        self.guard = threading.Lock()

    def bring_up_to_date(self, name: str) -> Result:
        """Runs the stage if it changed, or if a stage it reads from did run."""
        step = self.steps[name]
        ran = any(self.results[each].outcome is not Outcome.UNCHANGED for each in step.upstream)
        try:
            is_due = step.is_changed or ran
            result = self.runner.run_stage(step) if is_due else Result.unchanged()
        except StageError as error:
            with self.guard:
                self.failures.append(error)
            _announce(step.name, str(error), style="red")
            raise
        with self.guard:
            self.results[name] = result
        if is_due:
            count = f"{len(self.results)}/{len(self.steps)}"
            _announce(name, f"{result.outcome} in {result.seconds:.1f} s ({count})", "green")
        return result

    def percent(self) -> float:
        """Returns the share of stages that are up to date."""
        return 100 * len(self.results) / len(self.steps)

    def table(self) -> list[dict[str, str]]:
        """Returns a row per stage for the UI."""
        failed = {str(error).split(":")[0] for error in self.failures}
        return [
            {
                "stage": name,
                "state": str(done.outcome) if done else "Failed" if name in failed else "Not run",
                "seconds": f"{done.seconds:.1f}" if done else "",
            }
            for name in self.steps
            for done in [self.results.get(name)]
        ]


def headline(metrics: str) -> dict[str, str]:
    """Returns those numbers of a report's JSON whose names end as SHOWN says."""
    numbers = flatten(json.loads(metrics))
    shown = {name: each for name, each in numbers.items() if name.endswith(SHOWN)}
    return {name: f"{each:.6g}" for name, each in shown.items() if isinstance(each, int | float)}


def _report(workspace: Path) -> str:
    """Returns the headline and where the rest is, as Markdown."""
    lines = ["| number | value |", "|---|---|"]
    numbers = headline((workspace / METRICS).read_text())
    lines += [f"| {name} | {value} |" for name, value in numbers.items()]
    store = os.environ.get("MLFLOW_TRACKING_URI", "")
    if store.startswith("http") and "@" not in store:  # never a password
        lines += ["", f"[Lineage in MLflow]({store})"]
    return "\n".join([*lines, "", f"Report: {(workspace / PAGE).resolve()}"])


def show(name: str, line: str) -> None:
    """Shows what a stage says, here and in the task's log."""
    get_run_logger().info(line)
    _announce(name, line, style="")


def _announce(name: str, line: str, style: str) -> None:
    console.print(Text.assemble((f"{name} ", "cyan"), (line, style)), soft_wrap=True)
