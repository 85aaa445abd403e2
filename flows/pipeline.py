"""The pipeline as a Prefect flow: a task per DVC stage, with DVC's dependencies.

Import it after `flows.settings.prepare_environment`; `python -m flows.reproduce` does.
"""

import base64
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import cast
from uuid import UUID

import httpx
from prefect import State, flow, get_run_logger, runtime, task
from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.futures import PrefectFuture
from prefect.states import Completed, Crashed
from prefect.task_runners import ThreadPoolTaskRunner

from flows.lineage import record_pending_lineage
from flows.live import announce, displayed
from flows.planning import plan
from flows.reproduction import Reproduction, local_runner, locked
from flows.sharing import PUSH, Push, require_remote
from grpo.errors import GrpoError
from grpo.lineage.graph import reduce_edges
from grpo.lineage.lock import LOCK, sort_lock
from grpo.lineage.revision import git
from grpo.params.recipes import read_content
from grpo.report.words import format_flops
from grpo.runtime.artifacts.files import write_bytes
from grpo.runtime.markdown import markdown_table

METRICS = "artifacts/report/metrics.json"
PAGE = "artifacts/report/index.html"
LAST_RUN = Path(".work/reproduce.run")  # id of the most recently started flow run
SCORES = {"mean_at_k": "mean@{k}", "gain_over_base": "gain over base", "greedy": "greedy"}
MOST_STAGES = 4096  # threads; waiting stages need one, too; the runner limits running stages


def title() -> str:
    """Returns the name of a flow run: its targets or its task and arms, and its commit."""
    targets = runtime.flow_run.parameters["targets"]
    commit = git(Path.cwd(), "rev-parse", "--short", "HEAD") or "no commit"
    changes = git(Path.cwd(), "status", "--porcelain", "--", ".", f":(exclude){LOCK}")
    dirty = ", dirty" if changes else ""
    return f"{' '.join(targets) or _describe_params()} at {commit}{dirty}"


def _describe_params() -> str:
    """Returns task and arms of params.yaml, e.g. "reasoning_gym: plain, sgpo"."""
    with suppress(GrpoError):  # the stages will say what is wrong
        content = read_content()
        task, arms = content.get("task"), content.get("arms")
        if isinstance(task, dict) and isinstance(arms, dict):
            return f"{task.get('kind')}: {', '.join(map(str, arms))}"
    return "all stages"


@flow(
    name="reproduce",
    flow_run_name=title,
    task_runner=ThreadPoolTaskRunner(max_workers=MOST_STAGES),  # type: ignore[arg-type]
    persist_result=False,
    validate_parameters=False,
)
def reproduce(targets: Sequence[str] = (), at_once: int | None = None, push: bool = False) -> str:
    """Brings the targets, by default all stages, up to date; runs independent stages in parallel.

    Returns:
      The verdict: which stages ran, and how long.

    Args:
      at_once: Maximum number of parallel stages; by default the number of processors.
      push: Whether to push the outputs of the stages to DVC's default remote.

    Raises:
      ParameterError: If `push` is true and there is no remote.
      BusyError: If another reproduce, or a stage of a killed one, runs in this workspace.
      StageError: If a stage failed or was not reached; stages that do not depend on it have run.
    """
    workspace = Path.cwd()
    if push:
        require_remote(workspace)
    with begun(workspace) as lock:
        record_pending_lineage(workspace)
        steps = plan(targets)
        with local_runner(workspace, steps, at_once, show=show, lock=lock) as runner:
            run = Reproduction(steps, runner)
            last = bring_up_to_date(run)
        if (workspace / METRICS).exists():
            text = _report(workspace)
            with suppress(httpx.HTTPError):
                create_markdown_artifact(text, key="report", description="Results")
        if push:
            _push(workspace, [step.name for step in steps], wait_for=last)
        return run.verdict()


def bring_up_to_date(run: Reproduction) -> list[PrefectFuture[State]]:
    """Runs outdated stages as tasks of the current flow.

    Returns:
      The tasks of the last stages; when they are done, all stages are done.

    Raises:
      GrpoError: If a stage failed, cannot run here or was not reached; stages that do not depend
        on it have run.
    """
    made = create_progress_artifact(0.0, key="progress", description="Stages up to date")
    progress, steps = cast(UUID, made), run.steps.values()
    # Transitive reduction: Prefect's page draws every edge.
    edges = reduce_edges({step.name: set(step.upstream) for step in steps})
    futures: dict[str, PrefectFuture[State]] = {}
    with displayed(run.rows, total=len(run.steps)):
        try:
            for step in steps:
                futures[step.name] = _stage.with_options(task_run_name=step.name).submit(
                    run,
                    step.name,
                    progress,
                    wait_for=[futures[name] for name in sorted(edges[step.name])],
                    return_state=False,
                )
            for future in futures.values():
                future.wait()
        finally:
            run.runner.stop()  # a signal may have interrupted the wait
            sort_lock(run.runner.workspace)
    with suppress(httpx.HTTPError):  # must not hide the error of a stage
        create_table_artifact(run.table(), key="stages", description="State of every stage")
        # Once more: tasks' updates may be reordered.
        update_progress_artifact(progress, progress=run.percent())
    run.require_all()
    return [futures[name] for name in sorted(set(futures).difference(*edges.values()))]


