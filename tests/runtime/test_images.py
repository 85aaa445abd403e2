"""Images as PNG: the same pixels while they are small, and the same bytes each time."""

import io

import numpy as np
import pytest
from PIL import Image

from grpo.runtime.artifacts.media import LONGEST_PIXELS, encode_png, is_png, png_size


def image(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(256, size=shape, dtype=np.uint8)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_small_image_keeps_every_pixel(channels: int):
    drawn = image(channels, 5, 7)
    png = encode_png(drawn)
    decoded = np.asarray(Image.open(io.BytesIO(png))).reshape(5, 7, channels)
    np.testing.assert_array_equal(decoded.transpose(2, 0, 1), drawn)
    assert png_size(png) == (7, 5)  # width, height
    assert encode_png(drawn) == png


def test_a_large_image_is_shrunk_and_keeps_its_form():
    png = encode_png(image(3, 3 * LONGEST_PIXELS, 6 * LONGEST_PIXELS))
    assert png_size(png) == (LONGEST_PIXELS, LONGEST_PIXELS // 2)


def test_only_bytes_with_a_signature_and_a_size_are_png():
    png = encode_png(image(1, 2, 2))
    assert is_png(png)
    assert not any(is_png(each) for each in (b"", png[:20], b"GIF89a" + png, png.hex(), None))
