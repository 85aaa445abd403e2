"""Uploads: parts that S3 has are not sent again, and of many uploads of a directory one wins."""

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
    """Uploads the files of a directory; a killed upload goes on where it ended.

    Returns:
      The SHA-256 of its manifest, which downloads ask for.

    Raises:
      ArtifactError: If the directory has no files, or they change meanwhile.
      StorageError: If another directory is there, or S3 is out of reach.
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
    """Returns whether a manifest is there.

    Raises:
      StorageError: If another one is.
    """
    location = target.within(MANIFEST)
    if _stored_bytes(store, location) is None:
        return False
    if store.read(location) != manifest:
        raise StorageError(
            f"{target}: must be free, another directory is there; choose another URI"
        )
    return True


def _claim(store: Store, target: Location, manifest: bytes) -> None:
    """Writes the manifest if there is none.

    Raises:
      StorageError: If there is another one.
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
    """Uploads a file unless it is there: its key is of these bytes alone."""

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
    """Sends the parts of a file that S3 does not have, and joins them."""
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
        # Not every store lists the checksums of parts; all compare them when parts are joined.
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
    """Returns the id of an upload of an object that has begun and not ended."""
    answer = store.client.list_multipart_uploads(Bucket=location.bucket, Prefix=location.key)
    begun = [each for each in answer.get("Uploads", []) if each["Key"] == location.key]
    return begun[0]["UploadId"] if begun else None


def _begin(store: Store, place: dict[str, str]) -> str:
    """Returns the id of a new upload of an object."""
    answer = store.client.create_multipart_upload(**place, ChecksumAlgorithm="SHA256")
    return str(answer["UploadId"])


def _put(store: Store, location: Location, body: bytes, conditions: dict[str, str]) -> None:
    """Writes an object in one request; S3 refuses it if other bytes arrive."""
    with explained(location):
        store.client.put_object(
            Bucket=location.bucket,
            Key=location.key,
            Body=body,
            ChecksumSHA256=_checksum(body),
            **conditions,
        )


def _checksum(body: bytes) -> str:
    """Returns a SHA-256 as S3 writes it."""
    return b64encode(hashlib.sha256(body).digest()).decode()


def _stored_bytes(store: Store, location: Location) -> int | None:
    """Returns the size of an object, or None if there is none."""
    with explained(location):
        answer = store.client.list_objects_v2(
            Bucket=location.bucket, Prefix=location.key, MaxKeys=1
        )
    found = [each["Size"] for each in answer.get("Contents", []) if each["Key"] == location.key]
    return found[0] if found else None
