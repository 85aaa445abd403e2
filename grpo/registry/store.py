"""Versions, aliases and decisions in MLflow's model registry."""

import fcntl
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from sqlalchemy.exc import SQLAlchemyError

from grpo.errors import ArtifactError, brief
from grpo.lineage.lock import Artifact, file_digest
from grpo.lineage.record import VIEW, dataset, open_store, tracking_uri
from grpo.registry.candidate import Candidate, RefusedError, base_results, find_candidate
from grpo.registry.gate import CHALLENGER, CHAMPION, Bounds, Verdict, judge, say, too_few_prompts
from grpo.registry.remote import push
from grpo.runtime.artifacts.files import host_lock
from grpo.runtime.artifacts.tables import EVALUATION, read_table
from grpo.runtime.curves import EXPERIMENT
from grpo.schema import PARAMS

SQLITE = "sqlite:///"
PREVIOUS = "previous"
POINTER, RESULTS = "pointer.json", "evaluation.parquet"
HOLDER = "promotion.holder"  # model tag that serves as a lock during a promotion
HOLDS_SECONDS = 600.0  # expiry of that lock, for a promotion killed on another host
PROMOTED, REFUSED, ROLLED_BACK = "promoted", "refused", "rolled back"
HISTORY = "decision"  # prefix of a version's tags: decision.001 is the first decision


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The result of a promotion or rollback, also stored as tags of its run.

    Every version has a history of the decisions on it (`Registry.history`). Only the aliases
    determine which version is live.
    """

    model: str
    outcome: str  # PROMOTED, REFUSED or ROLLED_BACK
    reason: str
    version: str | None  # of the model; None: not registered
    run: str  # MLflow run id


class _Outcome(NamedTuple):
    outcome: str
    reason: str
    version: ModelVersion | None
    other: tuple[ModelVersion, str] | None = None  # previous champion and its history entry


class Registry:
    """One model in the registry at MLFLOW_TRACKING_URI, by default that of the workspace."""

    def __init__(self, model: str, workspace: Path = Path()) -> None:
        self.model = model
        self.workspace = workspace
        self.uri = tracking_uri(workspace)
        file = file_of(self.uri)
        if file and file.exists():
            file.open("rb").close()  # fails at once; MLflow would retry an unreadable file
        with reached(self.uri):
            self.client = open_store(workspace)
            found = self.client.get_experiment_by_name(EXPERIMENT)
        assert found is not None  # open_store creates it
        self.experiment = str(found.experiment_id)

    def promote(self, policy: str, bounds: Bounds) -> Decision:
        """Registers a policy as challenger and makes it champion if it passes the gate.

        The policy is compared with the champion, or with its own base if there is no champion. The
        old champion becomes `previous`. Every decision is an MLflow run with its reason; a refused
        promotion leaves the champion unchanged. A promotion that was killed leaves a valid champion
        and can be repeated with the same call.

        Raises:
          ArtifactError: If MLflow is unreachable, or the champion's evaluation is lost.
        """

        def act(run: str) -> _Outcome:
            candidate = find_candidate(policy, self.workspace)
            champion = self.version(CHAMPION)
            if (
                champion
                and _is_same_policy(champion, candidate)
                and _is_evaluated_alike(champion, candidate)
            ):
                raise RefusedError(f"is the champion already: version {champion.version}")
            verdict = self._compare(candidate, champion, bounds)
            version = self._register(candidate, run, verdict)
            if not verdict.reason:
                self._push(candidate, version)
            return self._make_champion(version, champion, verdict)

        return self._decide(f"promote {policy}", act)

    def roll_back(self) -> Decision:
        """Makes the previous champion champion again and removes the alias `previous`.

        Raises:
          ArtifactError: If MLflow is unreachable.
        """

        def act(run: str) -> _Outcome:
            champion, previous = self.version(CHAMPION), self.version(PREVIOUS)
            if champion is None or previous is None or champion.version == previous.version:
                raise RefusedError("there is no previous champion")
            self._set(CHAMPION, previous)
            self.client.delete_registered_model_alias(self.model, PREVIOUS)
            return _Outcome(
                ROLLED_BACK,
                f"champion again, in place of version {champion.version}",
                previous,
                other=(champion, f"withdrawn: rolled back to version {previous.version}"),
            )

        return self._decide("roll back", act)

    def version(self, alias: str) -> ModelVersion | None:
        """Returns the version with this alias or number, or None."""
        try:
            if alias.isdecimal():
                return self.client.get_model_version(self.model, alias)
            return self.client.get_model_version_by_alias(self.model, alias)
        except MlflowException as error:
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return None
            raise

    def history(self, version: ModelVersion) -> list[str]:
        """Returns the decisions on a version, oldest first: "TIME OUTCOME: REASON (run ID)"."""
        tags: dict[str, str] = version.tags
        return [tags[name] for name in sorted(tags) if name.startswith(f"{HISTORY}.")]

    def file(self, version: ModelVersion, name: str, directory: Path) -> Path:
        """Downloads a version's POINTER, RESULTS or parameters into a directory; returns the path.

        Raises:
          ArtifactError: If the file is lost.
        """
        try:
            return Path(self.client.download_artifacts(version.run_id, name, str(directory)))
        except (MlflowException, OSError) as error:
            raise ArtifactError(
                f"{self.uri}: version {version.version} of {self.model} has lost {name}, "
                f"{brief(error)}"
            ) from None

    def _compare(
        self, candidate: Candidate, champion: ModelVersion | None, bounds: Bounds
    ) -> Verdict:
        own = read_table(candidate.results, EVALUATION)
        if champion is None:
            other = read_table(base_results(candidate, self.workspace), EVALUATION)
            return judge(own, other, bounds)
        if _is_same_policy(champion, candidate):  # stays champion, with another evaluation
            return Verdict(difference=None, reason=too_few_prompts(own))
        if not _is_evaluated_alike(champion, candidate):
            return Verdict(
                difference=None,
                reason="prompts, judge or parameters of its evaluation are not those of the "
                f"champion's, version {champion.version}; evaluate both alike",
            )
        with tempfile.TemporaryDirectory() as folder:
            stored = self.file(champion, RESULTS, Path(folder))
            return judge(own, read_table(stored, EVALUATION), bounds)

    def _register(self, candidate: Candidate, run: str, verdict: Verdict) -> ModelVersion:
        """Registers a version that points to the policy's content in DVC."""
        pointer = {
            "policy": asdict(candidate.policy),
            "base": asdict(candidate.base),
            "revision": str(candidate.revision),
        }
        self.client.log_dict(run, pointer, POINTER)
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / RESULTS
            copy.write_bytes(candidate.results.read_bytes())
            self.client.log_artifact(run, str(copy))
        self.client.log_artifact(run, str(self.workspace / PARAMS))
        results = Artifact(path=RESULTS, digest=file_digest(candidate.results))
        read = (candidate.policy, candidate.base, results)
        self.client.log_inputs(run, datasets=[dataset(each, "dep") for each in read])
        tags = {
            "policy": candidate.name,
            "policy_digest": candidate.policy.digest,
            "base_digest": candidate.base.digest,
            "evaluation": candidate.evaluation,
            "trained_by": candidate.trained_by,
            "git_revision": candidate.revision.commit,
        }
        if verdict.difference:
            tags["gain"] = say(verdict.difference)
        place = str(self.client.get_run(run).info.artifact_uri)
        made = self.client.create_model_version(
            self.model, place, run_id=run, tags=tags, description=self._describe(candidate)
        )
        self._set(CHALLENGER, made)
        return made

    def _describe(self, candidate: Candidate) -> str:
        """Returns a version's description: the policy, and the run that trained it."""
        made_by = f"tags.lock_entry = '{candidate.trained_by}'"
        found = self.client.search_runs([self.experiment], made_by, max_results=1)
        links = [
            f" by [{each.info.run_name}](#/experiments/{self.experiment}/runs/"
            f"{each.info.run_id}{VIEW})"
            for each in found
        ]
        return f"{candidate.name}, made{''.join(links)} at {candidate.revision}"

    def _make_champion(
        self, version: ModelVersion, champion: ModelVersion | None, verdict: Verdict
    ) -> _Outcome:
        """Makes a version champion if the verdict has no reason against it.

        Without a difference it is the champion's policy, which is not the one before it.
        """
        if verdict.reason:
            return _Outcome(REFUSED, verdict.reason, version)
        now = self.version(CHAMPION)
        if (now and now.version) != (champion and champion.version):
            return _Outcome(REFUSED, "another promotion has changed the champion", version)
        against = f"version {champion.version}" if champion else "its base"
        said = f"is the policy of {against} with another evaluation"
        if verdict.difference:
            said = f"gains {say(verdict.difference)} over {against}"
            if champion:
                self._set(PREVIOUS, champion)
        elif champion and self._is(PREVIOUS, champion):  # a promotion was killed: the same weights
            self.client.delete_registered_model_alias(self.model, PREVIOUS)
        self._set(CHAMPION, version)
        self.client.delete_registered_model_alias(self.model, CHALLENGER)
        return _Outcome(
            PROMOTED,
            said,
            version,
            other=champion and (champion, f"replaced: by version {version.version}"),
        )

    def _push(self, candidate: Candidate, version: ModelVersion) -> None:
        """Pushes a policy and its base to DVC's remote, from which other clones load them.

        Raises:
          RefusedError: If the push fails.
        """
        try:
            push([candidate.policy.digest, candidate.base.digest], self.workspace)
        except ArtifactError as error:
            raise RefusedError(
                f"version {version.version} is only on this disk: {error}", version
            ) from None

    def _is(self, alias: str, version: ModelVersion) -> bool:
        found = self.version(alias)
        return found is not None and found.version == version.version

    def _set(self, alias: str, version: ModelVersion) -> None:
        self.client.set_registered_model_alias(self.model, alias, version.version)

    def _decide(self, title: str, act: Callable[[str], _Outcome]) -> Decision:
        """Returns the decision of `act`; records it in a new run and in the version's history."""
        with reached(self.uri):
            name = f"{self.model}: {title}"
            made = self.client.create_run(
                self.experiment, run_name=name, tags={"model": self.model}
            )
            run = str(made.info.run_id)
            try:
                with self._alone(run):
                    found = act(run)
            except RefusedError as error:
                found = _Outcome(REFUSED, " ".join(str(error).split()), error.version)
            except BaseException:
                self.client.set_terminated(run, "FAILED")
                raise
            for key, value in {"decision": found.outcome, "reason": found.reason}.items():
                self.client.set_tag(run, key, value)
            if found.version:
                self._note(found.version, f"{found.outcome}: {found.reason}", run)
            if found.other:
                self._note(*found.other, run)
            self.client.set_terminated(run)
        return Decision(
            model=self.model,
            outcome=found.outcome,
            reason=found.reason,
            version=found.version and str(found.version.version),
            run=run,
        )

    def _note(self, version: ModelVersion, what: str, run: str) -> None:
        """Adds an entry to a version's history."""
        now = self.version(str(version.version))
        assert now is not None
        tag = f"{HISTORY}.{len(self.history(now)) + 1:03d}"
        text = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC {what} (run {run})"
        self.client.set_model_version_tag(self.model, version.version, tag, text)

    @contextmanager
    def _alone(self, run: str) -> Iterator[None]:
        """Holds the lock on the model, so that promotions of it do not run concurrently.

        Processes of one user on one host use a kernel lock. Across users and hosts the lock is a
        tag that is written and read back. Two writers at the same instant may both succeed, so the
        champion is compared again before it is changed.

        Raises:
          RefusedError: If another promotion holds the lock.
        """
        with host_lock("promotion", f"{self.uri} {self.model}").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RefusedError("another promotion of the model is running") from None
            self._make_model()
            self._take(run)
            try:
                yield
            finally:
                self.client.delete_registered_model_tag(self.model, HOLDER)

    def _make_model(self) -> None:
        try:
            self.client.create_registered_model(self.model)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise

    def _take(self, run: str) -> None:
        """Writes the lock tag unless a promotion by another user or host may be running."""
        host = f"{os.getuid()}@{socket.gethostname()}"
        holder = json.loads(self._holder() or "{}")
        if holder.get("host") != host and holder.get("until", 0.0) > time.time():
            raise RefusedError(
                f"another promotion of the model is running: run {holder['run']}; "
                f"if its host {holder['host']} is gone, delete the model's tag {HOLDER}"
            )
        mine = json.dumps({"run": run, "host": host, "until": time.time() + HOLDS_SECONDS})
        self.client.set_registered_model_tag(self.model, HOLDER, mine)
        if self._holder() != mine:
            raise RefusedError("another promotion of the model has begun at the same time")

    def _holder(self) -> str | None:
        found: str | None = self.client.get_registered_model(self.model).tags.get(HOLDER)
        return found


def file_of(uri: str) -> Path | None:
    """Returns the database file of a SQLite store, or None."""
    return Path(uri.removeprefix(SQLITE)) if uri.startswith(SQLITE) else None


@contextmanager
def reached(uri: str) -> Iterator[None]:
    """Converts MLflow's errors in the block to a one-line ArtifactError."""
    try:
        yield
    except (MlflowException, SQLAlchemyError) as error:
        raise ArtifactError(f"{uri}: cannot be read or written, {brief(error)}") from None


def _is_same_policy(version: ModelVersion, candidate: Candidate) -> bool:
    """Returns whether weights are equal, of which a policy stores what differs from its base."""
    digests = [version.tags.get(f"{name}_digest") for name in ("policy", "base")]
    return digests == [candidate.policy.digest, candidate.base.digest]


def _is_evaluated_alike(version: ModelVersion, candidate: Candidate) -> bool:
    return bool(version.tags.get("evaluation") == candidate.evaluation)
