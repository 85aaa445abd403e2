"""Images as PNG bytes, small enough that a page can hold hundreds of them."""

import io

import numpy as np
from jaxtyping import UInt8

LONGEST_PIXELS = 160  # of a side; larger images are shrunk
FRAMES = 6  # of a clip that are shown
GAP_PIXELS, GAP_LEVEL = 1, 128  # between frames
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
SIZE_AT = slice(16, 24)  # width and height in a PNG's first chunk, 4 bytes each


def encode_png(media: UInt8[np.ndarray, " channel *shape"]) -> bytes:
    """Returns an image of one channel or three as PNG, the same bytes each time.

    Args:
      media: An image [channel, height, width], or a clip [channel, frame, height, width]: some of
        its frames side by side.
    """
    image, frames = (film_strip(media), FRAMES) if media.ndim == 4 else (media, 1)
    # Imported here: only runs that draw images have any.
    from PIL import Image

    picture = Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0))
    picture.thumbnail((LONGEST_PIXELS * frames, LONGEST_PIXELS))
    stream = io.BytesIO()
    picture.save(stream, format="PNG")
    return stream.getvalue()


def film_strip(
    clip: UInt8[np.ndarray, "channel frame height width"],
) -> UInt8[np.ndarray, "channel height strip"]:
    """Returns evenly spaced frames side by side, the first and the last among them."""
    shown = np.linspace(0, clip.shape[1] - 1, min(FRAMES, clip.shape[1])).round().astype(int)
    gap = np.full((*clip.shape[:1], clip.shape[2], GAP_PIXELS), GAP_LEVEL, np.uint8)
    pieces = [piece for frame in shown for piece in (gap, clip[:, frame])]
    return np.concatenate(pieces[1:], axis=2)


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
