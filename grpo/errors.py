"""The exceptions that are no bugs: one line each, without credentials, and an exit code."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

# What stands between :// and @ of a URL. A password may hold / and @, then more than it is cut.
CREDENTIALS = re.compile(r"(?<=://)(?:[^\s/@:]*:\S*|[^\s/@]+)@")
BRIEF_CHARACTERS = 200


def without_credentials(text: str) -> str:
    """Returns `text` with the user and password of every URL written as ***."""
    return CREDENTIALS.sub("***@", text)


def brief(error: object) -> str:
    """Returns what a library says of its error: one line, not long, without credentials."""
    # Credentials first: cut short, they would not be known for what they are.
    return without_credentials(" ".join(str(error).split()))[:BRIEF_CHARACTERS]


class GrpoError(Exception):
    """States the rule, the value and the way out, in one line, without credentials."""

    def __init__(self, message: str) -> None:
        super().__init__(without_credentials(message))


class ParameterError(GrpoError, ValueError):
    """A parameter is wrong; the message starts with its file and path."""


class ArtifactError(GrpoError, ValueError):
    """A file is missing, truncated or breaks its contract; the message starts with its path."""


class UnsoundError(GrpoError, ValueError):
    """A combination of links breaks a composition rule of severity ERROR."""


class JudgeError(GrpoError, RuntimeError):
    """The judge failed on all that it was shown: the judge is wrong, not the rollouts."""


class BusyError(GrpoError, RuntimeError):
    """Another process holds what this one needs."""


class DivergedError(GrpoError, ArithmeticError):
    """Training made a number that is not finite; the message says at which update.

    Attributes:
      updates: The rows of updates.csv before that, if whoever raises knows them.
    """

    def __init__(self, message: str, updates: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(message)
        self.updates = updates


class ExecutorError(GrpoError, RuntimeError):
    """Workers are lost again and again, or not to be had; a rerun goes on where it was."""


class StorageError(GrpoError, RuntimeError):
    """S3 lacks, refuses or has changed what is asked for; the message names the object."""


class LostRankError(GrpoError, RuntimeError):
    """A process that trains with others was killed or failed; a rerun goes on where it was."""


class MissingExtraError(GrpoError, ImportError):
    """An optional package is needed; the message says which extra installs it."""


@contextmanager
def located(where: object) -> Iterator[None]:
    """Puts a file or parameter path before the message of a GrpoError raised in the block."""
    try:
        yield
    except GrpoError as error:
        raise type(error)(f"{where}: {error}") from None


@contextmanager
def refused_by_library(refuse: Callable[[str], GrpoError]) -> Iterator[None]:
    """Makes one line of whatever a library raises on the files, templates or settings of others.

    What that is, no list can say: tokenizers, for one, raises Exception itself.

    Args:
      refuse: Returns the error of what the library says, which is raised in its place; a GrpoError
        of the block is raised as it is.
    """
    try:
        yield
    except GrpoError:
        raise
    except Exception as error:  # noqa: BLE001  see above
        raise refuse(brief(said_by(error))) from None


def said_by(error: BaseException) -> str:
    """Returns the kind of an error and what it says."""
    return f"{type(error).__name__}: {error}"
