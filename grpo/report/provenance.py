"""Parameters of the completed run from dvc.lock, and how params.yaml has changed since."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from grpo.errors import ArtifactError
from grpo.lineage.lock import (
    LOCK,
    Lock,
    StageEntry,
    digest_as_written,
    flatten,
    outs_behind,
    read_lock,
)
from grpo.params.parameters import BASE, Parameters, read_params, with_tuples
from grpo.params.recipes import read_content
from grpo.params.yaml import value_at
from grpo.report.seconds import stages_of
from grpo.runtime.artifacts.marks import (
    ARTIFACTS,
    PAGE,
    Banner,
    banners_of,
    changed_inputs,
    older,
    read_marks,
)
from grpo.schema import PARAMS

REPORT = "report"
ABSENT = "absent"  # shown for a parameter without a value
MOST_NAMED = 4  # parameters or stages that a banner lists
Content = dict[str, Any]  # parsed content of a parameter file


@dataclass(frozen=True, kw_only=True)
class CompletedRun:
    """Parameters and warnings from which a page or a summary is made."""

    params: Parameters  # of the rounds that ran
    banners: list[Banner]  # differences from the current params.yaml and pipeline
    stamps: list[Banner]  # of stages that failed or were killed
    outdated_marks: list[str]  # stages whose marks no longer hold once the page is redrawn


@dataclass
class _ParameterDiff:
    """Differences between params.yaml and the parameters that stages ran with."""

    content: Content
    stages: dict[str, dict[str, list[str]]] = field(default_factory=dict)  # by path and value
    changed: set[str] = field(default_factory=set)  # stages whose parameters differ

    def compare(self, entry: StageEntry) -> None:
        for path, value in entry.values.items():
            now, ran = flatten(value_at(self.content, path, ABSENT), path), flatten(value, path)
            for leaf in (*ran, *(now.keys() - ran.keys())):
                if not _is_same(now.get(leaf, ABSENT), ran.get(leaf, ABSENT)):
                    text = _format_value(ran.get(leaf, ABSENT))
                    self.stages.setdefault(leaf, {}).setdefault(text, []).append(entry.name)
                    self.changed.add(entry.name)

    def banner(self) -> Banner | None:
        """Returns a banner that lists the differences; None if there are none."""
        if not self.stages:
            return None
        known = flatten(self.content)
        lines = [
            f"{leaf} is {_format_value(known.get(leaf, ABSENT))} there, but "
            + " and ".join(f"{value} in {_name(stages)}" for value, stages in by_value.items())
            for leaf, by_value in self.stages.items()
        ]
        return Banner(
            title=f"{PARAMS} differs from the run",
            text=f"{_name(lines, '; ')}. This page shows the run; dvc repro updates it.",
        )


def find_completed_run(workspace: Path = Path(), *, is_stage: bool = False) -> CompletedRun:
    """Returns the parameters that the stages in dvc.lock ran with, and the changes since.

    Args:
      is_stage: Whether the stage `report` calls; its entry in dvc.lock is from an earlier run.

    Raises:
      ParameterError: If params.yaml is invalid.
      ArtifactError: If no round has run, or dvc.lock is unreadable.
    """
    declared = read_params(workspace / PARAMS)
    marks = [each for each in read_marks() if not (is_stage and each.stage == REPORT)]
    outdated_marks = [each.stage for each in marks if each.state == "finished"]
    marks = [each for each in marks if each.state != "finished"]
    if not (workspace / LOCK).exists():
        stamps = banners_of(marks)
        return CompletedRun(
            params=declared, banners=[_unknown()], stamps=stamps, outdated_marks=outdated_marks
        )
    lock = read_lock(workspace)
    diff = _ParameterDiff(read_content(workspace / PARAMS))
    whole = _with_removed(
        diff.content, {} if is_stage or REPORT not in lock else lock[REPORT].values
    )
    rounds = dict(_rounds_that_ran(lock, whole["rounds"]))
    if not rounds:
        raise ArtifactError(f"{LOCK}: no round of {PARAMS} has run; run dvc repro")
    ran = {**whole, "rounds": rounds}
    entries = [lock[name] for name in stages_of(_validated(ran)) if name in lock]
    for entry in entries:
        diff.compare(entry)
        for path, value in entry.values.items():
            ran = _replaced(ran, path.split("."), value)
    outdated = [each.name for each in entries if _is_outdated(workspace, lock, each)]
    missing = [name for name in diff.content["rounds"] if name not in rounds]
    removed = [name for name in rounds if name not in diff.content["rounds"]]
    known = {*stages_of(declared), REPORT, "lineage"}
    behind = diff.changed | set(outdated)
    outdated_marks += [
        each.stage
        for each in marks
        if each.stage not in known or _is_done(workspace, lock, each.stage, behind)
    ]
    found = [diff.banner(), _not_run(missing), _removed(removed), _stale(outdated)]
    return CompletedRun(
        params=_validated(ran),
        banners=[each for each in found if each],
        stamps=banners_of([each for each in marks if each.stage not in outdated_marks]),
        outdated_marks=outdated_marks,
    )


def state_of_page(workspace: Path = Path()) -> Banner | None:
    """Returns a banner if the inputs of the page have changed since it was written."""
    changed = changed_inputs(workspace / PAGE, workspace / ARTIFACTS)
    return older([str(ARTIFACTS / name) for name in changed], "changed") if changed else None


def _with_removed(content: Content, of_report: Mapping[str, Any]) -> Content:
    """Returns the parameters plus arms and rounds that were removed since the report ran."""
    both = {name: {**content[name]} for name in ("arms", "rounds")}
    for name, those in both.items():
        those |= {key: each for key, each in of_report.get(name, {}).items() if key not in those}
    return {**content, **both}


def _rounds_that_ran(lock: Lock, rounds: Content) -> Iterator[tuple[str, Any]]:
    """Yields the rounds that were trained and evaluated, and whose start was, too."""
    found = {BASE}
    for name, each in rounds.items():
        is_known = each["start"] in found
        if is_known and {f"train@{name}", f"evaluate@{name}"} <= lock.keys():
            found.add(name)
            yield name, each


def _validated(content: Content) -> Parameters:
    try:
        return TypeAdapter(Parameters).validate_python(with_tuples(content))
    except ValidationError as error:
        reason = " ".join(str(error.errors()[0]["loc"]).split())
        raise ArtifactError(
            f"{LOCK}: must hold parameters that this version accepts, got an invalid {reason}; "
            "run dvc repro"
        ) from None


def _is_outdated(workspace: Path, lock: Lock, entry: StageEntry) -> bool:
    """Returns whether other stages have rewritten an input of a stage since it ran."""
    for dep in entry.deps:
        behind = [out for _, out in outs_behind(lock, dep.path)]
        written = digest_as_written(workspace, dep.path, behind) if behind else None
        if written not in (None, dep.digest):
            return True
    return False


def _is_done(workspace: Path, lock: Lock, stage: str, behind: Collection[str]) -> bool:
    """Returns whether a stage that failed is up to date again according to dvc.lock.

    DVC removes the outputs of a stage before the stage runs.
    """
    if stage not in lock or stage in behind or _is_outdated(workspace, lock, lock[stage]):
        return False
    return all((workspace / out.path).exists() for out in lock[stage].outs)


def _replaced(content: Any, path: Sequence[str], value: Any) -> Any:
    """Returns a copy of the content with `value` at a path."""
    if not path:
        return value
    first, *rest = path
    if isinstance(content, list):
        index = int(first)
        inner = content[index] if index < len(content) else {}
        return [*content[:index], _replaced(inner, rest, value), *content[index + 1 :]]
    known = content if isinstance(content, dict) else {}
    return {**known, first: _replaced(known.get(first, {}), rest, value)}


def _is_same(one: object, other: object) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _format_value(value: object) -> str:
    return str(value) if value == ABSENT else json.dumps(value)


def _name(names: Sequence[str], separator: str = ", ") -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return separator.join(names[:MOST_NAMED]) + more


def _unknown() -> Banner:
    return Banner(
        title="Parameters of the run are unknown",
        text=f"There is no {LOCK}, so this page shows the current {PARAMS}.",
    )


def _not_run(rounds: Sequence[str]) -> Banner | None:
    text = f"{_name(rounds)} of {PARAMS} did not finish; run dvc repro."
    return Banner(title="Rounds are missing", text=text) if rounds else None


def _removed(rounds: Sequence[str]) -> Banner | None:
    text = f"{_name(rounds)} ran, but {PARAMS} no longer has them; dvc repro omits them."
    return Banner(title="Rounds were removed", text=text) if rounds else None


def _stale(stages: Sequence[str]) -> Banner | None:
    text = f"Inputs of {_name(stages)} have changed since; run dvc repro."
    return Banner(title="Results are out of date", text=text) if stages else None
