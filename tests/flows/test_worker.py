"""What a worker says of addresses, disks and remotes, without any of them."""

import errno
from pathlib import Path

import pytest
from dvc.exceptions import DvcException

from flows.remote_data import reached
from flows.wire import Order
from flows.worker import StageRun, repository_of
from grpo.errors import ArtifactError, ParameterError


@pytest.mark.parametrize(
    "address",
    ["ssh://git@example.invalid:22/grpo.git", "git@example.invalid:grpo.git", "/srv/grpo"],
)
def test_an_address_may_name_a_user_of_ssh(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPO_REPOSITORY", address)
    assert repository_of(tmp_path) == address


@pytest.mark.parametrize(
    "address", ["ssh://git:secret@example.invalid/grpo.git", "https://token@example.invalid/g.git"]
)
def test_an_address_may_hold_no_secret(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPO_REPOSITORY", address)
    with pytest.raises(ParameterError, match=r"must hold no password, got \w+://\*\*\*@example"):
        repository_of(tmp_path)


def pull_fails(error: Exception, cause: Exception | None = None) -> None:
    with reached():
        raise error from cause


def test_a_full_disk_is_not_the_remotes_fault() -> None:
    with pytest.raises(ArtifactError, match=r"^/cache/1: No space left on device; make room"):
        pull_fails(OSError(errno.ENOSPC, "wrote half", "/cache/1"))


def test_a_remote_out_of_reach_is_named_with_its_cause() -> None:
    said = r"^DVC's remote \(\.dvc/config\): 1 file failed: no route to host; check that"
    with pytest.raises(ArtifactError, match=said):
        pull_fails(DvcException("1 file failed"), OSError("no route to host"))


def test_a_worker_empties_no_directory_that_no_worker_made(tmp_path: Path) -> None:
    """GRPO_WORKER_HOME may be a directory of a person who numbers experiments."""
    thesis = tmp_path / "0" / "thesis.tex"
    thesis.parent.mkdir()
    thesis.write_text("years of work")
    run = StageRun(
        Order(commit="0" * 40, stage="prepare", entries={}),
        workspace=tmp_path,
        home=tmp_path,
        repository=str(tmp_path / "nowhere"),
        show=lambda name, line: None,
    )
    with pytest.raises(ArtifactError, match="0: must be free or created by a worker; move it"):
        run.carry_out()
    assert thesis.read_text() == "years of work"
    thesis.unlink()
    for _ in range(2):  # the second run finds what the first has left
        with pytest.raises(ArtifactError, match="nowhere: cannot check out"):
            run.carry_out()
