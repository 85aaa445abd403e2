"""The command that measures all that needs a GPU, on a CPU at tiny size."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.demo import RESULTS, ROOT
from benchmarks.gpu.__main__ import run_part
from benchmarks.gpu.page import write_page
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.sizes import Target
from benchmarks.seeds import read_folder
from grpo.modalities.tokens.vllm import PYTHON
from tests.vllm_python import MADE

MEASURED = "as measured before"
TWIN = "twin reasoning-qwen"
# tests/twins runs all twins.
CALLED = [name for name in PARTS if not name.startswith("twin") or name == TWIN]


def call(out: Path) -> list[str]:
    """Runs the command and returns its lines: one per part."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--size", "tiny"]
    chosen = [word for name in CALLED for word in ("--part", name)]
    done = subprocess.run(
        [*command, "--seconds", "1800", "--out", str(out), *chosen],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.long
def test_the_command_runs_every_part_on_a_cpu_and_repeats_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if MADE.exists():
        monkeypatch.setenv(PYTHON, str(MADE))
    lines = call(tmp_path)
    (run,) = first = [*read_folder(tmp_path / "gpu").values()]
    assert set(run["parts"]) == set(CALLED)
    assert {part["state"] for part in run["parts"].values()} <= {"done", "did not run"}, run
    absent = {name: part for name, part in run["parts"].items() if part["state"] != "done"}
    assert set(absent) <= {"vllm", "trl"}
    assert all("is not installed" in part["reason"] for part in absent.values())
    page = (tmp_path / "gpu.md").read_text()
    assert "There is no number of a GPU on this page" in page
    assert all(f"| {name} |" in page for name in CALLED)
    again = call(tmp_path)
    assert [line for line in again if not line.endswith(MEASURED)] == [
        line for line in lines if line.split(":")[0] in absent
    ]
    assert [*read_folder(tmp_path / "gpu").values()] == first


def test_a_part_that_cannot_run_says_why():
    on_cpu = Target(device="cpu", size="tiny")
    late = run_part("tests", on_cpu, seconds_left=1.0)
    assert late["state"] == "did not run"
    assert "call the command again" in late["reason"]


@pytest.mark.long
def test_a_part_that_fails_is_a_line():
    unknown = Target(device="cpu", size="none")
    failed = run_part("throughput 0.5B", unknown, seconds_left=300.0)
    assert failed["state"] == "failed"
    assert failed["reason"] == "KeyError: 'none'"


def test_the_page_is_that_of_the_results():
    assert (ROOT / "docs" / "gpu.md").read_text() == write_page(read_folder(RESULTS / "gpu"))
