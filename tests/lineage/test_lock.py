"""dvc.lock as data."""

from pathlib import Path

import pytest

from grpo.errors import ArtifactError
from grpo.lineage.lock import Artifact, directory_digest, file_digest, is_read_as_written, read_lock


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


def test_a_missing_lock_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="run dvc repro first"):
        read_lock(tmp_path)
