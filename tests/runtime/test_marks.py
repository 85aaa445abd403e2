"""Laws of marks: a page says of every later stage that it failed, was killed, or changed it."""

import html
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from grpo.errors import ParameterError
from grpo.runtime.artifacts.files import write_bytes
from grpo.runtime.artifacts.marks import (
    ARTIFACTS,
    PAGE,
    banners_of,
    changed_inputs,
    clear,
    fail,
    hash_inputs,
    marked,
    read_marks,
    stamps,
)

ROOT = Path(__file__).parents[2]
REWARDS = Path("artifacts/rewards/a-1.parquet")
CHECK = Path("artifacts/profile_needed.json")
KILLED = """
import os, signal
from stages.entry import run

run(lambda usage, name: os.kill(os.getpid(), getattr(signal, str(name))), stage="train")
"""


@pytest.fixture(autouse=True)
def _drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A workspace with a page of what is there."""
    monkeypatch.chdir(tmp_path)
    write_bytes(REWARDS, b"1")
    draw()


def draw() -> None:
    record = html.escape(json.dumps(hash_inputs(ARTIFACTS)))
    write_bytes(PAGE, f'<meta name="inputs" content="{record}">{stamps([])}'.encode())


def banners() -> int:
    return PAGE.read_text().count('class="banner"')


@contextmanager
def failing(stage: str, reason: str) -> Iterator[None]:
    with suppress(ParameterError), marked(stage, [REWARDS]):
        yield
        raise ParameterError(reason)


def test_a_failed_stage_stands_on_the_page_until_it_succeeds() -> None:
    for reason in ("arms.a.x must be 1", "arms.a.x must be 2"):
        with failing("score@a-1", reason):
            assert banners() == 1  # it has started and not ended
        assert banners() == 1
        assert f"score@a-1 failed</strong> {reason}" in PAGE.read_text()
    with marked("score@a-1", [REWARDS]):
        assert banners() == 1
    assert banners() == 0
    assert read_marks() == []


def test_a_bug_and_a_signal_to_python_leave_a_mark_and_reach_the_caller() -> None:
    for error in (ZeroDivisionError("by 0"), KeyboardInterrupt()):
        with pytest.raises(type(error)), marked("train@a-1", []):
            raise error
        (mark,) = read_marks()
        assert (mark.state, mark.reason) == ("failed", str(error) or "KeyboardInterrupt")


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_a_killed_stage_stands_on_the_page(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, name],
        env={**os.environ, "PYTHONPATH": str(ROOT), "DVC_STAGE": "train@a-1"},
    )
    assert done.returncode == -signal.Signals[name]
    assert "<strong>train@a-1 has not ended</strong>" in PAGE.read_text()


@pytest.mark.parametrize(
    "stage", ["prepare", "base", "profile", "curriculum@a", "rollout@a-1", "score@a-1", "train@a-1"]
)
def test_a_page_is_older_than_what_a_stage_has_changed_until_it_is_drawn_again(stage: str) -> None:
    with marked(stage, [Path("data"), REWARDS]):
        write_bytes(REWARDS, b"2")
    assert "older than its inputs" in PAGE.read_text()
    assert stage in PAGE.read_text()
    assert changed_inputs(PAGE, ARTIFACTS) == ["rewards/a-1.parquet"]
    with marked("report", [ARTIFACTS, PAGE.parent]):
        draw()
        clear([stage])
    assert banners() == 0


def test_a_stage_that_writes_the_same_bytes_makes_no_page_old() -> None:
    with marked("score@a-1", [REWARDS]):
        REWARDS.unlink()  # as DVC does before it runs a stage
        write_bytes(REWARDS, b"1")
    assert banners() == 0


def test_what_another_stage_has_changed_is_not_this_stages_doing() -> None:
    write_bytes(Path("artifacts/rewards/b-1.parquet"), b"2")
    with marked("score@a-1", [REWARDS]):
        pass
    assert read_marks() == []


def test_what_the_page_does_not_show_makes_no_page_old() -> None:
    with marked("check", [Path("params.yaml"), CHECK]):
        write_bytes(CHECK, b"{}")
    with marked("train@a-1", [Path("artifacts/policies/a-1")]):
        write_bytes(Path("artifacts/policies/a-1/model.safetensors"), b"weights")
    assert banners() == 0


def test_the_copy_of_the_page_that_lineage_keeps_says_nothing_of_lineage() -> None:
    with marked("lineage", [Path()]):
        assert banners() == 0


def test_stages_side_by_side_lose_no_mark() -> None:
    names = [f"train@a-{i}" for i in range(24)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: fail(name, ParameterError("no")), names))
    assert banners() == len(names)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: clear([name]), names))
    assert banners() == 0


def test_without_a_page_stages_are_marked_all_the_same() -> None:
    PAGE.unlink()
    with failing("base", "nothing to read"):
        pass
    assert [str(each) for each in banners_of(read_marks())] == [
        "base failed: nothing to read. Nothing of it is shown."
    ]
    assert not PAGE.exists()


def test_a_broken_mark_says_nothing() -> None:
    write_bytes(Path(".work/marks/base.json"), b"{")
    assert read_marks() == []
