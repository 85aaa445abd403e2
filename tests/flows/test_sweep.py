"""Sweeps: every combination once, what they share once, and a table of what came out."""

import subprocess
import sys
from pathlib import Path

import pytest

from grpo.errors import ParameterError
from tests import tiny_pipeline

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
Environment = dict[str, str]
SETTINGS = ("--set", "rounds.a-1.rate=0.3,0.4", "--set", "seed=1")
NUMBERS = """{"value": number, "arms": {"a": {"gain_over_base": {"value": number % 97}}}}"""


def sweep(
    workspace: Path, environment: Environment, *words: str
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "flows.sweep", *words],
        cwd=workspace,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def starts(said: str, stage: str) -> int:
    """Returns how often the tiny pipeline's `stage` said that it works."""
    return said.count(f" working on {stage}\n")


@pytest.mark.long
def test_every_combination_runs_once_and_the_table_shows_what_came_out(
    finished_pipeline: Path, prefect_environment: Environment
) -> None:
    work = finished_pipeline / "work.py"
    plain = """{"value": number, "word": "no number"}"""
    assert plain in work.read_text()
    work.write_text(work.read_text().replace(plain, NUMBERS))
    tiny_pipeline.commit(finished_pipeline, "a report of gains")
    done = sweep(finished_pipeline, prefect_environment, *SETTINGS)
    assert done.returncode == 0, done.stderr
    title, _, *rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()]
    assert title == ["experiment", "rounds.a-1.rate", "seed", "a gain over base"]
    assert [row[1:3] for row in rows] == [["0.3", "1"], ["0.4", "1"]]
    assert all(0 <= float(row[3]) < 97 for row in rows)
    # b-1 is the same in both: the second takes it from DVC's cache.
    assert [starts(done.stderr, name) for name in ("base", "a-1", "b-1")] == [1, 4, 2]
    again = sweep(finished_pipeline, prefect_environment, *SETTINGS)
    assert again.stdout == done.stdout
    assert "working on" not in again.stderr
    status = tiny_pipeline.run(finished_pipeline, "git", "status", "--porcelain")
    assert status == ""


@pytest.mark.long
def test_a_failed_experiment_is_named_and_the_others_are_kept(
    finished_pipeline: Path, prefect_environment: Environment
) -> None:
    tiny_pipeline.replace(finished_pipeline, "rate: 0.1", "rate: 0.1, fails: 0")
    tiny_pipeline.commit(finished_pipeline, "a switch")
    words = ("--set", "rounds.a-1.fails=2,3,0")
    done = sweep(finished_pipeline, prefect_environment, *words)
    assert done.returncode == 2
    assert "rounds.a-1.fails must be absent (log: " in done.stderr.splitlines()[-1]
    assert done.stderr.count("must be absent") == 2  # once for each
    assert "Traceback" not in done.stderr
    names = tiny_pipeline.run(
        finished_pipeline, sys.executable, "-m", "dvc", "exp", "list", "--name-only"
    )
    assert len(names.split()) == 1


@pytest.mark.parametrize("given", ["rounds.a-1=1", "rounds.c-1.rate=1", "seed", "seed="])
def test_what_cannot_be_set_is_named(fresh_pipeline: Path, given: str) -> None:
    from flows.experiments import combinations

    with pytest.raises(ParameterError, match=rf"--set {given}: must be PATH=VALUE,VALUE"):
        combinations(fresh_pipeline, [given])
    with pytest.raises(ParameterError, match="given once"):
        combinations(fresh_pipeline, ["seed=1", "seed=2"])


def test_a_file_that_no_experiment_would_see_is_named(fresh_pipeline: Path) -> None:
    from flows.experiments import combinations

    (fresh_pipeline / "plugins").mkdir(exist_ok=True)
    (fresh_pipeline / "plugins/mine.py").write_text("")
    with pytest.raises(ParameterError, match=r"^plugins/mine\.py: is not tracked, .*git add plug"):
        combinations(fresh_pipeline, ["seed=1"])
    tiny_pipeline.run(fresh_pipeline, "git", "add", "plugins/mine.py")
    model = fresh_pipeline / "data/my model"
    model.mkdir(parents=True)
    (model.parent / ".gitignore").write_text("*.safetensors\n.gitignore\n")
    (model / "model.safetensors").write_text("")
    with pytest.raises(ParameterError, match=r"^data/my model: is .* run dvc add 'data/my model'$"):
        combinations(fresh_pipeline, ["seed=1"])
    tiny_pipeline.run(fresh_pipeline, sys.executable, "-m", "dvc", "add", "data/my model")
    with pytest.raises(ParameterError, match=r"run git add 'data/my model\.dvc'$"):
        combinations(fresh_pipeline, ["seed=1"])
    tiny_pipeline.run(fresh_pipeline, "git", "add", "data/my model.dvc")
    assert len(combinations(fresh_pipeline, ["seed=1"])) == 1
