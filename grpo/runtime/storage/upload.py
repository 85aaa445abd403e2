"""Resumable uploads to S3; of concurrent uploads to one URI exactly one succeeds."""

import hashlib
from base64 import b64encode
from pathlib import Path
from typing import Any

from grpo.errors import ArtifactError, StorageError
from grpo.runtime.storage.client import (
    USUAL,
    Location,
    Store,
    Transfer,
    TransientError,
    explained,
    parse_uri,
)
from grpo.runtime.storage.manifest import MANIFEST, describe, parse_manifest


def upload_directory(directory: Path, uri: str, *, transfer: Transfer = USUAL) -> str:
    """Uploads the files of a directory; resumes a killed upload.

    Returns:
      The SHA-256 of the manifest, which `download_directory` takes.

    Raises:
      ArtifactError: If the directory has no files, or they change during the upload.
      StorageError: If the URI holds another directory, or S3 is unreachable.
    """
    target, store = parse_uri(uri), Store(transfer)
    manifest = describe(directory)
    sha256 = hashlib.sha256(manifest).hexdigest()
    if _is_stored(store, target, manifest):
        return sha256
    for name in parse_manifest(manifest, target):
        _upload(store, directory / name, target.within(sha256).within(name))
    if describe(directory) != manifest:
        raise ArtifactError(f"{directory}: must not change while it is uploaded; rerun")
    _claim(store, target, manifest)
    return sha256


def _is_stored(store: Store, target: Location, manifest: bytes) -> bool:
    """Returns whether this manifest is stored.

    Raises:
      StorageError: If another manifest is stored.
    """
    location = target.within(MANIFEST)
    if _stored_bytes(store, location) is None:
        return False
    if store.read(location) != manifest:
        raise StorageError(f"{target}: must be free, got another directory; choose another URI")
    return True


def _claim(store: Store, target: Location, manifest: bytes) -> None:
    """Writes the manifest unless one exists.

    Raises:
      StorageError: If another manifest exists.
    """
    location = target.within(MANIFEST)

    def put() -> None:
        try:
            _put(store, location, manifest, {"IfNoneMatch": "*"})
        except TransientError:
            if not _is_stored(store, target, manifest):
                raise

    store.retried(put, TransientError)


def _upload(store: Store, path: Path, location: Location) -> None:
    """Uploads a file unless it is stored: its key is unique to its content."""

    def send() -> None:
        size = path.stat().st_size
        if _stored_bytes(store, location) == size:
            return
        if size <= store.transfer.part_bytes:
            _put(store, location, path.read_bytes(), {})
        else:
            _send_parts(store, path, location, size)

    store.retried(send, TransientError)


def _send_parts(store: Store, path: Path, location: Location, size: int) -> None:
    """Uploads the missing parts of a file and completes the multipart upload."""
    part_bytes = store.transfer.part_bytes
    place = {"Bucket": location.bucket, "Key": location.key}
    with explained(location):
        upload = {**place, "UploadId": _find_upload(store, location) or _begin(store, place)}
        pages = store.client.get_paginator("list_parts").paginate(**upload)
        sent = {each["PartNumber"]: each for page in pages for each in page.get("Parts", [])}

    def send(number: int) -> dict[str, Any]:
        with path.open("rb") as file:
            file.seek((number - 1) * part_bytes)
            body = file.read(part_bytes)
        checksum = _checksum(body)
        there = sent.get(number, {"Size": None})
        # Not every store lists part checksums, but all verify them on completion.
        if there["Size"] != len(body) or there.get("ChecksumSHA256", checksum) != checksum:
            with explained(location):
                there = store.client.upload_part(
                    **upload, PartNumber=number, Body=body, ChecksumSHA256=checksum
                )
        return {"PartNumber": number, "ETag": there["ETag"], "ChecksumSHA256": checksum}

    parts = store.each(send, range(1, -(-size // part_bytes) + 1))
    with explained(location):
        store.client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})


def _find_upload(store: Store, location: Location) -> str | None:
    """Returns the id of an unfinished multipart upload of an object, or None."""
    answer = store.client.list_multipart_uploads(Bucket=location.bucket, Prefix=location.key)
    begun = [each for each in answer.get("Uploads", []) if each["Key"] == location.key]
    return begun[0]["UploadId"] if begun else None


def _begin(store: Store, place: dict[str, str]) -> str:
    """Starts a multipart upload of an object; returns its id."""
    answer = store.client.create_multipart_upload(**place, ChecksumAlgorithm="SHA256")
    return str(answer["UploadId"])


def _put(store: Store, location: Location, body: bytes, conditions: dict[str, str]) -> None:
    """Writes an object in one request; S3 verifies its checksum."""
    with explained(location):
        store.client.put_object(
            Bucket=location.bucket,
            Key=location.key,
            Body=body,
            ChecksumSHA256=_checksum(body),
            **conditions,
        )


def _checksum(body: bytes) -> str:
    """Returns a SHA-256 in S3's base64 format."""
    return b64encode(hashlib.sha256(body).digest()).decode()


def _stored_bytes(store: Store, location: Location) -> int | None:
    """Returns the size of an object, or None if there is none."""
    with explained(location):
        answer = store.client.list_objects_v2(
            Bucket=location.bucket, Prefix=location.key, MaxKeys=1
        )
    found = [each["Size"] for each in answer.get("Contents", []) if each["Key"] == location.key]
    return found[0] if found else None
