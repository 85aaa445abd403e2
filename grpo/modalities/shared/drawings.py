"""Drawings of texts with one cell per character, as images or as clips of moving text.

The text of a clip ends with an arrow, the direction of its motion.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

ARROWS = {">": (1, 0), "<": (-1, 0), "v": (0, 1), "^": (0, -1)}  # (right, down)


class Drawing(NamedTuple):
    """Sizes of a drawing in pixels."""

    height: int
    width: int
    font_size: int
    character_width: int


def draw_texts(texts: Sequence[str], drawing: Drawing) -> NDArray[np.uint8]:
    """Returns light-on-dark images [text, 1, height, width] in 256 levels.

    Characters are centered in cells of equal width from the left edge, on one baseline. The font is
    the one that pillow ships.
    """
    drawn = [_draw_text(text, drawing, 0.0, 0.0) for text in texts]
    return np.stack(drawn)[:, None]


def draw_clips(
    texts: Sequence[str], drawing: Drawing, *, frames: int, pixels_per_frame: int
) -> NDArray[np.uint8]:
    """Returns light-on-dark clips [text, 1, frame, height, width] in 256 levels.

    A text moves in the direction of its arrow and is at the center of the canvas in the middle of
    the clip. Characters are at whole pixels, so that they look the same in every frame.
    """
    drawn = []
    for text in texts:
        written, (right, down) = split_text(text)
        rest = (drawing.width - drawing.character_width * len(written)) / 2
        passed = [(frame - (frames - 1) / 2) * pixels_per_frame for frame in range(frames)]
        drawn.append(
            [
                _draw_text(written, drawing, rest + right * each, down * each, whole=True)
                for each in passed
            ]
        )
    return np.array(drawn)[:, None]


def split_text(text: str) -> tuple[str, tuple[int, int]]:
    """Splits "AK >" into the text "AK" and its direction (right, down)."""
    return text[:-1].strip(), ARROWS[text[-1]]


def _draw_text(
    text: str, drawing: Drawing, right: float, down: float, *, whole: bool = False
) -> NDArray[np.uint8]:
    """Returns one drawing.

    Args:
      whole: Whether to round the positions of characters to whole pixels.
    """
    # Imported here: tasks read prompts without pillow.
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(size=drawing.font_size)
    image = Image.new("L", (drawing.width, drawing.height), 0)
    pen = ImageDraw.Draw(image)
    _, top, _, bottom = pen.textbbox((0, 0), "H8", font=font)
    for place, character in enumerate(text):
        middle = drawing.character_width * (place + 0.5) + right
        left = middle - pen.textlength(character, font=font) / 2
        high = (drawing.height - top - bottom) / 2 + down
        place_at = (round(left), round(high)) if whole else (left, high)
        pen.text(place_at, character, 255, font=font)
    return np.asarray(image)
