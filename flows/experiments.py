"""Sweeps as a Prefect flow: a task per DVC experiment, then a table of the results.

Import it after `flows.settings.prepare_environment`; `python -m flows.sweep` does.
"""

import itertools
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import dvc.api
from dvc.repo import Repo
from prefect import State, flow, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.states import Completed
from prefect.task_runners import ThreadPoolTaskRunner

from flows.pipeline import METRICS, headline, show
from flows.planning import Hints, Step, plan
from flows.runner import Runner, StageError
from grpo.errors import ParameterError
from grpo.lineage.lock import flatten
from grpo.lineage.revision import git
from grpo.params.recipes import read_content
from grpo.runtime.artifacts.files import digest
from grpo.runtime.markdown import markdown_table
from grpo.schema import DATA, PARAMS

Settings = Mapping[str, str]  # value by parameter path
CODE = ("grpo", "plugins", "stages")


def combinations(workspace: Path, given: Sequence[str]) -> dict[str, Settings]:
    """Returns all combinations of "PATH=VALUE,VALUE" settings by experiment name.

    The name is a hash of the settings and of the tracked files, so that a finished experiment is
    not run again.

    Raises:
      ParameterError: If a path is not in params.yaml, is given twice or has no value, or if a file
        that stages may read is not tracked.
    """
    known = flatten(read_content(workspace / PARAMS))
    values: dict[str, list[str]] = {}
    for each in given:
        path, _, text = each.partition("=")
        if path not in known or path in values or not text:
            raise ParameterError(
                f"--set {each}: must be PATH=VALUE,VALUE for a leaf of {PARAMS}, given once"
            )
        values[path] = text.split(",")
    found = [dict(zip(values, each)) for each in itertools.product(*values.values())]
    start = [git(workspace, "rev-parse", "HEAD"), git(workspace, "diff", "HEAD")]
    if not start[0]:
        raise ParameterError(
            f"{workspace}: must be a git repository with a commit, from which experiments start; "
            "run git add -A && git commit"
        )
    if unseen := _unseen(workspace):
        path, command = unseen
        raise ParameterError(
            f"{path}: is not tracked, so that no experiment sees it; "
            f"run {command} {shlex.quote(path)}"
        )
    return {f"sweep-{digest([], [each, start])[:10]}": each for each in found}


def _unseen(workspace: Path) -> tuple[str, str] | None:
    """Returns a path that stages may read and experiments do not see, and what tracks it."""
    others = ("ls-files", "-z", "--others")
    records = (f"{DATA}/*.dvc", f"{DATA}/.gitignore")
    code = git(workspace, *others, "--exclude-standard", "--", *CODE, *records)
    if code:
        return code.split("\0")[0], "git add"
    # Git also ignores weights and tables below data/.
    for name in filter(None, git(workspace, *others, "--", str(DATA)).split("\0")):
        top = Path(*Path(name).parts[:2])
        is_record = top.suffix == ".dvc" or top.name == ".gitignore"
        if not is_record and not (workspace / f"{top}.dvc").exists():
            return str(top), "dvc add"
    return None


@flow(
    name="sweep",
    task_runner=ThreadPoolTaskRunner(max_workers=64),  # type: ignore[arg-type]
    persist_result=False,
    validate_parameters=False,
)
def sweep(given: Sequence[str], at_once: int = 1) -> str:
    """Runs the experiments that are not finished; returns a table of all, as Markdown.

    Args:
      given: "PATH=VALUE,VALUE" per parameter; every combination is one experiment.
      at_once: Maximum number of parallel experiments.

    Raises:
      ParameterError: If a parameter is given twice, or a setting does not have this form.
      StageError: If an experiment failed; the others have run.
    """
    wanted = combinations(Path.cwd(), given)
    runner = _Experiments(Path.cwd(), wanted, at_once=at_once)
    gpus = max(step.hints.gpu for step in plan())
    futures = {
        name: _experiment.with_options(task_run_name=name).submit(runner, name, gpus)
        for name in wanted
    }
    try:
        for future in futures.values():
            future.wait()
    finally:
        runner.stop()  # a signal may have interrupted the wait
    rows = compare(wanted)
    create_table_artifact(rows, key="sweep", description="Results by experiment")
    if runner.failures:
        first, *others = runner.failures
        for each in others:
            print(each, file=sys.stderr)
        raise first
    return _as_markdown(rows)


@task(cache_policy=NO_CACHE, persist_result=False)
def _experiment(runner: "_Experiments", name: str, gpus: int) -> State:
    if name in finished():
        return Completed(name="Unchanged")
    step = Step(name=name, upstream=(), hints=Hints(gpu=gpus), is_changed=True)
    try:
        seconds = runner.run_stage(step).seconds
    except StageError as error:
        runner.failures.append(error)
        raise
    return Completed(message=f"{seconds:.1f} s")


class _Experiments(Runner):
    """Runs a DVC experiment per step."""

    def __init__(self, workspace: Path, wanted: Mapping[str, Settings], *, at_once: int) -> None:
        super().__init__(workspace, at_once=at_once, show=show)
        self.wanted = wanted
        self.failures: list[StageError] = []

    def command(self, step: Step) -> list[str]:
        settings = [f"--set-param={path}={value}" for path, value in self.wanted[step.name].items()]
        run = ["--wait-for-lock", "exp", "run", "--temp", "--name", step.name]
        return [sys.executable, "-m", "dvc", *run, *settings]

    def is_recorded(self, step: Step) -> bool:
        return step.name in finished()


def finished() -> list[str]:
    """Returns the names of the finished experiments that start from this commit."""
    with Repo(".") as repo:
        by_commit = repo.experiments.ls()
    return [each[0] for those in by_commit.values() for each in those]


def compare(wanted: Mapping[str, Settings]) -> list[dict[str, str]]:
    """Returns a row per finished experiment: its settings and the report's headline metrics."""
    done = finished()
    return [
        {"experiment": name, **settings, **headline(dvc.api.read(METRICS, rev=name))}
        for name, settings in wanted.items()
        if name in done
    ]


def _as_markdown(rows: list[dict[str, str]]) -> str:
    titles = list(dict.fromkeys(title for row in rows for title in row))
    return markdown_table(titles, ([row.get(title, "") for title in titles] for row in rows))
