"""S3 goes away in the middle of a transfer, for longer than botocore would wait."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo.errors import StorageError
from grpo.runtime.storage.client import USUAL
from grpo.runtime.storage.download import download_directory
from grpo.runtime.storage.upload import upload_directory
from tests.faults import FaultLine
from tests.files import contents
from tests.storage.proxy import Fault, Proxy, Seen
from tests.storage.transfers import BRISK, PART_BYTES, write_directory

PATIENT = BRISK._replace(outage_seconds=USUAL.outage_seconds, parts_at_once=1)


class Outage:
    """Every connection is cut from a moment on, for some seconds and more often than botocore asks.

    Args:
      begins: With the first request that fits.
    """

    def __init__(self, begins: Callable[[Seen], bool], seconds: float) -> None:
        self.begins = begins
        self.seconds = seconds
        self.began: float | None = None
        self.cut = 0
        self.ended: float | None = None
        self.answered: list[str] = []

    def __call__(self, seen: Seen) -> bool:
        is_cut = self._is_on(seen, time.monotonic())
        if is_cut:
            self.cut += 1
        else:
            self.answered.append(str(seen))
        return is_cut

    def _is_on(self, seen: Seen, now: float) -> bool:
        if self.began is None and self.begins(seen):
            self.began = now
        if self.began and self.cut > PATIENT.attempts and now - self.began >= self.seconds:
            self.ended = self.ended or now
        return self.began is not None and self.ended is None


def is_later_part(seen: Seen) -> bool:
    return seen.is_part and seen.query.get("partNumber", ["2"]) != ["1"]


@pytest.mark.fault
@pytest.mark.parametrize("way", ["download", "upload"])
def test_a_transfer_outlasts_an_outage(
    bucket: str, tmp_path: Path, proxy: Proxy, fault: FaultLine, way: str
):
    source, uri = write_directory(tmp_path / "source"), f"s3://{bucket}/policy"
    used = USUAL._replace(part_bytes=PART_BYTES) if fault.outage_seconds else PATIENT
    outage = Outage(is_later_part, fault.outage_seconds)
    if way == "upload":
        proxy.inject(Fault(outage, 10**6, heard_fraction=0.0))
    sha256 = upload_directory(source, uri, transfer=used)
    if way == "download":
        proxy.inject(Fault(outage, 10**6, heard_fraction=0.0))
    download_directory(uri, tmp_path / "copy", sha256=sha256, transfer=used)
    whole = time.monotonic()
    before, after = contents(source), contents(tmp_path / "copy")
    assert outage.began is not None
    parts = [each for each in outage.answered if "partNumber" in each or "bytes=" in each]
    assert len(set(parts)) == len(parts) > 1
    fault.recovery_seconds = whole - outage.began - outage.seconds
    fault.tell(
        f"S3 down for {outage.seconds:g} s in the middle of {way}ing",
        "requests were sent again until S3 answered; finished parts were not",
        lost=[name for name, content in before.items() if after.get(name) != content],
    )


@pytest.mark.long
def test_an_outage_without_end_and_a_wrong_address_are_given_up(
    bucket: str, tmp_path: Path, proxy: Proxy
):
    source, brief = write_directory(tmp_path / "source"), PATIENT._replace(outage_seconds=0.5)
    for begins, is_waited_for in [(is_later_part, True), (lambda seen: True, False)]:
        outage = Outage(begins, 60.0)
        proxy.clear()
        proxy.inject(Fault(outage, 10**6, heard_fraction=0.0))
        with pytest.raises(StorageError, match=r"cannot be reached, .*; check the network and AWS"):
            upload_directory(source, f"s3://{bucket}/policy", transfer=brief)
        assert (outage.cut > brief.attempts) == is_waited_for
