"""Where imported weights come from: a directory under data/, or the hub."""

from pathlib import Path
from typing import NamedTuple

from grpo.errors import ParameterError
from grpo.params import PARAMS
from grpo.policy_params import DirectoryBase, HubBase


class Source(NamedTuple):
    """What `from_pretrained` takes."""

    name: str
    revision: str | None
    is_local: bool
    parameter: str  # which names it


def find_source(imported: DirectoryBase | HubBase, data: Path, *, parameter: str) -> Source:
    """Returns the source of imported weights.

    Args:
      parameter: Where they are named, for messages.

    Raises:
      ParameterError: If it is a directory that is not there.
    """
    if isinstance(imported, HubBase):
        return Source(imported.id, imported.revision, is_local=False, parameter=parameter)
    directory = data / imported.path
    if not directory.is_dir():
        raise ParameterError(f"{PARAMS}: {parameter}.path must be a directory, {directory} is none")
    return Source(str(directory), None, is_local=True, parameter=parameter)


def refusal(source: Source, error: object) -> ParameterError:
    """Returns what to say of a source that cannot be loaded."""
    reason = " ".join(str(error).split())[:200]
    return ParameterError(
        f"{PARAMS}: {source.parameter} {source.name!r} cannot be loaded: {reason}"
    )
