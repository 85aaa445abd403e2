"""Tensors as safetensors: written atomically, read with a sentence when the file is broken."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo.artifacts.files import atomic_path
from grpo.artifacts.rows import whole_safetensors
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
    with whole_safetensors(path):
        return load_file(path)


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
