"""Writes dvc.lock to MLflow: a run per executed stage under a run per state of the pipeline."""

import fcntl
import hashlib
import json
import os
import re
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, Run
from mlflow.exceptions import MlflowException
from sqlalchemy.exc import SQLAlchemyError

from grpo.errors import ArtifactError, brief
from grpo.lineage.lock import (
    PIPELINE,
    Artifact,
    Lock,
    StageEntry,
    file_digest,
    is_read_as_written,
    outs_behind,
    read_lock,
)
from grpo.lineage.measures import Measure, ended_at_ms, measures
from grpo.lineage.revision import Revision, revisions

EXPERIMENT = "grpo"
FINISHED = "FINISHED"
CONTEXT = "mlflow.data.context"  # the tag that says how a run used a dataset
OWN_STAGE = "lineage"  # the stage that calls this; its entry is written after it ran
METRICS_PER_CALL = 900  # MLflow takes 1000 entities at once
PARAMS_PER_CALL = 100
DESCRIPTION_CHARACTERS = 7500
PAGE = "index.html"  # beside what the report wrote; not tracked, for it shows seconds
VIEW = "?workflowType=machine_learning"  # without it MLflow shows what chats have

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What `record` left in MLflow."""

    parent: str  # run id
    runs: Mapping[str, str]  # run id by stage
    new: tuple[str, ...]  # stages that had no run before


@dataclass(frozen=True, kw_only=True, order=True)
class User:
    """A run that wrote (`out`) or read (`dep`) an artifact: a stage's, or a promotion's."""

    role: str
    stage: str
    run: str


def tracking_uri(workspace: Path) -> str:
    """Returns MLFLOW_TRACKING_URI if set, else WORKSPACE/mlflow.db as an absolute address.

    MLflow's own default depends on the working directory.
    """
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{workspace.resolve()}/mlflow.db"


def record(workspace: Path = Path()) -> Recorded:
    """Makes MLflow hold what dvc.lock holds; a second call changes nothing.

    A stage's run is found by the hash of its entry in dvc.lock, so a stage that did not change
    keeps its run, and one that ran again gets a new one. Every distinct state of dvc.lock has a
    parent run; it owns the runs of the stages that this state is the first to hold, and its
    description links the others. A run left half-written by a killed process is written anew.

    Raises:
      ArtifactError: If dvc.lock cannot be read or MLflow cannot be written.
    """
    lock = _recorded_part(read_lock(workspace))
    uri = tracking_uri(workspace)
    try:
        with _alone(workspace, uri):
            _check_writable(uri)
            return _Recorder(workspace, lock, uri).write()
    except (MlflowException, SQLAlchemyError, sqlite3.Error, OSError) as error:
        raise ArtifactError(
            f"{uri}: cannot record the lineage, {brief(error)}; dvc.lock is complete, "
            "repair it and run python -m grpo lineage"
        ) from None


def open_store(workspace: Path) -> MlflowClient:
    """Returns a client of a store whose tables exist."""
    uri = tracking_uri(workspace)
    with _alone(workspace, uri):
        client = MlflowClient(tracking_uri=uri)
        _experiment(client, workspace)
        return client


def find_users(digest: str, workspace: Path = Path()) -> list[User]:
    """Returns the runs that wrote or read this content, in any state that was recorded."""
    client = MlflowClient(tracking_uri=tracking_uri(workspace))
    runs = client.search_runs([_experiment(client, workspace)], f"dataset.digest = '{digest}'")
    return sorted(
        User(stage=run.info.run_name, role=tag.value, run=run.info.run_id)
        for run in runs
        for given in (run.inputs.dataset_inputs if run.inputs else ())
        for tag in given.tags
        if given.dataset.digest == digest and tag.key == CONTEXT
    )


def addresses(workspace: Path = Path()) -> dict[str, str]:
    """Returns where MLflow's server shows this state of the pipeline and its page, by name.

    Empty if it has not been recorded, or the server's address holds a password or is out of reach.
    """
    uri = tracking_uri(workspace)
    if not uri.startswith("http") or "@" in uri:
        return {}
    try:
        recorder = _Recorder(workspace, _recorded_part(read_lock(workspace)), uri)
        found = recorder.find_parent()
        if found is None:
            return {}
        run = f"{uri}/#/experiments/{recorder.experiment}/runs/{found.info.run_id}"
        files = [each.path for each in recorder.client.list_artifacts(found.info.run_id)]
    except (MlflowException, ArtifactError):
        return {}
    report = {"Report": f"{run}/artifacts/{PAGE}{VIEW}"} if PAGE in files else {}
    return {**report, "Lineage in MLflow": f"{run}{VIEW}"}


class _Recorder:
    """The state of one call of `record`."""

    def __init__(self, workspace: Path, lock: Lock, uri: str) -> None:
        self.workspace = workspace
        self.lock = lock
        self.client = MlflowClient(tracking_uri=uri)
        self.experiment = _experiment(self.client, workspace)

    def write(self) -> Recorded:
        runs = {
            name: run.info.run_id
            for name, each in self.lock.items()
            if (run := self._find_stage(each))
        }
        parent = self.find_parent()
        if parent and parent.info.status == FINISHED and len(runs) == len(self.lock):
            return Recorded(parent=parent.info.run_id, runs=runs, new=())
        made = revisions(self.workspace, self.lock)
        run_id = parent.info.run_id if parent else self._start_parent(made)
        new = tuple(name for name in self.lock if name not in runs)
        for name in new:
            runs[name] = self._write_stage(self.lock[name], made[name], run_id)
        self._describe(run_id, runs)
        if page := self._page():
            self.client.log_artifact(run_id, str(page))
        self.client.set_terminated(run_id)
        return Recorded(parent=run_id, runs=runs, new=new)

    @property
    def state(self) -> str:
        """Returns a hash of what dvc.lock says of all stages."""
        fingerprints = [f"{name} {each.fingerprint}" for name, each in sorted(self.lock.items())]
        return hashlib.sha256("\n".join(fingerprints).encode()).hexdigest()

    def find_parent(self) -> Run | None:
        """Returns the run of this state of the pipeline."""
        return next(iter(self._search("pipeline_state", self.state)), None)

    def _page(self) -> Path | None:
        """Returns the page beside an out that is still what dvc.lock says."""
        for out in (each for entry in self.lock.values() for each in entry.outs):
            path = self.workspace / out.path
            page = path.with_name(PAGE)
            if page.is_file() and path.is_file() and file_digest(path) == out.digest:
                return page
        return None

    def _find_stage(self, entry: StageEntry) -> Run | None:
        """Returns the entry's finished run; deletes what a killed process left."""
        found = self._search("lock_entry", entry.fingerprint)
        for run in found:
            if run.info.status != FINISHED:
                self.client.delete_run(run.info.run_id)
        return next((run for run in found if run.info.status == FINISHED), None)

    def _search(self, tag: str, value: str) -> list[Run]:
        return list(self.client.search_runs([self.experiment], f"tags.{tag} = '{value}'"))

    def _start_parent(self, made: Mapping[str, Revision]) -> str:
        tags = {"pipeline_state": self.state, "workspace": str(self.workspace.resolve())}
        newest = [each for each in made.values() if each.is_modified] or list(made.values())
        if newest:
            tags |= _revision_tags(newest[-1])
        run = self.client.create_run(
            self.experiment, run_name=f"pipeline {self.state[:8]}", tags=tags
        )
        return str(run.info.run_id)

    def _write_stage(self, entry: StageEntry, revision: Revision, parent: str) -> str:
        found = measures(self.workspace, entry)
        ended = ended_at_ms(self.workspace, entry) or int(time.time() * 1000)
        seconds = next((each.value for each in found if each.name == "usage.seconds"), 0.0)
        tags = {
            "stage": entry.name,
            "lock_entry": entry.fingerprint,
            "command": entry.command,
            "mlflow.parentRunId": parent,
            "mlflow.source.name": PIPELINE,
            **_revision_tags(revision),
        }
        run = self.client.create_run(
            self.experiment,
            run_name=entry.name,
            tags=tags,
            start_time=ended - int(seconds * 1000),
        )
        run_id = str(run.info.run_id)
        self._log_numbers(run_id, found, ended)
        for params in _parts(sorted(entry.params.items()), PARAMS_PER_CALL):
            self.client.log_batch(run_id, params=[Param(_key(k), _text(v)) for k, v in params])
        self.client.log_inputs(run_id, datasets=list(self._datasets(entry)))
        self.client.set_terminated(run_id, end_time=ended)
        return run_id

    def _log_numbers(self, run_id: str, found: list[Measure], timestamp: int) -> None:
        for part in _parts(found, METRICS_PER_CALL):
            metrics = [Metric(_key(each.name), each.value, timestamp, each.update) for each in part]
            self.client.log_batch(run_id, metrics=metrics)

    def _datasets(self, entry: StageEntry) -> Iterator[DatasetInput]:
        """Yields what the stage read (`dep`) and wrote (`out`).

        A directory that holds several outs is followed by those outs, so that a search for
        one of them finds this consumer too.
        """
        read = {dep.path: dep for dep in entry.deps}
        for dep in entry.deps:
            outs = [out for _, out in outs_behind(self.lock, dep.path) if out.path != dep.path]
            if outs and is_read_as_written(self.workspace, dep, outs):
                read |= {out.path: out for out in outs}
        written = {out.path: out for out in entry.outs}
        for context, artifacts in (("dep", read), ("out", written)):
            for each in artifacts.values():
                yield dataset(each, context)

    def _describe(self, parent: str, runs: Mapping[str, str]) -> None:
        """Writes the parent's description: every stage of this state and its run."""
        rows = ["| stage | run |", "|---|---|"]
        for name, run_id in runs.items():
            row = f"| {name} | [{run_id}](#/experiments/{self.experiment}/runs/{run_id}) |"
            if sum(map(len, rows)) + len(row) > DESCRIPTION_CHARACTERS:
                rows.append(f"| and {len(runs) - len(rows) + 2} more | |")
                break
            rows.append(row)
        self.client.set_tag(parent, "mlflow.note.content", "\n".join(rows))


