"""Generated images and clips as arrays and PNG, without torch, for judges and the report."""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from grpo.errors import ArtifactError

LONGEST_PIXELS = 160  # maximum side length; larger images are downscaled
FRAMES = 6  # number of a clip's frames that are shown
GAP_PIXELS, GAP_LEVEL = 1, 128  # between frames
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
SIZE_AT = slice(16, 24)  # width and height in a PNG's first chunk, 4 bytes each


def read_rows(path: Path, name: str, rows: Sequence[int]) -> list[NDArray[Any]]:
    """Returns the given rows of a tensor in a safetensors file; reads no other rows.

    Raises:
      ArtifactError: If the file is missing or broken, or the tensor has no such rows.
    """
    count, needed = 0, 1 + max(rows, default=-1)
    with whole_safetensors(path), safe_open(path, framework="np") as file:
        if name in file.keys():  # noqa: SIM118  not a mapping
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
    """Raises ArtifactError if the safetensors file that the block reads is missing or broken."""
    if not path.is_file():
        raise ArtifactError(f"{path}: no such file; run the stage that writes it")
    path.open("rb").close()  # safetensors reports an unreadable file as missing
    try:
        yield
    except (SafetensorError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        message = f"{path}: must be whole safetensors, {reason}; delete it and rerun"
        raise ArtifactError(message) from None


def encode_png(media: UInt8[np.ndarray, " channel *shape"]) -> bytes:
    """Returns an image with one or three channels as PNG; the bytes are reproducible.

    Args:
      media: An image [channel, height, width], or a clip [channel, frame, height, width], of which
        some frames are shown side by side.
    """
    image, frames = (film_strip(media), FRAMES) if media.ndim == 4 else (media, 1)
    picture = _picture(image)
    picture.thumbnail((LONGEST_PIXELS * frames, LONGEST_PIXELS))
    return _as_png(picture)


def encode_whole_png(image: UInt8[np.ndarray, "channel height width"]) -> bytes:
    """Returns an image with one or three channels as PNG of its own size, without loss."""
    return _as_png(_picture(image))


def _picture(image: UInt8[np.ndarray, "channel height width"]) -> Any:
    # Imported here: only image and video runs need Pillow.
    from PIL import Image

    return Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0))


def _as_png(picture: Any) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, format="PNG")
    return stream.getvalue()


def film_strip(
    clip: UInt8[np.ndarray, "channel frame height width"],
) -> UInt8[np.ndarray, "channel height strip"]:
    """Returns evenly spaced frames side by side, including the first and the last frame."""
    shown = np.linspace(0, clip.shape[1] - 1, min(FRAMES, clip.shape[1])).round().astype(int)
    gap = np.full((*clip.shape[:1], clip.shape[2], GAP_PIXELS), GAP_LEVEL, np.uint8)
    pieces = [piece for frame in shown for piece in (gap, clip[:, frame])]
    return np.concatenate(pieces[1:], axis=2)


def is_png(content: object) -> bool:
    """Returns whether `content` is bytes that start with a PNG header, including its size."""
    return (
        isinstance(content, bytes)
        and content.startswith(PNG_SIGNATURE)
        and len(content) >= SIZE_AT.stop
    )


def png_size(content: bytes) -> tuple[int, int]:
    """Returns width and height in pixels."""
    size = content[SIZE_AT]
    return int.from_bytes(size[:4]), int.from_bytes(size[4:])
