"""Downloads end with the bytes that were stored, or with a line that says why not."""

import hashlib
import random
from pathlib import Path
from typing import Any

import pytest

from grpo.errors import StorageError
from grpo.runtime.storage.download import download_directory
from grpo.runtime.storage.upload import upload_directory
from tests.files import contents
from tests.storage.proxy import Fault, Proxy, Seen, cases, corrupt, refuse, slowly
from tests.storage.transfers import (
    BRISK,
    LARGEST,
    PART_BYTES,
    PARTS,
    download_object,
    kill_once,
    write_directory,
)

DOWNLOAD = """
import sys; from pathlib import Path
from grpo.runtime.storage.download import download_directory
from tests.storage.transfers import BRISK
uri, directory, sha256 = sys.argv[1:]
one_by_one = BRISK._replace(parts_at_once=1, timeout_seconds=60.0)
download_directory(uri, Path(directory), sha256=sha256, transfer=one_by_one)
"""


def is_range(seen: Seen) -> bool:
    return bool(seen.range)


def is_of_largest(seen: Seen) -> bool:
    return bool(seen.range) and seen.key.endswith(LARGEST)


def is_later_range(seen: Seen) -> bool:
    return bool(seen.range) and not seen.range.startswith("bytes=0-")


def sha256_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def stored(bucket: str, tmp_path: Path, proxy: Proxy) -> tuple[str, str, Path]:
    """A directory in S3: its URI, its digest, and where its bytes came from."""
    source = write_directory(tmp_path / "source")
    uri = f"s3://{bucket}/models/tiny"
    sha256 = upload_directory(source, uri, transfer=BRISK)
    proxy.clear()
    return uri, sha256, source


FAULTS = {
    "none": [],
    "cut in a part": [Fault(is_of_largest, 2, sent_fraction=0.5)],
    "cut at once": [Fault(is_range, 2, sent_fraction=0.0)],
    "too many requests": [Fault(lambda seen: True, 2, instead=refuse(503, "SlowDown"))],
    "no answer": [Fault(is_range, 1, before=slowly(1.5))],
    "another byte": [Fault(is_of_largest, 1, harm=corrupt)],
    "another manifest": [Fault(lambda seen: seen.key.endswith(".json"), 1, harm=corrupt)],
}


@pytest.mark.parametrize("faults", cases(FAULTS))
def test_a_round_trip_gives_the_same_bytes(
    stored: tuple[str, str, Path], tmp_path: Path, proxy: Proxy, faults: list[Fault]
):
    uri, sha256, source = stored
    for each in faults:
        proxy.inject(each)
    directory = tmp_path / "whole" / "model"
    download_directory(uri, directory, sha256=sha256, transfer=BRISK)
    assert contents(directory) == contents(source)
    assert [path.name for path in directory.parent.iterdir()] == ["model"]  # and nothing else


@pytest.mark.parametrize("seed", range(2))
def test_a_killed_download_fetches_only_what_is_missing(
    stored: tuple[str, str, Path], tmp_path: Path, proxy: Proxy, seed: int
):
    uri, sha256, source = stored
    draw = random.Random(seed)
    number, directory = draw.randint(2, PARTS), tmp_path / "model"
    moment = proxy.hold(number, is_of_largest, sent_fraction=draw.random())
    kill_once(moment, DOWNLOAD, uri, directory, sha256)
    assert not directory.exists()
    before = {(each.key, each.range) for each in proxy.parts()}
    proxy.clear()
    download_directory(uri, directory, sha256=sha256, transfer=BRISK)
    assert contents(directory) == contents(source)
    after = [(each.key, each.range) for each in proxy.parts()]
    assert len(after) == PARTS - number + 1  # of the file in which it was killed, the last one
    assert len(before & set(after)) == 1  # the part that was under way


def test_versions_of_an_object_are_never_mixed(
    bucket: str, client: Any, tmp_path: Path, proxy: Proxy
):
    old, new = (random.Random(seed).randbytes(PARTS * PART_BYTES) for seed in (1, 2))
    uri, path = f"s3://{bucket}/object", tmp_path / "object"
    client.put_object(Bucket=bucket, Key="object", Body=old)
    proxy.inject(Fault(is_later_range, 99, sent_fraction=0.5))
    with pytest.raises(StorageError, match=f"{uri}: every read ended early"):
        download_object(uri, path, sha256=sha256_of(new), transfer=BRISK)
    client.put_object(Bucket=bucket, Key="object", Body=new)
    proxy.clear()
    download_object(uri, path, sha256=sha256_of(new), transfer=BRISK)
    assert path.read_bytes() == new
    assert len(proxy.parts()) == PARTS  # the finished part of the old one too


