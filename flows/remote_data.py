"""Access to DVC's remote, which holds the data of stages on other hosts."""

from collections.abc import Iterator
from contextlib import contextmanager

from dvc.exceptions import DvcException

from flows.planning import explain
from grpo.errors import ArtifactError, brief
from grpo.registry.remote import errors_of_s3
from grpo.runtime.artifacts.files import refused_by_the_system


@contextmanager
def reached() -> Iterator[None]:
    """Converts errors of a pull or push in the block to one line.

    Raises:
      ArtifactError: If the remote is unreachable or lacks the data, or the disk is full.
    """
    try:
        with refused_by_the_system():
            yield
    except (DvcException, OSError, *errors_of_s3()) as error:
        raise ArtifactError(
            f"DVC's remote (.dvc/config): {brief(explain(error))}; check that this host reaches "
            "it, and run dvc push where the data was made"
        ) from None
