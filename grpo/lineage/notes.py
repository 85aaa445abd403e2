"""Pending lineage records: a state of dvc.lock as plain data, kept while MLflow is unreachable."""

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
from pydantic import TypeAdapter, ValidationError

from grpo.errors import ArtifactError
from grpo.lineage.lock import (
    PIPELINE,
    Artifact,
    Lock,
    StageEntry,
    file_digest,
    is_read_as_written,
    outs_behind,
)
from grpo.lineage.measures import Measure, ended_at_ms, measures
from grpo.lineage.revision import Revision, revisions
from grpo.runtime.artifacts.files import read_json, write_bytes
from grpo.runtime.artifacts.usage import USAGE

WORKSPACE = "workspace"  # tag
PLANNED = "curriculum@"  # the stages that plan arms, followed by the name of an arm
RESULTS, SAMPLES = "report/metrics.json", ".samples.parquet"
SCORES = ("mean_at_k", "pass_at_k", "greedy", "gain_over_base")
WAITING = USAGE / "lineage"  # pending notes: a numbered file per state
# Next to the outs of the report; not tracked, because they show measured seconds.
PAGE = "index.html"
PAGES = (PAGE, "rollouts.html")


@dataclass(frozen=True, kw_only=True)
class StageNote:
    """Content of a stage's MLflow run."""

    tags: dict[str, str]
    params: dict[str, str]
    measures: tuple[Measure, ...]
    read: tuple[Artifact, ...]
    written: tuple[Artifact, ...]
    started_ms: int
    ended_ms: int


@dataclass(frozen=True, kw_only=True)
class Note:
    """Content of the MLflow runs for one state of dvc.lock."""

    state: str  # see `state_of`
    tags: dict[str, str]
    stages: dict[str, StageNote]
    pages: dict[str, str]  # HTML of the report by file name
    title: str = "pipeline"
    params: dict[str, str] = field(default_factory=dict)  # of all stages
    results: dict[str, float] = field(default_factory=dict)  # headline numbers of the report
    figures: dict[str, str] = field(default_factory=dict)  # SVG by file name
    samples: dict[str, str] = field(default_factory=dict)  # rollouts as JSON lines, by file name


NOTE = TypeAdapter(Note)


def state_of(lock: Lock) -> str:
    """Returns a hash of all entries."""
    fingerprints = [f"{name} {each.fingerprint}" for name, each in sorted(lock.items())]
    return hashlib.sha256("\n".join(fingerprints).encode()).hexdigest()


def take_note(workspace: Path, lock: Lock) -> Note:
    """Returns the note for the current state of the workspace."""
    made = revisions(workspace, lock)
    newest = [each for each in made.values() if each.is_modified] or list(made.values())
    params = {path: value for each in lock.values() for path, value in each.params.items()}
    return Note(
        state=state_of(lock),
        tags={
            "pipeline_state": state_of(lock),
            WORKSPACE: str(workspace.resolve()),
            **(_revision_tags(newest[-1]) if newest else {}),
        },
        stages={name: _note_of(workspace, lock, name, made[name]) for name in lock},
        pages=_pages(workspace, lock),
        title=_title(lock, newest[-1] if newest else None),
        params={path: _text(value) for path, value in sorted(params.items())},
        results=_results(workspace, lock),
        figures=_figures(workspace, lock),
        samples=_samples(workspace, lock),
    )


def keep_note(workspace: Path, note: Note) -> None:
    """Stores a pending note unless one for the same state exists."""
    there = waiting(workspace)
    if not any(path.stem.endswith(note.state) for path in there):
        number = int(there[-1].name.partition("-")[0]) + 1 if there else 1
        path = workspace / WAITING / f"{number:08d}-{note.state}.json"
        write_bytes(path, NOTE.dump_json(note))


def waiting(workspace: Path) -> list[Path]:
    """Returns the files of pending notes, oldest first."""
    return sorted((workspace / WAITING).glob("*.json"))


def read_note(path: Path) -> Note:
    """Reads a pending note.

    Raises:
      ArtifactError: If the file is not a note.
    """
    try:
        return NOTE.validate_json(path.read_bytes())
    except ValidationError as error:
        reason = " ".join(str(error.errors()[0]["msg"]).split())
        raise ArtifactError(f"{path}: must be a note of lineage, {reason}; delete it") from None


