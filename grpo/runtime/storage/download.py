"""Resumable downloads from S3 that verify every file before they replace the target."""

from pathlib import Path
from typing import Any

from grpo.runtime.artifacts.files import exclusive, remove, replace_whole, sha256_of
from grpo.runtime.storage.client import (
    USUAL,
    Location,
    Store,
    Transfer,
    TransientError,
    explained,
    parse_uri,
)
from grpo.runtime.storage.manifest import read_manifest

CONTENT = "content"  # bytes of the current object
FINISHED = "finished"  # version of the current object, then the offsets of finished parts


def download_directory(
    uri: str, directory: Path, *, sha256: str, transfer: Transfer = USUAL
) -> None:
    """Downloads a directory stored by `upload_directory`; replaces the local directory.

    A killed download leaves a hidden sibling directory, from which the next call resumes.

    Args:
      sha256: SHA-256 of the manifest, as returned by `upload_directory`.

    Raises:
      StorageError: If the directory is missing, incomplete, different or unreachable.
      BusyError: If another process is downloading it.
    """
    source, store = parse_uri(uri), Store(transfer)
    work = directory.with_name(f".{directory.name}.{sha256[:16]}.partial")
    with exclusive(work / "lock", f"a download of {source}"):
        whole = work / "whole"
        for name, expected in read_manifest(store, source, sha256).items():
            if not (whole / name).exists():
                target = source.within(sha256).within(name)
                _download(store, target, whole / name, expected, work)
        replace_whole(whole, directory)
        remove(work)


def _download(store: Store, location: Location, path: Path, sha256: str, work: Path) -> None:
    """Downloads an object; restarts if the checksum differs or the object changes."""

    def fetch() -> None:
        with explained(location):
            head = store.client.head_object(Bucket=location.bucket, Key=location.key)
        _fetch_parts(store, location, head, work)
        found = sha256_of(work / CONTENT)
        if found != sha256:
            remove(work / FINISHED)
            raise TransientError(
                f"{location}: must have SHA-256 {sha256}, got {found}; upload it to another URI"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_whole(work / CONTENT, path)

    store.retried(fetch, TransientError)


def _fetch_parts(store: Store, location: Location, head: dict[str, Any], work: Path) -> None:
    """Downloads the parts of an object that are not on disk yet."""
    content, finished = work / CONTENT, work / FINISHED
    size, part_bytes = head["ContentLength"], store.transfer.part_bytes
    version = f"{location} {head['ETag']} in parts of {part_bytes} bytes"
    there = finished.read_text().splitlines() if finished.exists() else []
    if there[:1] != [version] or not content.exists():
        there = []
        content.write_bytes(b"")
        finished.write_text(f"{version}\n")

    def fetch(start: int) -> None:
        end = min(start + part_bytes, size)
        part = store.read_range(location, start, end, etag=head["ETag"])
        with content.open("r+b") as file:
            file.seek(start)
            file.write(part)
        with finished.open("a") as file:
            file.write(f"{start}\n")

    starts = range(0, size, part_bytes)
    store.each(fetch, [start for start in starts if str(start) not in there])
