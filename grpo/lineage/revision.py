"""The git revision of an entry of dvc.lock."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from grpo.lineage.lock import LOCK, Lock, StageEntry

NO_COMMIT = "none"


@dataclass(frozen=True, kw_only=True)
class Revision:
    """A commit, and whether the executed code differs from it."""

    commit: str  # NO_COMMIT outside git or before the first commit
    is_modified: bool

    def __str__(self) -> str:
        return f"{self.commit[:12]}{' with uncommitted changes' if self.is_modified else ''}"


def revisions(workspace: Path, lock: Lock) -> dict[str, Revision]:
    """Returns each stage's revision: the commit that added its entry to dvc.lock.

    That commit contains the code and the parameters of the results. An uncommitted entry gets HEAD,
    modified if any file except dvc.lock differs from it.
    """
    head = Revision(commit=git(workspace, "rev-parse", "HEAD") or NO_COMMIT, is_modified=True)
    if head.commit == NO_COMMIT:
        return dict.fromkeys(lock, head)
    changes = git(workspace, "status", "--porcelain", "--", ".", f":(exclude){LOCK}")
    head = Revision(commit=head.commit, is_modified=bool(changes))
    committed = git(workspace, "show", f"HEAD:./{LOCK}") + "\n"
    return {
        name: _introduced(workspace, entry) if f"{entry.block}\n" in committed else head
        for name, entry in lock.items()
    }


def _introduced(workspace: Path, entry: StageEntry) -> Revision:
    """Returns the newest commit that added the entry's exact lines to dvc.lock."""
    found = git(workspace, "log", "-1", "--format=%H", f"-S{entry.block}\n", "--", LOCK)
    return Revision(commit=found or NO_COMMIT, is_modified=False)


def git(workspace: Path, *arguments: str) -> str:
    """Returns git's output, or "" if git fails or is not installed."""
    command = ["git", "-C", str(workspace), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip("\n") if done.returncode == 0 else ""
