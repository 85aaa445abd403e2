"""Rows of a tensor in safetensors as arrays, for what needs no torch: a judge, a page."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from grpo.errors import ArtifactError


def read_rows(path: Path, name: str, rows: Sequence[int]) -> list[NDArray[Any]]:
    """Returns some rows of one tensor of a file; the others are not read.

    Raises:
      ArtifactError: If the file is missing or broken, or the tensor has no such rows.
    """
    count, needed = 0, 1 + max(rows, default=-1)
    with whole_safetensors(path), safe_open(path, framework="np") as file:
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
def whole_safetensors(path: Path) -> Iterator[None]:
    """Raises an ArtifactError where a safetensors file is missing or broken."""
    if not path.is_file():
        raise ArtifactError(f"{path}: no such file; run the stage that writes it")
    path.open("rb").close()  # safetensors calls a file missing that it may not read
    try:
        yield
    except (SafetensorError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        message = f"{path}: must be whole safetensors, {reason}; delete it and rerun"
        raise ArtifactError(message) from None
