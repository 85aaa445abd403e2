"""Where weights and prompts come from: a directory under data/, the hub, or S3."""

from pathlib import Path
from typing import NamedTuple

from grpo.errors import ParameterError, brief, located
from grpo.runtime.artifacts.files import WORK
from grpo.schema import PARAMS, DirectoryBase, HubBase, S3Base

DOWNLOADS = WORK / "s3"  # directories by their digest: one that is there is whole


class Source(NamedTuple):
    """What `from_pretrained` takes."""

    name: str
    revision: str | None
    is_local: bool
    parameter: str  # which names it


def find_source(
    imported: DirectoryBase | HubBase | S3Base, data: Path, *, parameter: str
) -> Source:
    """Returns the source of imported weights, downloaded if they are in S3.

    Args:
      parameter: Where they are named, for messages.

    Raises:
      ParameterError: If it is a directory that is not there.
      StorageError: If it cannot be downloaded, or is not what its digest says.
    """
    if isinstance(imported, HubBase):
        return Source(imported.id, imported.revision, is_local=False, parameter=parameter)
    if isinstance(imported, S3Base):
        folder = download(imported, parameter=parameter)
        return Source(str(folder), None, is_local=True, parameter=parameter)
    directory = require_directory(imported, data, parameter=parameter)
    return Source(str(directory), None, is_local=True, parameter=parameter)


def download(imported: S3Base, *, parameter: str) -> Path:
    """Returns a directory that is in S3, downloaded once.

    Args:
      parameter: Where it is named, for messages.

    Raises:
      StorageError: If it cannot be downloaded, or is not what its digest says.
    """
    directory = DOWNLOADS / imported.sha256
    if not directory.is_dir():
        with located(f"{PARAMS}: {parameter}"):
            from grpo.runtime.storage.download import download_directory  # an extra

            download_directory(imported.uri, directory, sha256=imported.sha256)
    return directory


def refusal(source: Source, error: object) -> ParameterError:
    """Returns what to say of a source that cannot be loaded."""
    return ParameterError(
        f"{PARAMS}: {source.parameter} {source.name!r} cannot be loaded: {brief(error)}"
    )


def require_directory(imported: DirectoryBase, data: Path, *, parameter: str) -> Path:
    """Returns the directory of imported weights.

    Args:
      parameter: Where it is named, for messages.

    Raises:
      ParameterError: If it is not there.
    """
    directory = data / imported.path
    if not directory.is_dir():
        raise ParameterError(f"{PARAMS}: {parameter}.path must be a directory, {directory} is none")
    return directory
