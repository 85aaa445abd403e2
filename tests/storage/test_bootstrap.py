"""The bucket as infra/s3/ makes it, and what its roles may do there."""

import json
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from grpo.runtime.storage.download import download_directory
from grpo.runtime.storage.upload import upload_directory
from tests.storage.proxy import Fault, Proxy, Seen, refuse
from tests.storage.transfers import BRISK, write_directory

BOOTSTRAP = Path(__file__).parents[2] / "infra" / "s3" / "bootstrap.py"
BUCKET = "bootstrapped"
ROLES = {role: f"arn:aws:iam::123456789012:role/{role}" for role in ("trainer", "reader")}
COMMAND = [
    *(sys.executable, BOOTSTRAP, BUCKET),
    *(part for role, arn in ROLES.items() for part in (f"--{role}", arn)),
]


def as_list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def is_granted(statements: list[dict[str, Any]], role: str, action: str, resource: str) -> bool:
    """Returns whether a bucket's policy lets a role do something."""
    return any(
        each["Effect"] == "Allow"
        and each["Principal"] == {"AWS": ROLES[role]}
        and action in as_list(each["Action"])
        and any(fnmatchcase(resource, pattern) for pattern in as_list(each["Resource"]))
        for each in statements
    )


def permission_for(seen: Seen) -> tuple[str, str]:
    """Returns the action and the resource that S3 asks its policies about."""
    bucket, object_ = f"arn:aws:s3:::{BUCKET}", f"arn:aws:s3:::{seen.key}"
    if "list-type" in seen.query:
        return "s3:ListBucket", bucket
    if seen.method == "GET" and "uploads" in seen.query:
        return "s3:ListBucketMultipartUploads", bucket
    if seen.method == "GET" and "uploadId" in seen.query:
        return "s3:ListMultipartUploadParts", object_
    return "s3:GetObject" if seen.method in {"GET", "HEAD"} else "s3:PutObject", object_


def test_the_bucket_is_versioned_encrypted_and_not_public(
    proxy: Proxy, client: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    name = f"{BUCKET}-elsewhere"
    for _ in range(2):  # the second time it is there
        subprocess.run([name if part == BUCKET else part for part in COMMAND], check=True)
    assert client.get_bucket_location(Bucket=name)["LocationConstraint"] == "eu-west-1"
    assert client.get_bucket_versioning(Bucket=name)["Status"] == "Enabled"
    blocked = client.get_public_access_block(Bucket=name)["PublicAccessBlockConfiguration"]
    assert len(blocked) == 4
    assert all(blocked.values())
    encryption = client.get_bucket_encryption(Bucket=name)["ServerSideEncryptionConfiguration"]
    default = encryption["Rules"][0]["ApplyServerSideEncryptionByDefault"]
    assert default == {"SSEAlgorithm": "AES256"}
    left = client.get_bucket_lifecycle_configuration(Bucket=name)["Rules"][0]
    assert left["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 7}


def test_roles_may_do_what_the_library_asks_for_and_no_more(
    tmp_path: Path, proxy: Proxy, client: Any
):
    subprocess.run(COMMAND, check=True)
    proxy.clear()
    policy = json.loads(client.get_bucket_policy(Bucket=BUCKET)["Policy"])
    statements: list[dict[str, Any]] = policy["Statement"]
    source, uri = write_directory(tmp_path / "source"), f"s3://{BUCKET}/runs/one"
    sha256 = upload_directory(source, uri, transfer=BRISK)
    assert upload_directory(source, uri, transfer=BRISK) == sha256
    written = {permission_for(each) for each in proxy.seen}
    proxy.clear()
    download_directory(uri, tmp_path / "copy", sha256=sha256, transfer=BRISK)
    read = {permission_for(each) for each in proxy.seen}
    assert all(is_granted(statements, "trainer", *each) for each in written | read)
    assert all(is_granted(statements, "reader", *each) for each in read)
    granted = {action for each in statements for action in as_list(each["Action"])}
    assert granted == {action for action, _ in written | read}
    for role, key in [("trainer", "models/one"), ("trainer", "other"), ("reader", "runs/one")]:
        assert not is_granted(statements, role, "s3:PutObject", f"arn:aws:s3:::{BUCKET}/{key}")


def test_who_may_not_make_buckets_is_told_in_one_line(proxy: Proxy):
    proxy.inject(Fault(lambda seen: True, 1, instead=refuse(403, "AccessDenied")))
    result = subprocess.run(COMMAND, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith(f"s3://{BUCKET}/: access is denied; ")
    assert result.stderr.count("\n") == 1
