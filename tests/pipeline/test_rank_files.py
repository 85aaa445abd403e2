"""Files of the first rank reach the ranks in other directories, whole and in parts."""

import os
from pathlib import Path

import pytest

from grpo.errors import ArtifactError
from grpo.runtime import rank_files
from grpo.runtime.artifacts.files import Scratch
from grpo.runtime.rank_files import bring, latest_checkpoint, leads_directory
from grpo.runtime.ranks import process_group
from tests.files import contents
from tests.pipeline.processes import start_function

SIZES = (0, 1, 6, 7, 8, 20)  # in bytes; parts have 7
LONGEST_SECONDS = 60.0


def work_as(rank: int, folder: Path, place: str, store: Path) -> None:
    """Is one of three ranks; the first two share a host and a directory."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "3", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": str(2 - rank // 2)}
    os.chdir(folder / place)
    Path(".work").mkdir(exist_ok=True)
    rank_files.PART_BYTES = 7
    scratch = Scratch("stage", "f" * 64)
    with process_group(3, "cpu", store=store):
        assert latest_checkpoint(scratch) is None
        if rank == 0:
            scratch.save(12, write)
        found = latest_checkpoint(scratch)
        assert found is not None
        number, path = found
        assert number == 12
        assert contents(path) == {f"{size}": bytes(range(size)) for size in SIZES}
        table = Path("table")
        if rank == 0:
            table.write_bytes(b"a table")
        bring(table)
        assert table.read_bytes() == b"a table"
        is_apart = place != "first"
        assert leads_directory() == (rank == 0 or is_apart)
        if (folder / "second").exists():
            with pytest.raises(ArtifactError, match="the first rank must have it"):
                bring(Path("missing"))
        if rank == 0:
            assert [each.name for each in Path(".work").iterdir()] == ["stage"]


def write(directory: Path) -> None:
    for size in SIZES:
        (directory / f"{size}").write_bytes(bytes(range(size)))


@pytest.mark.parametrize("last", [pytest.param("first", marks=pytest.mark.long), "second"])
def test_files_of_the_first_rank_reach_every_directory(last: str, tmp_path: Path):
    places = ["first", "first", last]  # of each rank
    for place in {*places}:
        (tmp_path / place).mkdir()
    started = [
        start_function(work_as, rank, tmp_path, place, tmp_path / "store")
        for rank, place in enumerate(places)
    ]
    for process in started:
        process.join(LONGEST_SECONDS)
    codes = [process.exitcode for process in started]
    for process in started:
        process.kill()
    assert codes == [0, 0, 0]
