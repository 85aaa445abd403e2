"""The exceptions a person can cause; a stage turns each into one line and exit code 2."""

from collections.abc import Iterator
from contextlib import contextmanager


class GrpoError(Exception):
    """States the rule, the value and the way out, in one line."""


class ParameterError(GrpoError, ValueError):
    """A parameter is wrong; the message starts with its file and path."""


class ArtifactError(GrpoError, ValueError):
    """A file is missing, truncated or breaks its contract; the message starts with its path."""


class UnsoundError(GrpoError, ValueError):
    """A combination of links breaks a composition rule of severity ERROR."""


class BusyError(GrpoError, RuntimeError):
    """Another process holds what this one needs."""


class StorageError(GrpoError, RuntimeError):
    """S3 lacks, refuses or has changed what is asked for; the message names the object."""


class MissingExtraError(GrpoError, ImportError):
    """An optional package is needed; the message says which extra installs it."""


@contextmanager
def located(where: object) -> Iterator[None]:
    """Puts a file or parameter path before the message of a GrpoError raised in the block."""
    try:
        yield
    except GrpoError as error:
        raise type(error)(f"{where}: {error}") from None
