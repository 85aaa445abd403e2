"""Writes are atomic, digests see content, locks exclude."""

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo.errors import ArtifactError, BusyError
from grpo.runtime.artifacts import files
from grpo.runtime.artifacts.files import (
    ASIDE,
    TEMPORARY,
    atomic_path,
    digest,
    exclusive,
    read_json,
    remove,
    write_bytes,
    write_json,
)
from grpo.runtime.artifacts.tables import write_csv


def fail_while_writing(target: Path) -> None:
    with atomic_path(target) as temporary:
        temporary.write_text("half of")
        raise RuntimeError("killed")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path):
    target = tmp_path / "a.json"
    write_json(target, {"kept": True})
    with pytest.raises(RuntimeError):
        fail_while_writing(target)
    assert read_json(target) == {"kept": True}
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_failed_directory_leaves_the_old_one(tmp_path: Path):
    target = tmp_path / "policy"
    with atomic_path(target) as temporary:
        write_bytes(temporary / "weights", b"old")
    with pytest.raises(RuntimeError):
        fail_while_writing(target / "weights")
    with pytest.raises(RuntimeError):
        fail_while_writing(target)
    assert (target / "weights").read_bytes() == b"old"
    with atomic_path(target) as temporary:
        write_bytes(temporary / "other", b"new")
    assert os.listdir(target) == ["other"]
    assert os.listdir(tmp_path) == ["policy"]


def test_every_file_is_flushed_before_the_move_and_its_name_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Else a power failure could leave a name without its content."""
    done: list[str] = []

    def fsync(descriptor: int) -> None:
        done.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    def move(source: Path, target: Path) -> None:
        done.append("moved")
        source.rename(target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(files, "_replace", move)
    with atomic_path(tmp_path / "policy") as temporary:
        for index in range(20):
            (temporary / f"{index % 2}").mkdir(parents=True, exist_ok=True)
            (temporary / f"{index % 2}" / f"{index}").write_text("weights")
    moved = done.index("moved")
    assert len(set(done[:moved])) == 20
    assert all(each.startswith(f"{temporary}/") for each in done[:moved])
    assert done[moved + 1 :] == [str(tmp_path)]


def test_a_killed_writer_leaves_the_old_content(tmp_path: Path):
    target = tmp_path / "a.json"
    write_json(target, 1)
    code = (
        "import os, sys; from pathlib import Path\n"
        "from grpo.runtime.artifacts.files import atomic_path\n"
        "with atomic_path(Path(sys.argv[1])) as temporary:\n"
        "    temporary.write_text('half'); os._exit(9)\n"
    )
    result = subprocess.run([sys.executable, "-c", code, str(target)], check=False)
    assert result.returncode == 9
    assert read_json(target) == 1


def make_tree(tree: Path, *, files: int) -> None:
    tree.mkdir()
    for index in range(files):
        (tree / str(index)).touch()


def entries_of(tree: Path) -> int | None:
    """Returns the number of a directory's entries; None if there is none."""
    try:
        return len(os.listdir(tree))
    except FileNotFoundError:
        return None


