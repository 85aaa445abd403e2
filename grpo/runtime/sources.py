"""Sources of imported weights and prompts: a directory under data/, the Hugging Face hub, or S3."""

from pathlib import Path
from typing import NamedTuple

from grpo.errors import AbsentError, ParameterError, brief, located
from grpo.runtime.artifacts.files import WORK
from grpo.schema import PARAMS, DirectoryBase, HubBase, S3Base

DOWNLOADS = WORK / "s3"  # downloaded directories by SHA-256; complete if they exist


class Source(NamedTuple):
    """Arguments of `from_pretrained`."""

    name: str
    revision: str | None
    is_local: bool
    parameter: str  # path of the parameter that names the source


def find_source(
    imported: DirectoryBase | HubBase | S3Base, data: Path, *, parameter: str
) -> Source:
    """Returns the source of imported weights; downloads them if they are in S3.

    Args:
      parameter: Path of the parameter that names the weights, for messages.

    Raises:
      AbsentError: If a local directory does not exist.
      StorageError: If the download fails, or its SHA-256 differs.
    """
    if isinstance(imported, HubBase):
        return Source(imported.id, imported.revision, is_local=False, parameter=parameter)
    if isinstance(imported, S3Base):
        folder = download(imported, parameter=parameter)
        return Source(str(folder), None, is_local=True, parameter=parameter)
    directory = require_directory(imported, data, parameter=parameter)
    return Source(str(directory), None, is_local=True, parameter=parameter)


def find_local_source(
    imported: DirectoryBase | HubBase | S3Base, data: Path, *, parameter: str
) -> Source:
    """Returns the source of imported weights without a download; the hub's may be in its cache.

    Args:
      parameter: Path of the parameter that names the weights, for messages.

    Raises:
      AbsentError: If a local directory does not exist.
    """
    if isinstance(imported, S3Base) and not (DOWNLOADS / imported.sha256).is_dir():
        raise AbsentError(
            f"{PARAMS}: {parameter}.uri is not downloaded yet, got {imported.uri}; run its stage"
        )
    return find_source(imported, data, parameter=parameter)


def download(imported: S3Base, *, parameter: str) -> Path:
    """Returns the local copy of a directory in S3; downloads it on the first call.

    Args:
      parameter: Path of the parameter that names the directory, for messages.

    Raises:
      StorageError: If the download fails, or its SHA-256 differs.
    """
    directory = DOWNLOADS / imported.sha256
    if not directory.is_dir():
        with located(f"{PARAMS}: {parameter}"):
            from grpo.runtime.storage.download import download_directory  # an extra

            download_directory(imported.uri, directory, sha256=imported.sha256)
    return directory


def refusal(source: Source, error: object) -> ParameterError:
    """Returns the error for a source that cannot be loaded, AbsentError if it is not here."""
    kind = ParameterError if source.is_local or _is_cached(source) else AbsentError
    return kind(f"{PARAMS}: {source.parameter} {source.name!r} cannot be loaded: {brief(error)}")


def _is_cached(source: Source) -> bool:
    """Returns whether the configuration of a model of the hub is on this machine."""
    from huggingface_hub import try_to_load_from_cache  # imported here: only errors need it

    return any(
        isinstance(try_to_load_from_cache(source.name, name, revision=source.revision), str)
        for name in ("config.json", "model_index.json")
    )


def require_directory(imported: DirectoryBase, data: Path, *, parameter: str) -> Path:
    """Returns the directory of imported weights.

    Args:
      parameter: Path of the parameter that names the directory, for messages.

    Raises:
      AbsentError: If it does not exist.
    """
    directory = data / imported.path
    if not directory.is_dir():
        raise AbsentError(f"{PARAMS}: {parameter}.path must be a directory, {directory} is not")
    return directory
