"""Records dvc.lock in MLflow: a parent run per pipeline state, with a child run per stage."""

import json
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import chdir, closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, Run
from mlflow.exceptions import MlflowException
from mlflow.utils.credentials import get_default_host_creds
from mlflow.utils.rest_utils import http_request
from sqlalchemy.exc import SQLAlchemyError

from grpo.errors import ArtifactError, brief
from grpo.lineage.lock import Artifact, Lock, read_lock
from grpo.lineage.measures import SYSTEM
from grpo.lineage.notes import (
    PAGE,
    WAITING,
    WORKSPACE,
    Note,
    StageNote,
    keep_note,
    read_note,
    state_of,
    take_note,
    waiting,
)
from grpo.runtime.artifacts.files import host_lock, locked, remove
from grpo.runtime.curves import (
    ARM,
    EXPERIMENT,
    KEY,
    LOCK,
    METRICS_PER_CALL,
    Point,
    filter_of,
    read_curve,
    run_name,
    send,
)

FINISHED = "FINISHED"
CHANGED = "changed_parameters"  # tag: those that differ from the workspace's last state
CONTEXT = "mlflow.data.context"  # tag for the role of a dataset in a run
TRAINED = "train@"  # the stages that train, followed by the name of a round
OWN_STAGE = "lineage"  # the stage that calls `record`; DVC writes its entry afterwards
PARAMS_PER_CALL = 100
ANSWER_SECONDS = 10.0  # timeout of the health check
DESCRIPTION_CHARACTERS = 7500
VIEW = "?workflowType=machine_learning"  # MLflow's default is its GenAI view

Item = TypeVar("Item")


class PendingError(ArtifactError):
    """MLflow cannot be written now; the state is kept as a pending note in the workspace."""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """The MLflow runs that `record` found or created."""

    parent: str  # run id
    runs: Mapping[str, str]  # run ids by stage
    new: tuple[str, ...]  # stages whose run was created


@dataclass(frozen=True, kw_only=True, order=True)
class User:
    """A run, of a stage or a promotion, that wrote (`out`) or read (`dep`) an artifact."""

    role: str
    stage: str
    run: str


def tracking_uri(workspace: Path) -> str:
    """Returns MLFLOW_TRACKING_URI if set, else WORKSPACE/mlflow.db as an absolute address.

    MLflow's own default depends on the working directory.
    """
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{workspace.resolve()}/mlflow.db"


def record(workspace: Path = Path()) -> Recorded:
    """Records the current dvc.lock in MLflow; idempotent.

    A stage's run is identified by the hash of its entry in dvc.lock: an unchanged stage keeps its
    run, and a stage that ran again gets a new run. Every distinct state of dvc.lock has a parent
    run. It owns the runs of the stages that are new in this state, and its description links the
    others. A run that a killed process left incomplete is deleted and written again.

    Raises:
      PendingError: If MLflow cannot be written; the next call writes this state first.
      ArtifactError: If dvc.lock or a pending note cannot be read. In the latter case this state
        becomes pending, too.
    """
    lock = _recorded_part(read_lock(workspace))
    entries = {name: each.fingerprint for name, each in lock.items()}
    try:
        with _writer(workspace) as writer:
            writer.write_pending()
            recorded = writer.write(state_of(lock), entries, lambda: take_note(workspace, lock))
            writer.write_curves([each for each in entries if each.startswith(TRAINED)], recorded)
            return recorded
    except ArtifactError:
        keep_note(workspace, take_note(workspace, lock))
        raise


def record_pending(workspace: Path) -> None:
    """Writes all pending notes to MLflow.

    Raises:
      PendingError: If MLflow cannot be written; the notes stay pending.
      ArtifactError: If a note cannot be read; the others are written.
    """
    if waiting(workspace):
        with _writer(workspace) as writer:
            writer.write_pending()


def open_store(workspace: Path) -> MlflowClient:
    """Returns a client of the store; creates its tables and the experiment if necessary."""
    uri = tracking_uri(workspace)
    with _alone(uri):
        client = MlflowClient(tracking_uri=uri)
        _experiment(client, workspace)
        return client


def find_users(digest: str, workspace: Path = Path()) -> list[User]:
    """Returns the runs that wrote or read this content, in any recorded state."""
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
    """Returns the URLs of this state and its report page on MLflow's server, by title.

    Empty if the state is not recorded, the server is unreachable or its URL holds a password.
    """
    uri = tracking_uri(workspace)
    if not uri.startswith("http") or "@" in uri:
        return {}
    try:
        writer = _Writer(workspace, MlflowClient(tracking_uri=uri))
        found = writer.find_parent(state_of(_recorded_part(read_lock(workspace))))
        if found is None:
            return {}
        run = f"{uri}/#/experiments/{writer.experiment}/runs/{found.info.run_id}"
        files = [each.path for each in writer.client.list_artifacts(found.info.run_id)]
    except (MlflowException, ArtifactError):
        return {}
    report = {"Report": f"{run}/artifacts/{PAGE}{VIEW}"} if PAGE in files else {}
    return {**report, "Lineage in MLflow": f"{run}{VIEW}"}


