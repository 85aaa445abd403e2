"""Files of the first rank, for ranks in other directories, such as those of other hosts.

Only the first rank writes checkpoints, rollouts and rewards. Ranks that torchrun has started on
hosts without a shared directory get them from it over the network (gloo).
"""

import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from grpo.errors import ArtifactError
from grpo.runtime.artifacts.files import WORK, Scratch, atomic_path
from grpo.runtime.ranks import all_agree, all_texts, num_ranks, require_same, this_rank

PART_BYTES = 2**26  # sent at a time, and held by each rank


def latest_checkpoint(scratch: Scratch) -> tuple[int, Path] | None:
    """Returns the number and path of the first rank's newest checkpoint, or None.

    All ranks must call it; afterwards each of them can read the checkpoint.

    Raises:
      ArtifactError: If ranks differ in code, parameters or inputs.
    """
    latest = scratch.latest()
    if not _are_on_hosts():
        require_same("what ranks read", [str(scratch.directory), latest and latest[0]])
        return latest
    require_same("code, parameters and inputs of a stage", str(scratch.directory))
    name = from_first(latest[1].name if latest else "")
    if not name:
        return None
    path = scratch.directory / name
    bring(path)
    return int(name.rpartition("-")[2]), path


def bring(path: Path) -> None:
    """Copies a file, or a directory of files, of the first rank to directories without it.

    All ranks must call it. It does nothing where all ranks work in one directory.

    Raises:
      ArtifactError: If the first rank has no such file.
    """
    if not _are_on_hosts():
        return
    sees_first = _sees_first()
    if all_agree(sees_first):
        return
    files = [each for each in sorted(path.rglob("*")) if each.is_file()] if path.is_dir() else []
    sizes = {str(each.relative_to(path)): each.stat().st_size for each in files}
    if path.is_file():
        sizes = {"": path.stat().st_size}
    wanted: dict[str, int] = json.loads(from_first(json.dumps(sizes)))
    if not wanted:
        raise ArtifactError(f"{path}: the first rank must have it, has none; run the stage again")
    if sees_first or os.environ["LOCAL_RANK"] != "0":
        for name, size in wanted.items():
            for _ in _parts(path / name, size):
                pass
    else:
        with atomic_path(path) as temporary:
            for name, size in wanted.items():
                (temporary / name).parent.mkdir(parents=True, exist_ok=True)
                with (temporary / name).open("wb") as file:
                    for part in _parts(path / name, size):
                        file.write(part)
    all_agree(True)  # other ranks of a host read what one of them has written


def leads_directory() -> bool:
    """Returns whether this rank is the first of those in its directory; all ranks must call it."""
    if not _are_on_hosts():
        return this_rank() == 0
    sees_first = _sees_first()
    return this_rank() == 0 or (not sees_first and os.environ["LOCAL_RANK"] == "0")


def from_first(text: str) -> str:
    """Returns the first rank's text."""
    return all_texts(text if this_rank() == 0 else "")[0]


def _are_on_hosts() -> bool:
    """Returns whether torchrun has started ranks in several places, usually hosts."""
    ranks = num_ranks()
    return ranks > 1 and int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) < ranks


def _sees_first() -> bool:
    """Returns whether this rank works in the directory of the first."""
    prefix = f"{os.environ.get('DVC_STAGE', 'ranks')}.first-rank-"  # the stage is locked
    # A name that no host has looked up before: NFS remembers that a file did not exist.
    mark = WORK / f"{prefix}{from_first(secrets.token_hex(16))}"
    if this_rank() == 0:
        for left in WORK.glob(f"{prefix}*"):  # by a run that was killed
            left.unlink()
        mark.touch()
    all_agree(True)
    found = mark.exists()
    all_agree(True)
    if this_rank() == 0:
        mark.unlink()
    return found


def _parts(path: Path, size: int) -> Iterator[bytes]:
    """Yields a file of the first rank, part by part; all ranks must exhaust it."""
    is_first = this_rank() == 0
    file = path.open("rb") if is_first else None
    try:
        for start in range(0, size, PART_BYTES):
            count = min(PART_BYTES, size - start)
            content = bytearray(file.read(count) if file else count)
            part = torch.frombuffer(content, dtype=torch.uint8)
            dist.broadcast(part, src=0)
            yield bytes(content)
    finally:
        if file:
            file.close()
