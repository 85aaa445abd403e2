"""What ran, by dvc.lock: a page's parameters are these, and not what params.yaml says by now."""

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
from grpo.params.parameters import BASE, Parameters, read_content, read_params, with_tuples
from grpo.report.seconds import stages_of
from grpo.runtime.artifacts.marks import (
    ARTIFACTS,
    PAGE,
    Banner,
    State,
    banners_of,
    changed_inputs,
    older,
    read_marks,
)
from grpo.schema import PARAMS

REPORT = "report"
ABSENT = "absent"  # what is said in place of a value
MOST_NAMED = 4  # parameters or stages, in a banner
Content = dict[str, Any]  # of a parameter file


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What a page or a summary is made from."""

    params: Parameters  # of the rounds that ran
    banners: list[Banner]  # in what that differs from params.yaml and the pipeline now
    stamps: list[Banner]  # of stages that failed or were killed, as marks stamp them on the page
    overcome: list[str]  # stages whose marks a page that is drawn now makes untrue


@dataclass
class _Now:
    """params.yaml beside what each stage ran with."""

    content: Content
    users: dict[str, dict[str, list[str]]] = field(default_factory=dict)  # by path and value
    changed: set[str] = field(default_factory=set)  # stages that would run with something else

    def compare(self, entry: StageEntry) -> None:
        for path, value in entry.values.items():
            now, ran = flatten(_at(self.content, path), path), flatten(value, path)
            for leaf in (*ran, *(now.keys() - ran.keys())):
                if not _is_same(now.get(leaf, ABSENT), ran.get(leaf, ABSENT)):
                    said = _say(ran.get(leaf, ABSENT))
                    self.users.setdefault(leaf, {}).setdefault(said, []).append(entry.name)
                    self.changed.add(entry.name)

    def banner(self) -> Banner | None:
        """Returns what differs, or None."""
        if not self.users:
            return None
        known = flatten(self.content)
        lines = [
            f"{leaf} is {_say(known.get(leaf, ABSENT))} there, but "
            + " and ".join(f"{value} in {_name(stages)}" for value, stages in by_value.items())
            for leaf, by_value in self.users.items()
        ]
        return Banner(
            title=f"{PARAMS} differs from what ran",
            text=f"{_name(lines, '; ')}. Everything here is of what ran; dvc repro runs the rest.",
        )


def find_what_ran(workspace: Path = Path(), *, is_stage: bool = False) -> Ran:
    """Returns the parameters that the stages in dvc.lock ran with, and what has changed since.

    Args:
      is_stage: The caller is the stage `report`, whose own entry is that of an earlier run.

    Raises:
      ParameterError: If params.yaml is wrong.
      ArtifactError: If no round has run, or dvc.lock cannot be read.
    """
    declared = read_params(workspace / PARAMS)
    marks = [each for each in read_marks() if not (is_stage and each.stage == REPORT)]
    overcome = [each.stage for each in marks if each.state is State.FINISHED]
    marks = [each for each in marks if each.state is not State.FINISHED]
    if not (workspace / LOCK).exists():
        stamps = banners_of(marks)
        return Ran(params=declared, banners=[_unknown()], stamps=stamps, overcome=overcome)
    lock = read_lock(workspace)
    now = _Now(read_content(workspace / PARAMS))
    whole = _with_removed(
        now.content, {} if is_stage or REPORT not in lock else lock[REPORT].values
    )
    rounds = dict(_rounds_that_ran(lock, whole["rounds"]))
    if not rounds:
        raise ArtifactError(f"{LOCK}: no round of {PARAMS} has run; run dvc repro")
    ran = {**whole, "rounds": rounds}
    entries = [lock[name] for name in stages_of(_validated(ran)) if name in lock]
    for entry in entries:
        now.compare(entry)
        for path, value in entry.values.items():
            ran = _replaced(ran, path.split("."), value)
    outdated = [each.name for each in entries if _is_outdated(workspace, lock, each)]
    missing = [name for name in now.content["rounds"] if name not in rounds]
    removed = [name for name in rounds if name not in now.content["rounds"]]
    known = {*stages_of(declared), REPORT, "lineage"}
    behind = now.changed | set(outdated)
    overcome += [
        each.stage
        for each in marks
        if each.stage not in known or _is_done(workspace, lock, each.stage, behind)
    ]
    found = [now.banner(), _not_run(missing), _removed(removed), _stale(outdated)]
    return Ran(
        params=_validated(ran),
        banners=[each for each in found if each],
        stamps=banners_of([each for each in marks if each.stage not in overcome]),
        overcome=overcome,
    )


def state_of_page(workspace: Path = Path()) -> Banner | None:
    """Returns the banner of a page whose inputs are not what they were when it was drawn."""
    changed = changed_inputs(workspace / PAGE, workspace / ARTIFACTS)
    return older([str(ARTIFACTS / name) for name in changed], "changed") if changed else None


def _with_removed(content: Content, of_report: Mapping[str, Any]) -> Content:
    """Returns a parameter file with the arms and rounds that it had when the report ran."""
    both = {name: {**content[name]} for name in ("arms", "rounds")}
    for name, those in both.items():
        those |= {key: each for key, each in of_report.get(name, {}).items() if key not in those}
    return {**content, **both}


def _rounds_that_ran(lock: Lock, rounds: Content) -> Iterator[tuple[str, Any]]:
    """Yields the rounds that were trained and evaluated, and so were those they start from."""
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
            f"{LOCK}: stages ran with parameters that this code does not take, {reason}; "
            "run dvc repro"
        ) from None


def _is_outdated(workspace: Path, lock: Lock, entry: StageEntry) -> bool:
    """Returns whether a stage read something else than other stages have written since."""
    for dep in entry.deps:
        behind = [out for _, out in outs_behind(lock, dep.path)]
        written = digest_as_written(workspace, dep.path, behind) if behind else None
        if written not in (None, dep.digest):
            return True
    return False


def _is_done(workspace: Path, lock: Lock, stage: str, behind: Collection[str]) -> bool:
    """Returns whether a stage that failed needs not run any more, as dvc.lock has it.

    DVC removes what a stage writes before it runs.
    """
    if stage not in lock or stage in behind or _is_outdated(workspace, lock, lock[stage]):
        return False
    return all((workspace / out.path).exists() for out in lock[stage].outs)


def _at(content: Content, path: str) -> Any:
    """Returns what stands at a dotted path; ABSENT if nothing does."""
    value: Any = content
    for part in path.split("."):
        if not isinstance(value, dict) or part not in value:
            return ABSENT
        value = value[part]
    return value


def _replaced(content: Content, path: Sequence[str], value: Any) -> Content:
    """Returns a copy with `value` at a path."""
    first, *rest = path
    inner = content.get(first)
    if not rest:
        return {**content, first: value}
    return {**content, first: _replaced(inner if isinstance(inner, dict) else {}, rest, value)}


def _is_same(one: object, other: object) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _say(value: object) -> str:
    return str(value) if value == ABSENT else json.dumps(value)


def _name(names: Sequence[str], separator: str = ", ") -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return separator.join(names[:MOST_NAMED]) + more


def _unknown() -> Banner:
    return Banner(
        title="What ran is not known",
        text=f"There is no {LOCK}: the parameters here are those of {PARAMS} now.",
    )


def _not_run(rounds: Sequence[str]) -> Banner | None:
    text = f"{_name(rounds)} of {PARAMS} did not run to the end; dvc repro runs the rest."
    return Banner(title="Rounds are missing", text=text) if rounds else None


def _removed(rounds: Sequence[str]) -> Banner | None:
    text = f"{_name(rounds)} ran, but {PARAMS} no longer names them; dvc repro leaves them out."
    return Banner(title="Rounds were removed", text=text) if rounds else None


def _stale(stages: Sequence[str]) -> Banner | None:
    text = f"What {_name(stages)} read has been made again since; run dvc repro."
    return Banner(title="Results are out of date", text=text) if stages else None
