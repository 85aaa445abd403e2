"""DVC's remote, where the data of stages on other hosts is."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dvc.exceptions import DvcException
from dvc.repo import Repo

from grpo.errors import ArtifactError, brief


@contextmanager
def opened(workspace: Path) -> Iterator[Repo]:
    """Yields the repository to pull and push.

    Raises:
      ArtifactError: If the remote cannot be reached, or has not what is asked for.
    """
    try:
        with Repo(str(workspace), _wait_for_lock=True) as repo:
            yield repo
    except (DvcException, OSError, *_errors_of_s3()) as error:
        raise ArtifactError(
            f"DVC's remote (.dvc/config): {brief(error)}; see that this host reaches it, and run "
            "dvc push where the data was made"
        ) from None


def _errors_of_s3() -> tuple[type[Exception], ...]:
    """Returns what DVC lets through of a remote in S3."""
    try:
        from botocore.exceptions import BotoCoreError
    except ImportError:  # then there is no such remote
        return ()
    return (BotoCoreError,)
