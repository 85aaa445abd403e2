"""DVC's remote, where the data of stages on other hosts is."""

from collections.abc import Iterator
from contextlib import contextmanager

from dvc.exceptions import DvcException

from flows.planning import explain
from grpo.errors import ArtifactError, brief
from grpo.registry.remote import errors_of_s3
from grpo.runtime.artifacts.files import refused_by_the_system


@contextmanager
def reached() -> Iterator[None]:
    """Has a pull or push in the block end in one line if it fails.

    Raises:
      ArtifactError: If the remote cannot be reached, or has not what is asked for, or there is no
        room for it here.
    """
    try:
        with refused_by_the_system():
            yield
    except (DvcException, OSError, *errors_of_s3()) as error:
        raise ArtifactError(
            f"DVC's remote (.dvc/config): {brief(explain(error))}; see that this host reaches it, "
            "and run dvc push where the data was made"
        ) from None
