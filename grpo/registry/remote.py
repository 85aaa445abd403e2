"""Push and pull of policies to and from DVC's remote, from which other clones load them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo.errors import ArtifactError, brief
from grpo.lineage.lock import cached_path, read_listing


def push(digests: Sequence[str], workspace: Path) -> None:
    """Pushes directories from DVC's cache to its default remote.

    Raises:
      ArtifactError: If there is no remote, it is unreachable, or the cache lacks a file.
    """
    # Imported here, as in `pull`: the import takes a second.
    from dvc_data.hashfile.hash_info import HashInfo

    wanted = [each for digest in digests for each in _parts(digest, workspace)]
    for digest in wanted:
        if not cached_path(workspace, digest).is_file():
            raise ArtifactError(
                f"{digest}: must be in DVC's cache, is missing; run dvc commit, then retry"
            )
    with _reached("store the policy"), _opened(workspace) as repo:
        if repo.config["core"].get("remote") is None:
            raise ArtifactError(
                ".dvc/config: core.remote must name where to push; run dvc remote add --default "
                "NAME URL, then again"
            )
        failed = repo.cloud.push([HashInfo("md5", each) for each in wanted]).failed
    if failed:
        raise ArtifactError(
            f"DVC's remote (.dvc/config): cannot store {brief(next(iter(failed)))}; retry"
        )


def pull(digest: str, workspace: Path) -> None:
    """Pulls a directory from the default remote into DVC's cache.

    Raises:
      ArtifactError: If there is no remote, or it is unreachable.
    """
    from dvc_data.hashfile.hash_info import HashInfo

    with _reached("provide the policy"), _opened(workspace) as repo:
        repo.cloud.pull([HashInfo("md5", digest)])
        repo.cloud.pull([HashInfo("md5", each) for each in _parts(digest, workspace)])


def errors_of_s3() -> tuple[type[Exception], ...]:
    """Returns the exceptions of an S3 remote that DVC does not convert."""
    try:
        from botocore.exceptions import BotoCoreError
    except ImportError:  # no S3 support installed
        return ()
    return (BotoCoreError,)


def _parts(digest: str, workspace: Path) -> list[str]:
    """Returns the digests of a directory and of its files."""
    return [digest, *(read_listing(workspace, digest) or {}).values()]


@contextmanager
def _opened(workspace: Path) -> Iterator[Any]:
    from dvc.repo import Repo

    with Repo(str(workspace)) as repo:
        yield repo


@contextmanager
def _reached(action: str) -> Iterator[None]:
    from dvc.exceptions import DvcException

    try:
        yield
    except (DvcException, OSError, *errors_of_s3()) as error:
        raise ArtifactError(
            f"DVC's remote (.dvc/config): cannot {action}, {brief(error)}"
        ) from None
