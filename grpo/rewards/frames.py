"""Clips as images: which of their frames a judge of images looks at."""

import numpy as np
from jaxtyping import UInt8

FRAMES_PER_CLIP = 8


def take_frames(
    media: UInt8[np.ndarray, "row channel *shape"],
) -> UInt8[np.ndarray, "row frame channel height width"]:
    """Returns evenly spaced frames, the first and the last among them; an image is one frame.

    Args:
      media: Images [row, channel, height, width] or clips [row, channel, frame, height, width];
        of clips with fewer frames than FRAMES_PER_CLIP, all are taken.
    """
    if media.ndim == 4:
        return media[:, None]
    frames = media.shape[2]
    chosen = np.linspace(0, frames - 1, min(frames, FRAMES_PER_CLIP)).round().astype(int)
    return media[:, :, chosen].swapaxes(1, 2)
