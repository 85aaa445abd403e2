"""Tensors as safetensors: written atomically, read with a sentence when the file is broken."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo.artifacts.files import atomic_path
from grpo.errors import ArtifactError


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Writes named tensors atomically, sorted by name.

    Raises:
      ArtifactError: If the disk is full or refuses the write.
    """
    ordered = {name: tensors[name].detach().cpu().contiguous() for name in sorted(tensors)}
    try:
        with atomic_path(path) as temporary:
            save_file(ordered, temporary)
    except SafetensorError as error:
        raise ArtifactError(f"{path}: cannot be written, {error}; make room and rerun") from None


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Returns the named tensors of a file.

    Raises:
      ArtifactError: If the file is missing, truncated or no safetensors.
    """
    with _explained(path):
        return load_file(path)


def read_rows(path: Path, name: str, rows: Sequence[int]) -> list[Tensor]:
    """Returns some rows of one tensor of a file; the others are not read.

    Raises:
      ArtifactError: If the file is missing or broken, or the tensor has no such rows.
    """
    count, needed = 0, 1 + max(rows, default=-1)
    with _explained(path), safe_open(path, framework="pt") as file:
        if name in file.keys():  # noqa: SIM118  it is no mapping
            found = file.get_slice(name)
            count = found.get_shape()[0]
        if needed <= count:
            return [found[row] for row in rows]
    raise ArtifactError(
        f"{path}: {name!r} must have at least {needed} rows, got {count}; "
        "rerun the stage that writes it"
    )


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Raises an ArtifactError where a safetensors file is missing or broken."""
    if not path.is_file():
        raise ArtifactError(f"{path}: no such file; run the stage that writes it")
    try:
        yield
    except (SafetensorError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        message = f"{path}: must be whole safetensors, {reason}; delete it and rerun"
        raise ArtifactError(message) from None


def unpack_ragged(flat: Tensor, lengths: Tensor) -> Tensor:
    """Returns [row, step], padded with 0, from flat entries and the number of entries per row.

    Raises:
      ArtifactError: If the lengths do not add up to the entries.
    """
    if int(lengths.sum()) != len(flat):
        raise ArtifactError(
            f"a ragged tensor has {len(flat)} entries, its lengths ask for {int(lengths.sum())}"
        )
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    rows = torch.zeros(mask.shape, dtype=flat.dtype)
    rows[mask] = flat
    return rows