def test_a_killed_removal_leaves_the_whole_directory_or_nothing(tmp_path: Path):
    """A rerun takes what is there for complete: checkpoints, batches, shards."""
    tree, number = tmp_path / "train@a-1", 20_000
    make_tree(tree, files=number)
    code = (
        "import sys; from pathlib import Path\n"
        "from grpo.runtime.artifacts.files import remove\n"
        "print(flush=True); remove(Path(sys.argv[1]))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tree)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    while entries_of(tree) == number:
        pass
    process.kill()
    process.communicate()
    assert entries_of(tree) in (None, number)
    if not tree.exists():
        make_tree(tree, files=1)
    remove(tree)
    assert os.listdir(tmp_path) == []


# What editors, other programs and people put beside a file "a.parquet".
PARTS = st.text("ab.~#%0129-", max_size=12)
OTHERS_FILES = st.one_of(
    PARTS.map(lambda part: f".a.parquet.{part}"),
    st.sampled_from(["tmp", "old", "swp", "txt", "lock", "grpo", f"{TEMPORARY}2", f"x{ASIDE}"]).map(
        lambda suffix: f".a.parquet.999999.{suffix}"
    ),
    st.sampled_from([TEMPORARY, ASIDE]).flatmap(
        lambda suffix: st.sampled_from(
            [f".a.parquet.{suffix}", f".a.parquet.x.{suffix}", f".a.parquet.0.{suffix}",
             f".a.parquet.-1.{suffix}", f".a.parquet.1.1.{suffix}", f".b.parquet.1.{suffix}",
             f"a.parquet.1.{suffix}", f".a.parquet.99999999999.{suffix}"]
        )
    ),
)  # fmt: skip


@given(name=OTHERS_FILES)
@example(name=".a.parquet.a.b")
@example(name=".a.parquet.999999.txt")
@settings(max_examples=60, deadline=None)
def test_a_file_of_anyone_else_beside_an_artifact_is_left_alone(
    name: str, tmp_path_factory: pytest.TempPathFactory
):
    folder = tmp_path_factory.mktemp("artifacts")
    (folder / name).write_text("theirs")
    write_bytes(folder / "a.parquet", b"ours")
    assert (folder / name).read_text() == "theirs"
    assert (folder / "a.parquet").read_bytes() == b"ours"


@pytest.mark.parametrize("suffix", [TEMPORARY, ASIDE])
def test_what_a_killed_writer_left_goes_with_the_next_write(tmp_path: Path, suffix: str):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = tmp_path / f".a[1].json.{ended.pid}.{suffix}"
    left.mkdir()
    running = tmp_path / f".a[1].json.{os.getppid()}.{suffix}"
    running.write_text("half")
    write_json(tmp_path / "a[1].json", 1)
    assert not left.exists()
    assert running.exists()


def test_what_a_killed_writer_left_goes_before_its_parent_has_noticed(tmp_path: Path):
    """Until then the writer is a zombie: its number is taken, and it writes no more."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    left = tmp_path / f".a.json.{ended.pid}.{TEMPORARY}"
    left.write_text("half of")
    write_json(tmp_path / "a.json", {})
    assert not left.exists()
    ended.wait()


def test_dvc_ignores_what_a_killed_writer_left():
    ignored = (Path(__file__).parents[2] / ".dvcignore").read_text().splitlines()
    assert {f".*.{TEMPORARY}", f".*.{ASIDE}"} <= set(ignored)


def test_json_is_canonical_and_refuses_nan(tmp_path: Path):
    write_json(tmp_path / "a.json", {"b": 1, "a": 0.1})
    assert (tmp_path / "a.json").read_text() == '{\n  "a": 0.1,\n  "b": 1\n}\n'
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "b.json", float("nan"))


def test_floats_of_a_csv_keep_all_their_digits(tmp_path: Path):
    value = 0.1 + 0.2
    write_csv(tmp_path / "a.csv", pd.DataFrame({"x": [value]}))
    assert float((tmp_path / "a.csv").read_text().split()[1]) == value


@pytest.mark.parametrize(
    "content", ["{", "\udcff", "[" * 200_000, "9" * 5000], ids=["open", "bytes", "deep", "digits"]
)
def test_a_broken_json_file_is_named(tmp_path: Path, content: str):
    path = tmp_path / "a.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ArtifactError, match=r"a.json: must be JSON"):
        read_json(path)


def test_a_large_file_is_read_again_only_if_it_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("grpo.runtime.artifacts.files.LARGE_BYTES", 8)
    monkeypatch.setattr("grpo.runtime.artifacts.files.TICK_SECONDS", 0.0)
    read = []
    sha256 = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *a: read.append(1) or sha256(*a))
    large, small = Path("large"), Path("small")
    large.write_bytes(b"12345678")
    small.write_bytes(b"1234")
    first = digest([large])
    assert digest([large]) == first
    assert len(read) == 1
    about = large.stat()
    time.sleep(0.02)  # some clocks of file systems tick 250 times a second
    large.write_bytes(b"87654321")
    os.utime(large, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert digest([large]) != first
    assert len(read) == 2
    time.sleep(0.02)
    large.write_bytes(b"12345678")
    assert digest([large]) == first
    assert digest([small]) == digest([small])
    assert len(read) == 5
    (known,) = Path(".work/hashes").iterdir()
    known.write_text("cut")
    assert digest([large]) == first
    monkeypatch.setattr(
        "grpo.runtime.artifacts.files.TICK_SECONDS", 60.0
    )  # it may change in this tick yet
    known.unlink()
    digest([large])
    assert not known.exists()


def test_a_large_file_that_is_written_need_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """But one that may change within the tick of the clock, and a small one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("grpo.runtime.artifacts.files.LARGE_BYTES", 8)
    read: list[str] = []
    sha256 = hashlib.file_digest
    monkeypatch.setattr(
        hashlib, "file_digest", lambda file, kind: read.append(file.name) or sha256(file, kind)
    )
    for tick, expected in ((0.0, {"small"}), (60.0, {"large", "small"})):
        monkeypatch.setattr("grpo.runtime.artifacts.files.TICK_SECONDS", tick)
        with atomic_path(Path("d"), hashes=True) as temporary:
            write_bytes(temporary / "large", b"12345678")
            write_bytes(temporary / "small", b"1234")
            time.sleep(0.02)  # some clocks of file systems tick 250 times a second
        read.clear()
        found = digest([Path("d")])
        assert {Path(each).name for each in read} == expected
        with monkeypatch.context() as uncached:
            uncached.setattr("grpo.runtime.artifacts.files.LARGE_BYTES", 2**20)
            assert digest([Path("d")]) == found


def test_a_large_file_with_several_names_is_hashed_when_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("grpo.runtime.artifacts.files.LARGE_BYTES", 8)
    monkeypatch.setattr("grpo.runtime.artifacts.files.TICK_SECONDS", 0.0)
    with atomic_path(Path("d"), hashes=True) as temporary:
        write_bytes(temporary / "large", b"12345678")
        write_bytes(temporary / "other", b"87654321")
        os.link(temporary / "large", temporary / "hard")
        (temporary / "soft").symlink_to("other")
        time.sleep(0.02)
    assert len(list(Path(".work/hashes").iterdir())) == 1  # of `other`
    assert digest([Path("d")]) == digest([Path("d")])


def test_a_digest_sees_names_contents_and_values(tmp_path: Path):
    write_bytes(tmp_path / "d" / "a", b"1")
    first = digest([tmp_path / "d"], {"x": 1})
    assert first == digest([tmp_path / "d"], {"x": 1})
    assert first != digest([tmp_path / "d"], {"x": 2})
    write_bytes(tmp_path / "d" / "a", b"2")
    assert first != digest([tmp_path / "d"], {"x": 1})


@contextmanager
def holding(lock: Path, work: str) -> Iterator[subprocess.Popen[str]]:
    """Yields a process that holds a lock, once its work has printed "held".

    Args:
      work: What it does with the lock: statements, indented by four spaces after the first line.
    """
    code = (
        "import os, sys, time; from pathlib import Path\n"
        "from grpo.runtime.artifacts.files import exclusive\n"
        f"with exclusive(Path(sys.argv[1]), 'other'):\n    {work}\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(lock)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        yield holder


def test_a_lock_is_held_by_one_process_and_freed_by_its_death(tmp_path: Path):
    lock = tmp_path / "lock"
    with holding(lock, "print('held', flush=True); sys.stdin.read()") as holder:
        with pytest.raises(BusyError, match="already running"), exclusive(lock, "this"):
            pass
        holder.kill()
    with exclusive(lock, "this"):
        pass


def test_a_rerun_waits_for_the_forks_of_a_killed_process(tmp_path: Path):
    """A fork keeps the lock until the kernel has ended it, too."""
    lock = tmp_path / "lock"
    fork = (
        "if os.fork() == 0:\n"
        "        print('held', flush=True); time.sleep(0.3); os._exit(0)\n"
        "    sys.stdin.read()"
    )
    with holding(lock, fork) as holder:
        holder.kill()
        with exclusive(lock, "this"):
            pass


def test_a_large_file_that_is_given_twice_is_hashed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Two threads that write the same entry of the cache would remove each other's temporary."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("grpo.runtime.artifacts.files.LARGE_BYTES", 8)
    monkeypatch.setattr("grpo.runtime.artifacts.files.TICK_SECONDS", 0.0)
    read: list[int] = []
    sha256 = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *a: read.append(1) or sha256(*a))
    large = Path("large")
    large.write_bytes(b"12345678")
    time.sleep(0.02)
    assert digest([large, large]) == digest([large, large])
    assert len(read) == 1


def test_large_files_that_are_hashed_side_by_side_have_the_same_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for index in range(5):
        (tmp_path / f"{index}.bin").write_bytes(os.urandom(2**16 + index))
    one_by_one = digest([tmp_path])
    monkeypatch.setattr(files, "LARGE_BYTES", 2**16 + 2)
    assert digest([tmp_path]) == one_by_one
