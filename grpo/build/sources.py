"""Where an imported base comes from: a directory under data/, or the hub."""

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


def find_source(base: DirectoryBase | HubBase, data: Path) -> Source:
    """Returns the source of an imported base.

    Raises:
      ParameterError: If it is a directory that is not there.
    """
    if isinstance(base, HubBase):
        return Source(base.id, base.revision, is_local=False)
    directory = data / base.path
    if not directory.is_dir():
        raise ParameterError(f"{PARAMS}: policy.base.path must be a directory, {directory} is none")
    return Source(str(directory), None, is_local=True)


def refusal(source: Source, error: Exception) -> ParameterError:
    """Returns what to say of a source that cannot be loaded."""
    reason = " ".join(str(error).split())[:200]
    return ParameterError(f"{PARAMS}: policy.base {source.name!r} cannot be loaded: {reason}")