class _Writer:
    """Writes states of dvc.lock to an experiment."""

    def __init__(self, workspace: Path, client: MlflowClient) -> None:
        self.workspace = workspace
        self.client = client
        self.experiment = _experiment(client, workspace)

    def write_pending(self) -> None:
        """Writes the pending notes.

        Raises:
          ArtifactError: If a note cannot be read; raised after the others are written.
        """
        damaged: list[ArtifactError] = []
        for path in waiting(self.workspace):
            try:
                note = read_note(path)
            except ArtifactError as error:
                damaged.append(error)
                continue
            self._write_note(note)
            remove(path)
        if damaged:
            raise damaged[0]

    def _write_note(self, note: Note) -> None:
        entries = {name: each.tags["lock_entry"] for name, each in note.stages.items()}
        self.write(note.state, entries, lambda: note)

    def write(self, state: str, entries: Mapping[str, str], take: Callable[[], Note]) -> Recorded:
        """Writes the missing runs of a state.

        Args:
          entries: The fingerprint of each stage's entry.
          take: Returns the note; not called if no run is missing.
        """
        runs = {
            name: run.info.run_id
            for name, fingerprint in entries.items()
            if (run := self._find_stage(fingerprint))
        }
        parent = self.find_parent(state)
        if parent and parent.info.status == FINISHED and len(runs) == len(entries):
            return Recorded(parent=parent.info.run_id, runs=runs, new=())
        note = take()
        run_id = parent.info.run_id if parent else self._start_parent(note)
        new = tuple(name for name in entries if name not in runs)
        for name in new:
            runs[name] = self._write_stage(name, note.stages[name], run_id)
        self._describe(run_id, runs)
        for name, page in note.pages.items():
            self.client.log_text(run_id, page, name)
        for name, drawing in note.figures.items():
            self.client.log_text(run_id, drawing, f"figures/{name}")
        for name, rollouts in note.samples.items():
            self.client.log_text(run_id, rollouts, f"samples/{name}")
        self.client.set_terminated(run_id)
        return Recorded(parent=run_id, runs=runs, new=new)

    def write_curves(self, stages: Iterable[str], recorded: Recorded) -> None:
        """Writes what MLflow has not got of the curves of rounds, and ends the runs of their arms.

        Args:
          stages: Names of the stages that trained the rounds.
        """
        uri = tracking_uri(self.workspace)
        runs = set[str]()  # the rounds of an arm share one
        with chdir(self.workspace), locked(LOCK):
            found = [read_curve(each.removeprefix(TRAINED)) for each in stages]
            for curve in filter(None, found):
                curve = curve.of_store(uri)
                if curve.run not in {None, *runs} and not self._has_run(str(curve.run)):
                    curve = curve.of_store("")  # deleted: written anew
                if curve.points and (curve.run is None or curve.sent < len(curve.points)):
                    curve = send(curve, self, uri)
                if curve.run is not None:
                    runs.add(curve.run)
        for run in runs:
            self.client.set_tag(run, "mlflow.parentRunId", recorded.parent)
            self.client.set_terminated(run)

    def _has_run(self, run: str) -> bool:
        try:
            return bool(self.client.get_run(run).info.lifecycle_stage == "active")
        except MlflowException:
            return False

    def make_run(self, arm: str, key: str, start_ms: int) -> str:
        """Returns the run of an arm's training, which is created if it is not there."""
        found = self.client.search_runs([self.experiment], filter_of(arm, key))
        tags = {ARM: arm, KEY: key}
        name = run_name(arm)
        run = found[0] if found else self.client.create_run(self.experiment, start_ms, tags, name)
        return str(run.info.run_id)

    def log(self, run: str, points: Sequence[Point]) -> None:
        """Adds points of a curve to the run of an arm."""
        metrics = (
            Metric(_key(name), value, each.time_ms, each.update)
            for each in points
            for name, value in each.values.items()
        )
        for part in _parts(metrics, METRICS_PER_CALL):
            self.client.log_batch(run, metrics=part)

    def find_parent(self, state: str) -> Run | None:
        """Returns the parent run of a pipeline state, or None."""
        return next(iter(self._search("pipeline_state", state)), None)

    def _find_stage(self, fingerprint: str) -> Run | None:
        """Returns the entry's finished run, or None; deletes incomplete runs."""
        found = self._search("lock_entry", fingerprint)
        for run in found:
            if run.info.status != FINISHED:
                self.client.delete_run(run.info.run_id)
        return next((run for run in found if run.info.status == FINISHED), None)

    def _search(self, tag: str, value: str) -> list[Run]:
        return list(self.client.search_runs([self.experiment], f"tags.{tag} = '{value}'"))

    def _start_parent(self, note: Note) -> str:
        before = self._last_parent(note)
        run = self.client.create_run(self.experiment, run_name=note.title, tags=note.tags)
        run_id = str(run.info.run_id)
        for params in _parts(note.params.items(), PARAMS_PER_CALL):
            self.client.log_batch(run_id, params=[Param(_key(k), v) for k, v in params])
        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, 0) for name, value in note.results.items()]
        for part in _parts(metrics, METRICS_PER_CALL):
            self.client.log_batch(run_id, metrics=part)
        changed = sorted(_differing(before.data.params, note.params)) if before else []
        if changed:
            self.client.set_tag(run_id, CHANGED, ", ".join(changed)[:DESCRIPTION_CHARACTERS])
        return run_id

    def _last_parent(self, note: Note) -> Run | None:
        """Returns the newest parent run of the workspace."""
        place = note.tags.get(WORKSPACE, "")
        quote = '"' if "'" in place else "'"
        where = f"tags.{WORKSPACE} = {quote}{place}{quote}"
        order = ["attributes.start_time DESC"]
        found = self.client.search_runs([self.experiment], where, max_results=1, order_by=order)
        return next(iter(found), None)

    def _write_stage(self, name: str, note: StageNote, parent: str) -> str:
        run = self.client.create_run(
            self.experiment,
            run_name=name,
            tags={**note.tags, "mlflow.parentRunId": parent},
            start_time=note.started_ms,
        )
        run_id = str(run.info.run_id)
        for part in _parts(note.measures, METRICS_PER_CALL):
            metrics = [Metric(_key(m.name), m.value, note.ended_ms, m.update) for m in part]
            self.client.log_batch(run_id, metrics=metrics)
        for params in _parts(note.params.items(), PARAMS_PER_CALL):
            self.client.log_batch(run_id, params=[Param(_key(k), v) for k, v in params])
        datasets = [dataset(each, "dep") for each in note.read]
        datasets += [dataset(each, "out") for each in note.written]
        self.client.log_inputs(run_id, datasets=datasets)
        self.client.set_terminated(run_id, end_time=note.ended_ms)
        return run_id

    def _describe(self, parent: str, runs: Mapping[str, str]) -> None:
        """Writes the parent's description: a table of the stages and their runs."""
        rows = ["| stage | run |", "|---|---|"]
        for name, run_id in runs.items():
            row = f"| {name} | [{run_id}](#/experiments/{self.experiment}/runs/{run_id}) |"
            if sum(map(len, rows)) + len(row) > DESCRIPTION_CHARACTERS:
                rows.append(f"| and {len(runs) - len(rows) + 2} more | |")
                break
            rows.append(row)
        self.client.set_tag(parent, "mlflow.note.content", "\n".join(rows))