def _experiment(client: MlflowClient, workspace: Path) -> str:
    """Returns the experiment's id; makes it with artifacts beside the database."""
    found = client.get_experiment_by_name(EXPERIMENT)
    if found:
        return str(found.experiment_id)
    if os.environ.get("MLFLOW_TRACKING_URI"):
        return str(client.create_experiment(EXPERIMENT))
    place = (workspace.resolve() / "mlartifacts").as_uri()
    return str(client.create_experiment(EXPERIMENT, artifact_location=place))


def _recorded_part(lock: Lock) -> Lock:
    return {name: each for name, each in lock.items() if name != OWN_STAGE}


def dataset(artifact: Artifact, context: str) -> DatasetInput:
    source = json.dumps({"path": artifact.path, "md5": artifact.digest})
    dataset = Dataset(artifact.path[-500:], artifact.digest, "dvc", source)
    return DatasetInput(dataset, [InputTag(CONTEXT, context)])


def _revision_tags(revision: Revision) -> dict[str, str]:
    return {
        "git_revision": revision.commit,
        "git_modified": str(revision.is_modified).lower(),
        "mlflow.source.git.commit": revision.commit,
    }


def _key(name: str) -> str:
    """Returns `name` with each character that MLflow refuses written as :hex:."""
    return re.sub(r"[^\w.\- ]", lambda found: f":{ord(found.group()):x}:", name)[-250:]


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _parts(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    waiting = iter(items)
    while part := list(islice(waiting, size)):
        yield part


def _check_writable(uri: str) -> None:
    """Raises at once where MLflow would try for minutes."""
    if uri.startswith("sqlite:///"):
        with closing(sqlite3.connect(uri.removeprefix("sqlite:///"))) as database:
            database.execute("BEGIN IMMEDIATE")


@contextmanager
def _alone(workspace: Path, uri: str) -> Iterator[None]:
    """Waits until no other process of this machine writes to the same store.

    Two first users of a new database would both create its tables, and one would fail.
    """
    path = workspace / ".work" / "mlflow.lock"  # not a stage's: one of them calls this
    if uri.startswith("sqlite:///"):
        path = Path(uri.removeprefix("sqlite:///") + ".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
