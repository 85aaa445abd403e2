"""The execution plan: the stages of dvc.yaml and which of them changed, from DVC's API."""

import json
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import networkx as nx
from dvc.exceptions import DvcException, NotDvcRepoError
from dvc.lock import make_lock
from dvc.repo import Repo
from dvc.rwlock import RWLOCK_FILE, RWLOCK_LOCK
from dvc.scm import SCMError
from dvc.stage import Stage

from grpo.errors import ParameterError
from grpo.lineage.lock import LOCK, PIPELINE
from grpo.params.parameters import read_params
from grpo.params.recipes import read_content
from grpo.runtime.artifacts.files import require_plain
from grpo.schema import PARAMS

CHECK = "stages.check"  # the module that reads params.yaml before all others


@dataclass(frozen=True, kw_only=True)
class Hints:
    """`meta.exec` of a stage in dvc.yaml."""

    gpu: int = 0
    retries: int = 0
    timeout_s: float | None = None  # of one attempt


@dataclass(frozen=True, kw_only=True)
class Step:
    """A stage, the stages it reads from, and whether DVC would run it now."""

    name: str
    upstream: tuple[str, ...]
    hints: Hints
    is_changed: bool
    module: str | None = None  # of `python -m MODULE`, if its command is that


def plan(
    targets: Sequence[str] = (), *, changed: Callable[[Repo], Container[str]] = Repo.status
) -> tuple[Step, ...]:
    """Returns the stages that `targets` (default: all) depend on, in topological order.

    The working directory must be the pipeline's: DVC resolves names and targets relative to it.
    A target is a stage, a group of a foreach, or an output. An unchanged stage may still have to
    run: its inputs can change when an upstream stage runs.

    Args:
      changed: Returns the names of changed stages; by default DVC's status of the local data.

    Raises:
      ParameterError: If dvc.yaml or params.yaml is wrong, or a target is unknown. Values in
        params.yaml are checked only if the stage `check` has to run.
    """
    require_pipeline()
    remove_truncated_rwlock(Path(".dvc/tmp"))
    try:
        with Repo(".", _wait_for_lock=True) as repo:
            graph = repo.index.graph  # an edge leads from a stage to one it reads from
            wanted = _wanted(repo, graph, targets)
            names = changed(repo)
    except (NotDvcRepoError, SCMError) as error:
        advice = "run git init and dvc init in the repository's root, or clone it again"
        raise ParameterError(f"dvc.yaml: {explain(error)}; {advice}") from None
    except DvcException as error:
        raise ParameterError(f"dvc.yaml: {explain(error)}") from None
    order = nx.lexicographical_topological_sort(graph.reverse(), key=_line_of(graph))
    found = tuple(_step(graph, stage, names) for stage in order if stage in wanted)
    if not found:
        raise ParameterError("dvc.yaml: has no stages")
    if any(step.is_changed and step.module == CHECK for step in found):
        read_params()  # that stage would raise the same, after what a run starts first
    return found


def require_pipeline() -> None:
    """Raises ParameterError unless dvc.yaml is in the working directory and DVC can read it.

    Rejects cyclic YAML aliases in dvc.yaml and params.yaml, which make DVC overflow the stack.
    """
    if not Path(PIPELINE).is_file():
        raise ParameterError(
            f"{Path.cwd()}: must be the directory of {PIPELINE}; change to the repository's root"
        )
    for path in (Path(PIPELINE), PARAMS):  # read_content says what to do if one is missing
        read_content(path)
    require_plain(Path(LOCK))


def remove_truncated_rwlock(directory: Path) -> None:
    """Removes DVC's read-write lock file if a kill has truncated it.

    DVC writes the file in place and rejects a truncated one. Removing it is safe: the entries of
    dead processes have no effect.

    Args:
      directory: DVC's directory of lock files.
    """
    path = directory / RWLOCK_FILE
    if not path.exists():
        return
    with make_lock(str(directory / RWLOCK_LOCK), tmp_dir=str(directory), wait=True):
        try:
            json.loads(path.read_bytes())
        except ValueError:
            path.unlink()


def _wanted(repo: Repo, graph: "nx.DiGraph[Stage]", targets: Sequence[str]) -> set[Stage]:
    chosen = [each.stage for target in targets for each in repo.stage.collect_granular(target)]
    if not targets:
        return set(graph)
    return set(chosen).union(*(nx.descendants(graph, stage) for stage in chosen))


def _step(graph: "nx.DiGraph[Stage]", stage: Stage, changed: Container[str]) -> Step:
    return Step(
        name=stage.addressing,
        upstream=tuple(sorted(each.addressing for each in graph.successors(stage))),
        hints=hints_of(stage),
        is_changed=stage.addressing in changed,
        module=_module_of(stage.cmd),
    )


def _module_of(command: Any) -> str | None:
    match command.split() if isinstance(command, str) else ():
        case ["python", "-m", module, *_]:
            return str(module)
    return None


def due_modules(steps: Sequence[Step]) -> list[str]:
    """Returns the modules of stages that may run, in the order in which they are needed."""
    due: set[str] = set()
    for step in steps:
        if step.is_changed or not due.isdisjoint(step.upstream):
            due.add(step.name)
    modules = [step.module for step in steps if step.name in due and step.module]
    return list(dict.fromkeys(modules))


def hints_of(stage: Stage) -> Hints:
    """Returns the validated `meta.exec` of a stage."""
    given = (stage.meta or {}).get("exec", {})
    known = {field.name for field in fields(Hints)}
    for name, value in given.items():
        where = f"dvc.yaml: {stage.addressing}.meta.exec.{name}"
        if name not in known:
            raise ParameterError(f"{where} must be one of {', '.join(sorted(known))}")
        if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
            raise ParameterError(f"{where} must be a number >= 0, got {value!r}")
    return Hints(**given)


def _line_of(graph: "nx.DiGraph[Stage]") -> Any:
    """Returns a sort key that keeps the order of the stages in dvc.yaml."""
    lines = {stage: f"{line:06}" for line, stage in enumerate(graph)}
    return lambda stage: lines[stage]


def explain(error: BaseException) -> str:
    """Returns an error's chain of causes, up to three, in one line."""
    parts: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(parts) < 3:
        parts.append(" ".join(str(cause).split()))
        cause = cause.__cause__
    return ": ".join(part for part in parts if part)
