"""Uploads are whole or absent, sent once, and won by one."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256 as hash_of
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from grpo.errors import ArtifactError, StorageError
from grpo.runtime.storage.download import download_directory
from grpo.runtime.storage.manifest import describe
from grpo.runtime.storage.upload import upload_directory
from tests.files import contents
from tests.storage.proxy import Fault, Proxy, Seen, cases, refuse, slowly
from tests.storage.transfers import BRISK, LARGEST, PARTS, kill_once, write_directory

UPLOAD = """
import sys; from pathlib import Path
from grpo.runtime.storage.upload import upload_directory
from tests.storage.transfers import BRISK
directory, uri = sys.argv[1:]
one_by_one = BRISK._replace(parts_at_once=1, timeout_seconds=60.0)
upload_directory(Path(directory), uri, transfer=one_by_one)
"""


def is_sent_part(seen: Seen) -> bool:
    return "partNumber" in seen.query


def is_manifest(seen: Seen) -> bool:
    return seen.method == "PUT" and seen.key.endswith("manifest.json")


def is_join(seen: Seen) -> bool:
    return seen.method == "POST" and "uploadId" in seen.query


FAULTS = {
    "cut in a part": [Fault(is_sent_part, 2, heard_fraction=0.5)],
    "a lost answer to the join": [Fault(is_join, 1, sent_fraction=0.5)],
    "a lost answer to the manifest": [
        Fault(is_manifest, 1, harm=lambda answer: refuse(500, "InternalError"))
    ],
    "too many requests": [Fault(lambda seen: True, 2, instead=refuse(503, "SlowDown"))],
    "no answer": [Fault(is_sent_part, 1, before=slowly(1.5))],
    "an upload that another ended": [Fault(is_sent_part, 1, instead=refuse(404, "NoSuchUpload"))],
    "a damaged part": [Fault(is_sent_part, 1, instead=refuse(400, "BadDigest"))],
    "a conflict": [Fault(is_manifest, 1, instead=refuse(409, "ConditionalRequestConflict"))],
}


@pytest.mark.parametrize("faults", cases(FAULTS))
def test_an_upload_under_faults_is_whole(
    bucket: str, tmp_path: Path, proxy: Proxy, faults: list[Fault]
):
    for each in faults:
        proxy.inject(each)
    source, uri = write_directory(tmp_path / "source"), f"s3://{bucket}/a/policy"
    sha256 = upload_directory(source, uri, transfer=BRISK)
    download_directory(uri, tmp_path / "copy", sha256=sha256, transfer=BRISK)
    assert contents(tmp_path / "copy") == contents(source)


@pytest.mark.parametrize("seed", range(2))
def test_a_killed_upload_sends_only_what_is_missing(
    bucket: str, tmp_path: Path, proxy: Proxy, seed: int
):
    source, uri = write_directory(tmp_path / "source"), f"s3://{bucket}/policy"
    number = random.Random(seed).randint(2, PARTS)
    kill_once(proxy.hold(number, is_sent_part, sent_fraction=None), UPLOAD, source, uri)
    sha256 = hash_of(describe(source)).hexdigest()
    with pytest.raises(StorageError, match=r"manifest.json: no such object; .*grpo upload"):
        download_directory(uri, tmp_path / "copy", sha256=sha256, transfer=BRISK)
    proxy.clear()
    assert upload_directory(source, uri, transfer=BRISK) == sha256
    assert len(proxy.parts()) == PARTS - number + 1
    assert [each.key for each in proxy.seen if each.method == "PUT" and not each.is_part] == [
        f"{bucket}/policy/manifest.json"  # the other files are there
    ]
    download_directory(uri, tmp_path / "copy", sha256=sha256, transfer=BRISK)
    assert contents(tmp_path / "copy") == contents(source)


def test_of_two_uploads_to_one_place_one_wins(bucket: str, tmp_path: Path, proxy: Proxy):
    uri, both = f"s3://{bucket}/policy", Barrier(2)
    proxy.inject(Fault(is_manifest, 2, before=lambda: both.wait(60)))
    sources = [write_directory(tmp_path / f"source-{seed}", seed) for seed in range(2)]

    def upload(source: Path) -> str:
        try:
            return upload_directory(source, uri, transfer=BRISK._replace(timeout_seconds=60.0))
        except StorageError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(upload, sources))
    lost = f"{uri}: must be free, got another directory; choose another URI"
    assert said.count(lost) == 1
    winner = 1 - said.index(lost)
    download_directory(uri, tmp_path / "copy", sha256=said[winner], transfer=BRISK)
    assert contents(tmp_path / "copy") == contents(sources[winner])


def test_two_that_resume_the_same_upload_both_win(
    bucket: str, client: Any, tmp_path: Path, proxy: Proxy
):
    source, joins, manifests = write_directory(tmp_path / "source"), Barrier(2), Barrier(2)
    sha256 = hash_of(describe(source)).hexdigest()
    client.create_multipart_upload(Bucket=bucket, Key=f"policy/{sha256}/{LARGEST}")
    proxy.inject(Fault(is_join, 2, before=lambda: joins.wait(60)))
    proxy.inject(Fault(is_manifest, 2, before=lambda: manifests.wait(60)))

    def upload(_: int) -> str:
        patient = BRISK._replace(timeout_seconds=60.0)
        return upload_directory(source, f"s3://{bucket}/policy", transfer=patient)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(upload, range(2))) == [sha256, sha256]


def test_what_is_there_is_not_sent_again_and_not_replaced(
    bucket: str, tmp_path: Path, proxy: Proxy
):
    source, uri = write_directory(tmp_path / "source"), f"s3://{bucket}/policy"
    sha256 = upload_directory(source, uri, transfer=BRISK)
    proxy.clear()
    assert upload_directory(source, uri, transfer=BRISK) == sha256
    with pytest.raises(StorageError, match=f"{uri}: must be free, got another directory"):
        upload_directory(write_directory(tmp_path / "other", 1), uri, transfer=BRISK)
    assert {each.method for each in proxy.seen} == {"GET"}


def test_a_directory_that_changes_meanwhile_is_not_called_whole(
    bucket: str, tmp_path: Path, client: Any, proxy: Proxy
):
    source = write_directory(tmp_path / "source")
    config = source / "config.json"
    proxy.inject(Fault(is_sent_part, 1, before=lambda: config.write_text("changed")))
    with pytest.raises(ArtifactError, match=r"source: must not change while it is uploaded; rerun"):
        upload_directory(source, f"s3://{bucket}/policy", transfer=BRISK)
    found = client.list_objects_v2(Bucket=bucket, Prefix="policy/manifest.json")
    assert found["KeyCount"] == 0


def test_the_manifest_says_the_checksum_of_every_file(bucket: str, tmp_path: Path, client: Any):
    source = write_directory(tmp_path / "source")
    sha256 = upload_directory(source, f"s3://{bucket}/policy", transfer=BRISK)
    stored = client.get_object(Bucket=bucket, Key="policy/manifest.json")["Body"].read()
    assert hash_of(stored).hexdigest() == sha256
    assert json.loads(stored) == {
        name: hash_of(content).hexdigest() for name, content in contents(source).items()
    }


@pytest.mark.parametrize(
    ("name", "message"),
    [(None, "must be a directory with files"), ("a\\b", r"got 'a.*b'; rename the file$")],
    ids=["no files", "no key"],
)
def test_a_directory_that_cannot_be_stored_is_named(
    tmp_path: Path, proxy: Proxy, name: str | None, message: str
):
    source = tmp_path / "source"
    source.mkdir()
    if name:
        (source / name).write_text("")
    with pytest.raises(ArtifactError, match=f"^{source}: .*{message}"):
        upload_directory(source, "s3://bucket/policy", transfer=BRISK)
    assert proxy.seen == []