@contextmanager
def begun(workspace: Path) -> Iterator[int]:
    """Locks the workspace for the current flow run; yields the lock that its stages inherit.

    Raises:
      BusyError: If another run, or a stage of a killed run, holds the lock.
    """
    with locked(workspace) as lock:
        _end_lost_run(workspace / LAST_RUN)
        yield lock


def _end_lost_run(note: Path) -> None:
    """Marks the previous run as crashed on the server if it ended without reporting a state.

    This run holds the workspace's lock, so the previous run has ended.
    """
    last = note.read_text() if note.exists() else None
    write_bytes(note, str(runtime.flow_run.id).encode())
    with suppress(ObjectNotFound), get_client(sync_client=True) as client:
        state = client.read_flow_run(UUID(last)).state if last else None
        if state and not state.is_final():
            message = "ended without reporting a state; the next run continued"
            client.set_flow_run_state(UUID(last), Crashed(message=message), force=True)


@task(cache_policy=NO_CACHE, persist_result=False)
def _stage(run: Reproduction, name: str, progress: UUID) -> State:
    result = run.bring_up_to_date(name)
    with suppress(httpx.HTTPError):  # an outage of the server must not stop later stages
        update_progress_artifact(progress, progress=run.percent())
    return Completed(name=str(result.outcome), message=f"{result.seconds:.1f} s")


@task(task_run_name=PUSH, cache_policy=NO_CACHE, persist_result=False)
def _push(workspace: Path, stages: Sequence[str]) -> State:
    pushing = Push(workspace, stages, show=show)
    try:
        return Completed(message=f"{pushing.run():.1f} s")
    finally:
        pushing.stop()  # a signal may have interrupted the wait


def headline(metrics: str) -> dict[str, str]:
    """Returns the main numbers of a report's JSON by name, e.g. "plain cost": "1.03 TFLOP"."""
    report, shown = json.loads(metrics), dict[str, str]()
    for arm, found in {"base": report.get("base", {}), **report.get("arms", {})}.items():
        for name, words in SCORES.items():
            if name in found:
                shown[f"{arm} {words.format(k=report.get('k', 'k'))}"] = _interval(found[name])
        if "cost" in found:
            shown[f"{arm} cost"] = format_flops(found["cost"]["flops"])
    return shown


def _interval(found: Mapping[str, float]) -> str:
    """Returns a number and its interval, if there is one."""
    value = f"{found['value']:.3f}"
    return f"{value} [{found['low']:.3f}, {found['high']:.3f}]" if "low" in found else value


def _report(workspace: Path) -> str:
    """Returns the report's main figure, headline metrics and links, as Markdown."""
    numbers = headline((workspace / METRICS).read_text())
    lines = [*_figure(workspace / PAGE), markdown_table(["number", "value"], numbers.items())]
    lines += ["", *(f"[{name}]({address})  " for name, address in _addresses(workspace).items())]
    return "\n".join([*lines, "", f"Page: {(workspace / PAGE).resolve()}"])


def _figure(page: Path) -> list[str]:
    """Returns the first figure of a page as Markdown with a self-contained data URL."""
    found = page.exists() and re.search(r"(<svg[^>]*>)(.*?</svg>)", page.read_text(), re.DOTALL)
    if not found:
        return []
    paper = '<rect width="100%" height="100%" fill="#fff"/>'  # Prefect's background is dark
    image = base64.b64encode(f"{found[1]}{paper}{found[2]}".encode()).decode()
    return [f"![Reward by compute](data:image/svg+xml;base64,{image})", ""]


def _addresses(workspace: Path) -> Mapping[str, str]:
    """Returns the links to this pipeline state on MLflow's server, if there is a server."""
    if not os.environ.get("MLFLOW_TRACKING_URI", "").startswith("http"):
        return {}
    # Imported here: it takes two seconds, and most runs have no server.
    from grpo.lineage.record import addresses

    return addresses(workspace)


def show(name: str, line: str) -> None:
    """Prints a stage's line on the console and writes it to the task's log."""
    get_run_logger().info(line)
    announce(name, line)
