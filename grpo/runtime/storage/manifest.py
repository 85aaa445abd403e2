"""The manifest of a stored directory: the SHA-256 of every file, by name.

Each file is stored as PREFIX/DIGEST/NAME, where DIGEST is the SHA-256 of the manifest, so that
directories with different contents share no key. PREFIX/manifest.json is written last.
"""

import hashlib
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from grpo.errors import ArtifactError, StorageError
from grpo.runtime.artifacts.files import canonical_json, require_inside, sha256_of
from grpo.runtime.storage.client import Location, Store, TransientError

MANIFEST = "manifest.json"


FileName = Annotated[str, AfterValidator(require_inside)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
FILES = TypeAdapter(Annotated[dict[FileName, Sha256], Field(min_length=1)])


def describe(directory: Path) -> bytes:
    """Returns the manifest of a directory.

    Raises:
      ArtifactError: If it has no files, a name that is not a valid key, or a link out of it.
    """
    paths = {
        path.relative_to(directory).as_posix(): path
        for path in directory.rglob("*")
        if path.is_file()
    }
    for path in paths.values():
        if not path.resolve().is_relative_to(directory.resolve()):
            raise ArtifactError(f"{path}: links out of its directory; replace it with a copy")
    if not paths:
        raise ArtifactError(f"{directory}: must be a directory with files; choose another")
    try:
        for name in paths:
            require_inside(name)
    except ValueError as error:
        raise ArtifactError(f"{directory}: {error}; rename the file") from None
    return canonical_json({name: sha256_of(path) for name, path in paths.items()})


def parse_manifest(content: bytes, location: Location) -> dict[str, str]:
    """Returns the SHA-256 of every file, by name.

    Raises:
      StorageError: If the content is not a manifest, or a name leads outside the directory.
    """
    try:
        return FILES.validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        reason = " ".join(first["msg"].removeprefix("Value error, ").split())
        raise StorageError(f"{location}: must be a manifest: {reason}") from None


def read_manifest(store: Store, directory: Location, sha256: str) -> dict[str, str]:
    """Returns the SHA-256 of every file of a stored directory, by name.

    Args:
      sha256: Expected SHA-256 of the manifest.

    Raises:
      StorageError: If there is no manifest, or its SHA-256 differs.
    """
    location = directory.within(MANIFEST)

    def read() -> bytes:
        content = store.read(location)
        found = hashlib.sha256(content).hexdigest()
        if found != sha256:
            raise TransientError(
                f"{location}: must have SHA-256 {sha256}, got {found}; correct either"
            )
        return content

    return parse_manifest(store.retried(read, TransientError), location)
