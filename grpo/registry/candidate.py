"""A candidate for promotion: a policy with its verified content, evaluation and lineage."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from mlflow.entities.model_registry import ModelVersion

from grpo.errors import ArtifactError, GrpoError
from grpo.lineage.lock import (
    Artifact,
    Lock,
    StageEntry,
    directory_digest,
    file_digest,
    outs_behind,
    read_lock,
)
from grpo.lineage.revision import Revision, revisions
from grpo.lineage.trace import trace
from grpo.params.parameters import BASE
from grpo.runtime.artifacts.files import require_inert

POLICIES, EVALUATIONS = "artifacts/policies", "artifacts/evaluations"
# Dependencies and parameters of an evaluation that must be equal to compare two policies.
COMPARED_DEPS = (
    "artifacts/prompts/eval.parquet",
    "artifacts/data/judge.json",
    "artifacts/plugins/judge.json",
    "grpo/rewards",
    *(
        f"grpo/sampling/{name}.py"
        for name in ("evaluation", "judging", "outcomes", "scoring", "shaping")
    ),
)
COMPARED_PARAMS = ("evaluation.", "reward.", "seed")


class RefusedError(GrpoError, RuntimeError):
    """A promotion was refused; the message is the reason.

    Args:
      version: The registered version of the model, if any.
    """

    def __init__(self, message: str, version: ModelVersion | None = None) -> None:
        super().__init__(message)
        self.version = version


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A policy whose files, evaluation and lineage match dvc.lock."""

    name: str
    policy: Artifact
    base: Artifact  # base policy; a policy stores only the tensors that differ from it
    results: Path  # schema EVALUATION
    evaluation: str  # digest of the prompts, the judge and the evaluation's parameters
    revision: Revision
    trained_by: str  # fingerprint of the training stage's entry in dvc.lock


def find_candidate(name: str, workspace: Path = Path()) -> Candidate:
    """Returns a policy of a finished pipeline as a candidate.

    Raises:
      RefusedError: If its training or evaluation is unknown, stale or not committed, or if its
        files differ from the evaluated ones.
    """
    try:
        lock = read_lock(workspace)
    except ArtifactError as error:
        raise RefusedError(f"its lineage is missing: {error}") from None
    made, policy = _written(lock, f"{POLICIES}/{name}")
    _, base = _written(lock, f"{POLICIES}/{BASE}")
    evaluated, results = _written(lock, f"{EVALUATIONS}/{name}.parquet")
    _require_fresh(evaluated, policy, base)
    for artifact in (policy, base, results):
        _require_unchanged(workspace, artifact)
    for artifact in (policy, base):  # both are loaded
        _require_safe(workspace / artifact.path)
    _require_origin(workspace, policy)
    revision = revisions(workspace, {made.name: made})[made.name]
    if revision.is_modified:
        raise RefusedError(
            f"{policy.path}: was made from changes that are not committed; commit dvc.lock, "
            "params.yaml and the code, then promote"
        )
    return Candidate(
        name=name,
        policy=policy,
        base=base,
        results=workspace / results.path,
        evaluation=_digest_of_evaluation(evaluated),
        revision=revision,
        trained_by=made.fingerprint,
    )


def _written(lock: Lock, path: str) -> tuple[StageEntry, Artifact]:
    """Returns the stage that wrote `path`, and the artifact."""
    for entry, out in outs_behind(lock, path):
        if out.path == path:
            return entry, out
    raise RefusedError(f"{path}: its lineage is missing, no stage in dvc.lock wrote it; run it")


def _require_fresh(evaluated: StageEntry, policy: Artifact, base: Artifact) -> None:
    read = {each.path: each.digest for each in evaluated.deps}
    for artifact in (policy, base):
        if read.get(artifact.path) != artifact.digest:
            raise RefusedError(
                f"{evaluated.name}: is stale, {artifact.path} has changed since; run it again"
            )


def _require_unchanged(workspace: Path, artifact: Artifact) -> None:
    if digest_of(workspace / artifact.path) != artifact.digest:
        raise RefusedError(
            f"{artifact.path}: differs from dvc.lock; run dvc checkout {artifact.path}"
        )


def _require_safe(directory: Path) -> None:
    """Requires weights in safetensors and no files that a loader would unpickle or execute."""
    try:
        require_inert(directory)
    except ArtifactError as error:
        raise RefusedError(str(error)) from None
    if not any(directory.rglob("*.safetensors")):
        raise RefusedError(f"{directory}: must hold weights as safetensors, found none")


def _require_origin(workspace: Path, policy: Artifact) -> None:
    for node in trace(Path(policy.path), workspace).walk():
        if node.outdated:
            raise RefusedError(
                f"{node.artifact.path}: its lineage is broken, {node.outdated[0]} has changed "
                "since it was made; run dvc repro"
            )


def digest_of(path: Path) -> str | None:
    """Returns DVC's digest of a file or directory; None if it does not exist."""
    if path.is_file():
        return file_digest(path)
    if not path.is_dir():
        return None
    files = {str(each.relative_to(path.parent)): each for each in path.rglob("*") if each.is_file()}
    return directory_digest({name: file_digest(each) for name, each in files.items()}, path.name)


def _digest_of_evaluation(evaluated: StageEntry) -> str:
    deps = {each.path: each.digest for each in evaluated.deps if each.path in COMPARED_DEPS}
    params = {
        name: value for name, value in evaluated.params.items() if name.startswith(COMPARED_PARAMS)
    }
    return hashlib.sha256(json.dumps([deps, params], sort_keys=True).encode()).hexdigest()


def base_results(candidate: Candidate, workspace: Path = Path()) -> Path:
    """Returns the evaluation of the candidate's base, which a first champion must beat.

    Raises:
      RefusedError: If the base was not evaluated, or with other prompts, judge or parameters.
    """
    evaluated, results = _written(read_lock(workspace), f"{EVALUATIONS}/{BASE}.parquet")
    _require_unchanged(workspace, results)
    if _digest_of_evaluation(evaluated) != candidate.evaluation:
        raise RefusedError(
            f"{evaluated.name}: must use the prompts, judge and parameters of "
            f"{candidate.name}'s evaluation; run dvc repro"
        )
    return workspace / results.path
