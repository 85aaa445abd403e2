"""Images as PNG bytes, small enough that a page can hold hundreds of them."""

import io

import numpy as np
from jaxtyping import UInt8

LONGEST_PIXELS = 160  # of a side; larger images are shrunk
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
SIZE_AT = slice(16, 24)  # width and height in a PNG's first chunk, 4 bytes each


def encode_png(image: UInt8[np.ndarray, "channel height width"]) -> bytes:
    """Returns an image of one channel or three as PNG, the same bytes each time."""
    # Imported here: only runs that draw images have any.
    from PIL import Image

    picture = Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0))
    picture.thumbnail((LONGEST_PIXELS, LONGEST_PIXELS))
    stream = io.BytesIO()
    picture.save(stream, format="PNG")
    return stream.getvalue()


def is_png(content: object) -> bool:
    """Returns whether `content` are bytes that begin as a PNG does, its size included."""
    return (
        isinstance(content, bytes)
        and content.startswith(PNG_SIGNATURE)
        and len(content) >= SIZE_AT.stop
    )


def png_size(content: bytes) -> tuple[int, int]:
    """Returns width and height in pixels."""
    size = content[SIZE_AT]
    return int.from_bytes(size[:4]), int.from_bytes(size[4:])