def _note_of(workspace: Path, lock: Lock, name: str, revision: Revision) -> StageNote:
    entry = lock[name]
    found = measures(workspace, entry)
    ended = ended_at_ms(workspace, entry) or int(time.time() * 1000)
    seconds = next((each.value for each in found if each.name == "usage.seconds"), 0.0)
    return StageNote(
        tags={
            "stage": entry.name,
            "lock_entry": entry.fingerprint,
            "command": entry.command,
            "mlflow.source.name": PIPELINE,
            **_revision_tags(revision),
        },
        params={path: _text(value) for path, value in sorted(entry.params.items())},
        measures=tuple(found),
        read=_read_by(workspace, lock, entry),
        written=entry.outs,
        started_ms=ended - int(seconds * 1000),
        ended_ms=ended,
    )


def _read_by(workspace: Path, lock: Lock, entry: StageEntry) -> tuple[Artifact, ...]:
    """Returns the artifacts that a stage read.

    For a directory that contains several outs, the outs are added, so that a search for one of
    them finds this consumer, too.
    """
    read = {dep.path: dep for dep in entry.deps}
    for dep in entry.deps:
        outs = [out for _, out in outs_behind(lock, dep.path) if out.path != dep.path]
        if outs and is_read_as_written(workspace, dep, outs):
            read |= {out.path: out for out in outs}
    return tuple(read.values())


def _title(lock: Lock, revision: Revision | None) -> str:
    """Returns the name of a state's run, e.g. "reasoning_gym: plain, sgpo (e1c16f3, dirty)"."""
    arms = [each.removeprefix(PLANNED) for each in lock if each.startswith(PLANNED)]
    task = lock["prepare"].params.get("task.kind") if "prepare" in lock else None
    what = ": ".join(filter(None, [task, ", ".join(arms)])) or "pipeline"
    if revision is None:
        return what
    dirty = ", dirty" if revision.is_modified else ""
    return f"{what} ({revision.commit[:7]}{dirty})"


def _results(workspace: Path, lock: Lock) -> dict[str, float]:
    """Returns the headline numbers of the report, e.g. "plain/mean_at_k"."""
    report = next(_outs(workspace, lock, RESULTS), None)
    arms = {} if report is None else read_json(report).get("arms", {})
    numbers: dict[str, float | None] = {}
    for arm, found in arms.items():
        for score in SCORES:
            numbers[f"{arm}/{score}"] = found.get(score, {}).get("value")
        numbers[f"{arm}/flops"] = found.get("cost", {}).get("flops")
    return {name: float(each) for name, each in numbers.items() if each is not None}


def _figures(workspace: Path, lock: Lock) -> dict[str, str]:
    """Returns the drawings among the outs, by file name."""
    found = _outs(workspace, lock, ".svg")
    return {each.name: each.read_text(encoding="utf-8") for each in found}


def _samples(workspace: Path, lock: Lock) -> dict[str, str]:
    """Returns the stored rollouts of every evaluated policy, by file name."""
    return {
        f"{each.name.removesuffix(SAMPLES)}.jsonl": pd.read_parquet(each).to_json(
            orient="records", lines=True
        )
        for each in _outs(workspace, lock, SAMPLES)
    }


def _outs(workspace: Path, lock: Lock, ending: str) -> Iterator[Path]:
    """Yields the files of outs whose path has an ending and whose content matches dvc.lock."""
    for out in (each for entry in lock.values() for each in entry.outs):
        path = workspace / out.path
        if out.path.endswith(ending) and path.is_file() and file_digest(path) == out.digest:
            yield path


def _pages(workspace: Path, lock: Lock) -> dict[str, str]:
    """Returns the pages next to an out whose content matches dvc.lock, by file name."""
    for out in (each for entry in lock.values() for each in entry.outs):
        path = workspace / out.path
        pages = [path.with_name(each) for each in PAGES if path.with_name(each).is_file()]
        if pages and path.is_file() and file_digest(path) == out.digest:
            return {each.name: each.read_text() for each in pages}
    return {}


def _revision_tags(revision: Revision) -> dict[str, str]:
    return {
        "git_revision": revision.commit,
        "git_modified": str(revision.is_modified).lower(),
        "mlflow.source.git.commit": revision.commit,
    }


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