def test_parts_that_are_gone_are_fetched_again(
    stored: tuple[str, str, Path], tmp_path: Path, proxy: Proxy
):
    uri, sha256, source = stored
    proxy.inject(Fault(is_later_range, 99, sent_fraction=0.5))
    with pytest.raises(StorageError, match=f"{LARGEST}: every read ended early"):
        download_directory(uri, tmp_path / "model", sha256=sha256, transfer=BRISK)
    (content,) = tmp_path.glob(".model.*.partial/content")
    content.unlink()
    proxy.clear()
    download_directory(uri, tmp_path / "model", sha256=sha256, transfer=BRISK)
    assert contents(tmp_path / "model") == contents(source)


def test_an_object_that_changes_while_it_is_read_is_begun_again(
    bucket: str, client: Any, tmp_path: Path, proxy: Proxy
):
    parts = 10
    old, new = (random.Random(seed).randbytes(parts * PART_BYTES) for seed in (1, 2))
    client.put_object(Bucket=bucket, Key="object", Body=old)

    def change() -> None:
        client.put_object(Bucket=bucket, Key="object", Body=new)

    proxy.inject(Fault(is_later_range, 1, before=change))
    path, one_by_one = tmp_path / "object", BRISK._replace(parts_at_once=1)
    download_object(f"s3://{bucket}/object", path, sha256=sha256_of(new), transfer=one_by_one)
    assert path.read_bytes() == new
    assert len(proxy.parts()) < 2 * parts  # the new one's are not fetched for the old one


def test_bytes_that_stay_wrong_are_one_line_and_no_file(
    stored: tuple[str, str, Path], tmp_path: Path, proxy: Proxy
):
    uri, sha256, source = stored
    proxy.inject(Fault(is_of_largest, 99, harm=corrupt))
    right = sha256_of((source / LARGEST).read_bytes())
    message = (
        f"^{uri}/{sha256}/{LARGEST}: must have SHA-256 {right}, got .*; upload it to another URI$"
    )
    with pytest.raises(StorageError, match=message):
        download_directory(uri, tmp_path / "model", sha256=sha256, transfer=BRISK)
    assert not (tmp_path / "model").exists()
    tries = [each for each in proxy.seen if each.method == "HEAD" and each.key.endswith(LARGEST)]
    assert len(tries) == BRISK.attempts


def test_a_download_replaces_what_was_there(stored: tuple[str, str, Path], tmp_path: Path):
    uri, sha256, source = stored
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "other").write_text("of before")
    download_directory(uri, tmp_path / "model", sha256=sha256, transfer=BRISK)
    assert contents(tmp_path / "model") == contents(source)


def test_another_directory_than_the_named_one_is_refused(
    stored: tuple[str, str, Path], tmp_path: Path
):
    uri, sha256, _ = stored
    with pytest.raises(
        StorageError, match=f"manifest.json: must have SHA-256 0{{64}}, got {sha256}"
    ):
        download_directory(uri, tmp_path / "model", sha256="0" * 64, transfer=BRISK)


@pytest.mark.parametrize("name", ["../out", "/out", "a/../../out", "a\\..\\out", "a//b", ".", ""])
def test_a_key_cannot_lead_out_of_the_directory(
    bucket: str, client: Any, tmp_path: Path, name: str
):
    content = f'{{"{name}": "{"0" * 64}"}}'.replace("\\", "\\\\").encode()
    client.put_object(Bucket=bucket, Key="model/manifest.json", Body=content)
    with pytest.raises(StorageError, match="a file must lie inside its directory, got") as raised:
        download_directory(
            f"s3://{bucket}/model", tmp_path / "model", sha256=sha256_of(content), transfer=BRISK
        )
    assert repr(name) in str(raised.value)


@pytest.mark.parametrize("content", [b"{", b"{}", b'{"a": 1}'])
def test_what_is_no_manifest_is_refused_in_one_line(
    bucket: str, client: Any, tmp_path: Path, content: bytes
):
    client.put_object(Bucket=bucket, Key="model/manifest.json", Body=content)
    with pytest.raises(StorageError, match=r"model/manifest.json: must be a manifest: ") as raised:
        download_directory(
            f"s3://{bucket}/model", tmp_path / "model", sha256=sha256_of(content), transfer=BRISK
        )
    assert "\n" not in str(raised.value)
