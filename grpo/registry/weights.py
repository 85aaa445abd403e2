"""Loads a registered version from DVC's cache or remote; verifies the hash of every file."""

import shutil
from pathlib import Path

from grpo.errors import ArtifactError, ParameterError
from grpo.lineage.lock import cached_path, file_digest, read_listing
from grpo.lineage.record import tracking_uri
from grpo.registry.remote import pull
from grpo.registry.store import POINTER, Registry, file_of, reached
from grpo.runtime.artifacts.files import named_output, read_json, require_inert, require_replaceable
from grpo.schema import PARAMS

SCHEME = "models:/"
POLICY, BASE_POLICY = "policy", "base"  # subdirectories of a loaded version


def load_version(address: str, target: Path, workspace: Path = Path()) -> str:
    """Writes a version's policy, its base and its parameters to a directory; returns its number.

    Args:
      address: MLflow model URI, "models:/NAME@ALIAS" or "models:/NAME/VERSION".
      workspace: Repository whose DVC cache and remote hold the content.

    Raises:
      ParameterError: If the address names no version.
      ArtifactError: If content is not available or differs from the registered one, or the
        directory holds anything but an earlier load.
    """
    name, separator, which = address.removeprefix(SCHEME).replace("@", "/").partition("/")
    if not (address.startswith(SCHEME) and separator and which):
        raise ParameterError(f"{address}: must be {SCHEME}NAME@ALIAS or {SCHEME}NAME/VERSION")
    require_replaceable(target)  # checked before the first request to a server
    uri = tracking_uri(workspace)
    file = file_of(uri)
    if file and not file.exists():  # MLflow would create an empty one
        raise ParameterError(
            f"{address}: no such version, {file} does not exist; change to the repository's root "
            "or set MLFLOW_TRACKING_URI"
        )
    registry = Registry(name, workspace)
    with reached(registry.uri):
        version = registry.version(which)
    if version is None:
        raise ParameterError(f"{address}: no such version in {registry.uri}")
    with named_output(target) as temporary:
        temporary.mkdir()
        pointer = registry.file(version, POINTER, temporary)
        registry.file(version, PARAMS.name, temporary)
        for part in (POLICY, BASE_POLICY):
            _restore(_digest_in(pointer, part), temporary / part, workspace)
            require_inert(temporary / part)
    return str(version.version)


def _digest_in(pointer: Path, part: str) -> str:
    """Returns DVC's digest of a version's policy or base."""
    try:
        return str(read_json(pointer)[part]["digest"])
    except (KeyError, TypeError):
        raise ArtifactError(
            f"{POINTER}: must hold {part}.digest; promote the policy again"
        ) from None


def _restore(digest: str, target: Path, workspace: Path) -> None:
    """Writes a directory from DVC's cache; pulls missing files from the remote first."""
    listing = _read_listing(digest, workspace)
    if listing is None or not all(
        cached_path(workspace, md5).is_file() for md5 in listing.values()
    ):
        try:
            pull(digest, workspace)
        except ArtifactError as error:
            raise _lost(digest, str(error)) from None
        listing = _read_listing(digest, workspace)
    if listing is None:
        raise _lost(digest)
    for name, md5 in listing.items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copyfile(cached_path(workspace, md5), path)
        except FileNotFoundError:
            raise _lost(digest) from None
        if file_digest(path) != md5:
            raise _damaged(cached_path(workspace, md5))


def _read_listing(digest: str, workspace: Path) -> dict[str, str] | None:
    """Returns the verified md5 by file name of a directory; None if it is not cached."""
    cached = cached_path(workspace, digest)
    if cached.is_file() and f"{file_digest(cached)}.dir" != digest:
        raise _damaged(cached)
    return read_listing(workspace, digest)


def _damaged(path: Path) -> ArtifactError:
    return ArtifactError(
        f"{path}: is damaged, its content must have the hash in its name; delete it, then dvc fetch"
    )


def _lost(digest: str, reason: str = "") -> ArtifactError:
    return ArtifactError(
        f"{digest}: neither DVC's cache nor its remote holds it{', ' if reason else ''}{reason}; "
        "run dvc push where it was made, then retry"
    )
