"""Atomic writing and validated reading of tensors as safetensors."""

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo.errors import ArtifactError
from grpo.runtime.artifacts.files import atomic_path, read_json, write_json
from grpo.runtime.artifacts.media import whole_safetensors

PART_BYTES = 2**32  # of a file; DVC hashes the files of a directory side by side
INDEX = ".index.json"
SAFETENSORS_TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


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
    tensors = read_unchecked_tensors(path)
    require_finite(tensors, path)
    return tensors


def read_unchecked_tensors(path: Path) -> dict[str, Tensor]:
    """Returns the named tensors of a file, whose values may not be finite.

    Raises:
      ArtifactError: If the file is missing, truncated or not safetensors.
    """
    with whole_safetensors(path):
        tensors: dict[str, Tensor] = load_file(path)
    return tensors


def stored_numbers(path: Path) -> int:
    """Returns how many numbers the tensors of a file have, from its header.

    Raises:
      ArtifactError: If the file is missing, truncated or not safetensors.
    """
    with whole_safetensors(path), safe_open(path, framework="pt") as file:
        return sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118


def write_in_parts(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes named tensors to one file or, if they have more than PART_BYTES, to several.

    Several have the names and the index of transformers: model-00001-of-00003.safetensors.

    Raises:
      ArtifactError: If a value is not finite, or a write fails.
    """
    parts = list(_in_parts(tensors))
    if len(parts) == 1:
        write_tensors(path, tensors)
        return
    weight_map = dict[str, str]()
    for number, part in enumerate(parts, start=1):
        file = f"{path.stem}-{number:05d}-of-{len(parts):05d}{path.suffix}"
        write_tensors(path.with_name(file), part)
        weight_map |= dict.fromkeys(part, file)
    size = sum(each.nbytes for each in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    write_json(path.with_name(path.name + INDEX), index)


def read_in_parts(path: Path) -> dict[str, Tensor]:
    """Returns the tensors that `write_in_parts` wrote.

    Raises:
      ArtifactError: If a file is missing or broken, or the index does not fit the files.
    """
    index = path.with_name(path.name + INDEX)
    if not index.exists():
        return read_tensors(path)
    match read_json(index):
        case {"weight_map": dict(weight_map)} if all(
            isinstance(each, str) and Path(each).name == each for each in weight_map.values()
        ):
            files = sorted(set(weight_map.values()))
        case _:
            raise ArtifactError(f"{index}: must name a file for each tensor; rerun its stage")
    parts = {file: read_tensors(path.with_name(file)) for file in files}
    if weight_map != {name: file for file, part in parts.items() for name in part}:
        raise ArtifactError(f"{index}: must name the tensors of its files; rerun its stage")
    return {name: each for part in parts.values() for name, each in part.items()}


def _in_parts(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yields tensors, sorted by name, in parts of at most PART_BYTES or of one tensor."""
    part, size = dict[str, Tensor](), 0
    for name in sorted(tensors):
        if part and size + tensors[name].nbytes > PART_BYTES:
            yield part
            part, size = {}, 0
        part[name] = tensors[name]
        size += tensors[name].nbytes
    yield part


def ragged_mask(lengths: Tensor, *, left: bool = False) -> Tensor:
    """Returns which entries of [row, step] are filled; `left`: padding is on the left."""
    width = int(lengths.max())
    step = torch.arange(width)
    return step >= width - lengths[:, None] if left else step < lengths[:, None]


def unpack_ragged(flat: Tensor, lengths: Tensor, *, left: bool = False) -> Tensor:
    """Returns [row, step], padded with 0, from flat entries and the number of entries per row.

    Raises:
      ArtifactError: If the lengths do not sum to the number of entries.
    """
    if int(lengths.sum()) != len(flat):
        raise ArtifactError(
            f"a ragged tensor has {len(flat)} entries, its lengths ask for {int(lengths.sum())}"
        )
    mask = ragged_mask(lengths, left=left)
    rows = torch.zeros(mask.shape, dtype=flat.dtype)
    rows[mask] = flat
    return rows