def _experiment(client: MlflowClient, workspace: Path) -> str:
    """Returns the experiment's id; creates it, with artifacts next to a local database."""
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


def _differing(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    """Yields the paths of parameters that differ, were added or are gone."""
    given = {_key(path): (path, value) for path, value in now.items()}
    yield from (path for key, (path, value) in given.items() if before.get(key) != value)
    yield from (key for key in before if key not in given)


def _key(name: str) -> str:
    """Returns `name` with every character that MLflow rejects escaped as :hex:."""
    panel = SYSTEM if name.startswith(SYSTEM) else ""
    rest = name.removeprefix(panel)
    return panel + re.sub(r"[^\w.\- ]", lambda found: f":{ord(found.group()):x}:", rest)[-240:]


def _parts(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    waiting = iter(items)
    while part := list(islice(waiting, size)):
        yield part


@contextmanager
def _writer(workspace: Path) -> Iterator[_Writer]:
    """Yields a writer for the store, exclusive among this user's processes on this host.

    Raises:
      PendingError: If MLflow cannot be reached or fails in the block.
    """
    uri = tracking_uri(workspace)
    try:
        with _alone(uri):
            _check_reachable(uri)
            yield _Writer(workspace, MlflowClient(tracking_uri=uri))
    except (MlflowException, SQLAlchemyError, sqlite3.Error, OSError) as error:
        raise PendingError(
            f"{uri}: cannot record the lineage, {brief(error)}; it is kept in {WAITING}, "
            "repair MLflow and run python -m grpo lineage"
        ) from None


def _check_reachable(uri: str) -> None:
    """Raises immediately if the store is unreachable; MLflow would retry for minutes."""
    if uri.startswith("sqlite:///"):
        with closing(sqlite3.connect(uri.removeprefix("sqlite:///"))) as database:
            database.execute("BEGIN IMMEDIATE")
    elif uri.startswith("http"):
        try:
            once = {"max_retries": 0, "timeout": ANSWER_SECONDS}
            http_request(get_default_host_creds(uri), "/health", "GET", **once)
        except MlflowException:
            raise ConnectionError("it does not answer") from None


@contextmanager
def _alone(uri: str) -> Iterator[None]:
    """Holds the lock for writing to a store, for this user on this host.

    Without it, two processes that open a new database would both create its tables.
    """
    with locked(store_lock(uri)):
        yield


def store_lock(uri: str) -> Path:
    """Returns the lock file for a store: next to a local database, otherwise one per host.

    It is not in the workspace, because several workspaces may write to one server.
    """
    if uri.startswith("sqlite:///"):
        return Path(uri.removeprefix("sqlite:///") + ".lock")
    return host_lock("lineage", uri)
