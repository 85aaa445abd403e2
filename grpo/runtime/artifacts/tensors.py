"""Atomic writing and validated reading of tensors as safetensors."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo.errors import ArtifactError
from grpo.runtime.artifacts.files import atomic_path
from grpo.runtime.artifacts.media import whole_safetensors


def require_finite(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raises ArtifactError that names the first tensor with a value that is not finite."""
    for name, given in tensors.items():
        tensor = given.detach()
        if tensor.is_floating_point() and tensor.numel():
            low, high = tensor.aminmax()  # propagates NaN, needs no mask of the tensor's size
            if not bool(low.isfinite() & high.isfinite()):
                at = (~tensor.isfinite()).nonzero()[0].tolist()
                raise ArtifactError(
                    f"{path}: tensor {name!r} must be finite, got {float(tensor[tuple(at)])} at "
                    f"{at}; rerun the stage that writes it"
                )


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes named tensors atomically, sorted by name.

    Raises:
      ArtifactError: If a value is not finite, or the write fails.
    """
    ordered = {name: tensors[name].detach().cpu().contiguous() for name in sorted(tensors)}
    require_finite(ordered, path)
    try:
        with atomic_path(path) as temporary:
            save_file(ordered, temporary)
    except SafetensorError as error:
        raise ArtifactError(f"{path}: cannot be written, {error}; make room and rerun") from None


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Returns the named tensors of a file.

    Raises:
      ArtifactError: If the file is missing, truncated or not safetensors, or a value is not
        finite.
    """
    with whole_safetensors(path):
        tensors: dict[str, Tensor] = load_file(path)
    require_finite(tensors, path)
    return tensors


def unpack_ragged(flat: Tensor, lengths: Tensor) -> Tensor:
    """Returns [row, step], padded with 0, from flat entries and the number of entries per row.

    Raises:
      ArtifactError: If the lengths do not sum to the number of entries.
    """
    if int(lengths.sum()) != len(flat):
        raise ArtifactError(
            f"a ragged tensor has {len(flat)} entries, its lengths ask for {int(lengths.sum())}"
        )
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    rows = torch.zeros(mask.shape, dtype=flat.dtype)
    rows[mask] = flat
    return rows
