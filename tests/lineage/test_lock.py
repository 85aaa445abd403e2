"""dvc.lock as data."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from dvc.utils.serialize import dumps_yaml, parse_yaml_for_update
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo.errors import ArtifactError
from grpo.lineage.lock import (
    Artifact,
    directory_digest,
    file_digest,
    is_read_as_written,
    read_lock,
    sort_lock,
)

# DVC itself uses what pygtrie deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
DECLARED = ["prepare", "base", "train@a-1", "train@b-1", "evaluate@a-1", "evaluate@b-1", "report"]


def test_an_entry_says_what_the_stage_ran_read_and_wrote(workspace: Path) -> None:
    entry = read_lock(workspace)["train@a-1"]
    assert entry.command.startswith("python work.py a-1 ")
    assert [dep.path for dep in entry.deps] == [
        "artifacts/policies/base",
        "artifacts/prompts/train.txt",
        "work.py",
    ]
    assert [out.path for out in entry.outs] == ["artifacts/policies/a-1"]
    assert dict(entry.params) == {
        "rounds.a-1.rate": 0.1,
        "rounds.a-1.start": "base",
        "seconds": 0.0,
    }


def test_a_digest_is_the_one_dvc_wrote(workspace: Path) -> None:
    lock = read_lock(workspace)
    assert file_digest(workspace / "work.py") == lock["base"].deps[1].digest
    policy = workspace / "artifacts/policies/base"
    files = {f"policy/{file.name}": file_digest(file) for file in policy.iterdir()}
    assert directory_digest(files, "policy") == lock["base"].outs[0].digest


def test_a_directory_of_outs_matches_until_one_of_them_changes(workspace: Path) -> None:
    lock = read_lock(workspace)
    read = next(dep for dep in lock["report"].deps if dep.path == "artifacts/policies")
    outs = [lock[name].outs[0] for name in ("base", "train@a-1", "train@b-1")]
    assert is_read_as_written(workspace, read, outs)
    other = Artifact(path=outs[1].path, digest=outs[2].digest)
    assert not is_read_as_written(workspace, read, [outs[0], other, outs[2]])


def test_a_stage_that_left_dvc_yaml_is_no_part_of_the_pipeline(workspace: Path) -> None:
    pipeline = workspace / "dvc.yaml"
    pipeline.write_text(pipeline.read_text().replace("  report:", "  summary:"))
    assert "report" not in read_lock(workspace)


@pytest.mark.parametrize("content", ["stages: [", "stages: 3", "stages: {base: {}}", "\x00"])
def test_a_broken_lock_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "dvc.lock").write_text(content)
    with pytest.raises(ArtifactError, match=r"dvc\.lock: must be a lock file of DVC"):
        read_lock(tmp_path)


@pytest.mark.parametrize("name", ["dvc.lock", "dvc.yaml"])
def test_a_pipe_is_not_waited_for(workspace: Path, name: str) -> None:
    (workspace / name).unlink()
    os.mkfifo(workspace / name)
    for read in (read_lock, sort_lock):
        with pytest.raises(ArtifactError, match=rf"{name}: must be a file .* is a pipe"):
            read(workspace)


def test_a_missing_lock_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="run dvc repro first"):
        read_lock(tmp_path)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.permutations(DECLARED))
def test_whichever_stage_ended_first_a_sorted_lock_has_the_same_bytes(
    workspace: Path, order: list[str]
) -> None:
    """DVC adds an entry at the end when its stage has ended: this is what it writes then."""
    path = workspace / "dvc.lock"
    content: Any = parse_yaml_for_update(path.read_text(), str(path))
    content["stages"] = {name: content["stages"][name] for name in order}
    path.write_text(dumps_yaml(content))
    sort_lock(workspace)
    sorted_ = path.read_bytes()
    assert list(yaml.safe_load(sorted_)["stages"]) == DECLARED
    assert yaml.safe_load(sorted_) == content
    content["stages"] = {name: content["stages"][name] for name in DECLARED}
    assert sorted_ == dumps_yaml(content).encode()


def test_rounds_follow_the_parameters_and_what_is_no_longer_declared_comes_last(
    workspace: Path,
) -> None:
    params = workspace / "params.yaml"
    rounds = "  a-1: {start: base, rate: 0.1}\n  b-1: {start: base, rate: 0.2}\n"
    params.write_text(params.read_text().replace(rounds, "  b-1: {start: base, rate: 0.2}\n"))
    sort_lock(workspace)
    stages = list(yaml.safe_load((workspace / "dvc.lock").read_text())["stages"])
    known = [name for name in DECLARED if not name.endswith("a-1")]
    assert stages == [*known, "evaluate@a-1", "train@a-1"]


@pytest.mark.parametrize("content", ["", "stages: [", "stages: {base: {}, a: {}}\n", "\x00"])
def test_a_lock_that_is_not_as_dvc_writes_it_is_left_alone(workspace: Path, content: str) -> None:
    (workspace / "dvc.lock").write_text(content)
    sort_lock(workspace)
    assert (workspace / "dvc.lock").read_text() == content
