"""What a person can get wrong is one line that says what to do, and nothing secret."""

import subprocess
import sys
from pathlib import Path

import pytest

from grpo.errors import StorageError
from grpo.runtime.storage.client import parse_uri
from grpo.runtime.storage.upload import upload_directory
from tests.files import contents
from tests.storage.conftest import SECRETS
from tests.storage.proxy import Fault, Proxy, refuse
from tests.storage.transfers import BRISK, write_directory

CREDENTIALS = "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, if they expire, AWS_SESSION_TOKEN"
SAID = " ".join(SECRETS.values())  # as S3 repeats an access key that it does not know


def fail(tmp_path: Path, uri: str) -> str:
    """Returns what is said of an upload that cannot be done."""
    source = write_directory(tmp_path / "source")
    before = contents(tmp_path)
    with pytest.raises(StorageError) as raised:
        upload_directory(source, uri, transfer=BRISK)
    assert contents(tmp_path) == before
    said = str(raised.value)
    assert "\n" not in said
    assert not any(secret in said for secret in SECRETS.values())
    return said


@pytest.mark.parametrize(
    "uri",
    ["models/a", "s3:/bucket/a", "s3://bucket", "s3://bucket/", "s3://B_T/a", "S3://b-t/a", ""],
)
def test_a_wrong_uri_is_named(uri: str):
    with pytest.raises(StorageError) as raised:
        parse_uri(uri)
    assert str(raised.value) == f"a URI must be s3://BUCKET/KEY, got {uri!r}"


def test_credentials_in_a_uri_are_not_repeated():
    with pytest.raises(StorageError, match=r"got 'bucket/a'$"):
        parse_uri("s3://AKIA:secret@bucket/a")


def test_a_location_reads_as_its_uri():
    assert str(parse_uri("s3://bucket/a/b//")) == "s3://bucket/a/b"


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (403, "AccessDenied", "access is denied; the role needs what infra/s3/ grants"),
        (403, "InvalidAccessKeyId", f"the credentials are refused; renew {CREDENTIALS}"),
        (400, "ExpiredToken", f"the credentials are refused; renew {CREDENTIALS}"),
        (403, "RequestTimeTooSkewed", "this machine's clock is wrong; set it"),
        (503, "SlowDown", "S3 answers SlowDown; rerun later"),
    ],
)
def test_a_refusal_says_what_to_do(
    bucket: str, tmp_path: Path, proxy: Proxy, status: int, code: str, message: str
):
    proxy.inject(Fault(lambda seen: True, 99, instead=refuse(status, code, SAID)))
    assert fail(tmp_path, f"s3://{bucket}/a") == f"s3://{bucket}/a/manifest.json: {message}"
    assert len(proxy.seen) == (BRISK.attempts if status == 503 else 1)


def test_a_bucket_that_is_not_there_is_named(proxy: Proxy, tmp_path: Path):
    assert fail(tmp_path, "s3://no-such-bucket/a") == (
        "s3://no-such-bucket/a/manifest.json: no such bucket; correct the URI, "
        "or create it with infra/s3/bootstrap.py"
    )


def test_absent_credentials_name_their_variables(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in SECRETS:
        monkeypatch.delenv(name)
    source = write_directory(tmp_path / "source")
    result = subprocess.run(
        [sys.executable, "-m", "grpo", "upload", source, "s3://bucket/a"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr == (
        "s3://bucket/a/manifest.json: there are no credentials; set AWS_ACCESS_KEY_ID, "
        "AWS_SECRET_ACCESS_KEY and, if they expire, AWS_SESSION_TOKEN\n"
    )


@pytest.mark.parametrize(
    ("endpoint", "message"),
    [
        ("http://127.0.0.1:1", "cannot be reached, EndpointConnectionError; check the network and"),
        ("nowhere", "AWS_ENDPOINT_URL_S3 must be a URL such as https://HOST:PORT"),
    ],
)
def test_an_endpoint_that_is_none_is_one_line(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endpoint: str, message: str
):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    assert message in fail(tmp_path, "s3://bucket/a")
