"""Laws of `grpo compare`: directories and revisions, their rewards, and what differs."""

import subprocess
from pathlib import Path

import pytest
import yaml
from finished_run import ReadWith

from grpo.__main__ import main
from grpo.errors import ArtifactError
from grpo.lineage.lock import cached_path, file_digest
from grpo.report.numbers import compute_numbers, write_numbers
from grpo.report.runs import (
    METRICS,
    ComparedRun,
    describe_comparison,
    differing_parameters,
    read_compared_run,
)
from grpo.runtime.artifacts.files import write_bytes

BETTER = {"uniform-2": [4, 4, 4, 4]}


def lock_of(seed: int, metrics: Path) -> bytes:
    out = {"path": METRICS.as_posix(), "md5": file_digest(metrics)}
    params = {"params.yaml": {"seed": seed, "evaluation": {"confidence": 0.9}}}
    stage = {"cmd": "report", "params": params, "outs": [out]}
    return yaml.safe_dump({"schema": "2.0", "stages": {"report": stage}}).encode()


def write_run(read_with: ReadWith, directory: Path, seed: int, **successes: list[int]) -> None:
    """Writes what `grpo compare` reads of a run."""
    run = read_with({name.replace("_", "-"): each for name, each in successes.items()})
    write_numbers(run, compute_numbers(run), directory / METRICS.parent)
    write_bytes(directory / "dvc.lock", lock_of(seed, directory / METRICS))


def test_directories_are_compared_by_arm_and_parameter(
    read_with: ReadWith,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_run(read_with, tmp_path / "a", 1)
    write_run(read_with, tmp_path / "b", 2, uniform_2=[4, 4, 4, 4])
    monkeypatch.setattr("sys.argv", ["grpo", "compare", "a", "b"])
    with pytest.raises(SystemExit) as done:
        main()
    assert done.value.code == 0
    lines = [" ".join(each.split()) for each in capsys.readouterr().out.splitlines()]
    assert "a uniform 4 0.750 0.650 to 0.850 +0.500 200 FLOP" in lines
    # 16 of 16 instead of 12 of 16.
    assert "b uniform 4 1.000 0.900 to 1.100 +0.750 200 FLOP +0.250" in lines
    assert "seed 1 2" in lines
    assert not any("not comparable" in each for each in lines)


def test_entries_of_removed_rounds_do_not_count(read_with: ReadWith, tmp_path: Path) -> None:
    """DVC keeps them in dvc.lock."""
    write_run(read_with, tmp_path / "a", 1)
    path = tmp_path / "a" / "dvc.lock"
    lock = yaml.safe_load(path.read_text())
    lock["stages"]["report"]["params"]["params.yaml"] |= {"rounds": {"b-1": {"arm": "b"}}}
    of_stage = {
        name: {"cmd": "x", "params": {"params.yaml": {"evaluation": {"rollouts": rollouts}}}}
        for name, rollouts in (("evaluate@b-1", 16), ("evaluate@old-1", 8))
    }
    lock["stages"] |= of_stage
    path.write_text(yaml.safe_dump(lock))
    assert read_compared_run("a").params["evaluation.rollouts"] == 16


def test_a_revision_is_read_from_git_and_the_cache(read_with: ReadWith, tmp_path: Path) -> None:
    git = ["git", "-c", "user.name=tests", "-c", "user.email=tests@example.invalid"]
    subprocess.run(["git", "init", "-q", "-b", "main"], check=True)
    (tmp_path / ".dvc").mkdir()
    write_run(read_with, tmp_path, 1)
    cached = cached_path(Path(), file_digest(METRICS))
    write_bytes(cached, METRICS.read_bytes())
    subprocess.run([*git, "add", "dvc.lock"], check=True)
    subprocess.run([*git, "commit", "-qm", "run"], check=True)
    here = read_compared_run(".")
    write_run(read_with, tmp_path, 2, uniform_2=[4, 4, 4, 4])
    committed = read_compared_run("HEAD")
    assert (committed.metrics, committed.params) == (here.metrics, here.params)
    assert differing_parameters([committed, read_compared_run(".")]) == {"seed": ["1", "2"]}
    cached.unlink()
    with pytest.raises(ArtifactError, match="dvc fetch"):
        read_compared_run("HEAD")


def test_what_is_no_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArtifactError, match="must be a directory or a git revision"):
        read_compared_run("nothing")


def test_other_tasks_make_rewards_incomparable(read_with: ReadWith, tmp_path: Path) -> None:
    write_run(read_with, tmp_path / "a", 1)
    one = read_compared_run("a")
    other = ComparedRun(
        name="b", metrics=one.metrics, params={**one.params, "task.kind": "translation"}
    )
    said = describe_comparison([one, other])
    assert said.endswith("Rewards are not comparable, since these differ: task.kind.")
    assert describe_comparison([one]).endswith("All parameters are equal.")
