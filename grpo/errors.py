"""User-facing errors: messages of one line without credentials."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

# Matches the text between :// and @ of a URL. If the password contains / or @, more is removed.
CREDENTIALS = re.compile(r"(?<=://)(?:[^\s/@:]*:\S*|[^\s/@]+)@")
BRIEF_CHARACTERS = 200


def without_credentials(text: str) -> str:
    """Returns `text` with the user and password of every URL written as ***."""
    return CREDENTIALS.sub("***@", text)


def brief(error: object) -> str:
    """Returns the message of a library's error: one short line without credentials."""
    # Credentials are removed first: the pattern would not match truncated ones.
    return without_credentials(" ".join(str(error).split()))[:BRIEF_CHARACTERS]


class GrpoError(Exception):
    """A user-facing error: states the rule, the value and the remedy in one line."""

    def __init__(self, message: str) -> None:
        super().__init__(without_credentials(message))


class ParameterError(GrpoError, ValueError):
    """A parameter is wrong; the message starts with its file and path."""


class RefusedError(ParameterError):
    """A server refuses what it is asked, e.g. for its key; a rerun does not help."""


class ArtifactError(GrpoError, ValueError):
    """A file is missing, truncated or violates its schema; the message starts with its path."""


class AbsentError(ParameterError, ArtifactError):
    """What a parameter names is not on this machine; the parameter may be right."""


class ShapeError(ValueError):
    """A tensor of an objective has a wrong shape or dtype."""


class UnsoundError(GrpoError, ValueError):
    """A combination of links breaks a composition rule of severity ERROR."""


class BusyError(GrpoError, RuntimeError):
    """Another process holds a lock that this process needs."""


class DivergedError(GrpoError, ArithmeticError):
    """Training produced a number that is not finite; the message names the update.

    Attributes:
      updates: The rows of updates.csv of the earlier updates, if the caller has them.
    """

    def __init__(self, message: str, updates: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(message)
        self.updates = updates


class RetryableError(GrpoError, RuntimeError):
    """The cause may pass: a rerun may succeed, so flows try the stage again."""


class WorkerError(RetryableError):
    """Workers or ranks were lost, or none could be started; a rerun resumes the stage."""


class ServerError(RetryableError):
    """A server that judges or samples does not answer; a rerun resumes the stage."""


class StorageError(GrpoError, RuntimeError):
    """An S3 object is missing, access-denied or changed; the message names the object."""


class MissingExtraError(GrpoError, ImportError):
    """An optional package is missing; the message names the extra that installs it."""


@contextmanager
def located(where: object) -> Iterator[None]:
    """Prepends a file or parameter path to the message of a GrpoError raised in the block."""
    try:
        yield
    except GrpoError as error:
        raise type(error)(f"{where}: {error}") from None


@contextmanager
def refused_by_library(refuse: Callable[[str], GrpoError]) -> Iterator[None]:
    """Converts any exception that a library raises on user-provided files into a GrpoError.

    The exception types cannot be listed: tokenizers, for example, raises Exception itself. A
    GrpoError raised in the block passes unchanged.

    Args:
      refuse: Maps the library's message to the error that is raised instead.
    """
    try:
        yield
    except GrpoError:
        raise
    except Exception as error:  # noqa: BLE001  see above
        raise refuse(brief(describe_error(error))) from None


def describe_error(error: BaseException) -> str:
    """Returns the type and the message of an error."""
    return f"{type(error).__name__}: {error}"
