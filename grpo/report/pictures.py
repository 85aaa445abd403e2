"""Images as the page shows them: embedded, small ones enlarged by whole pixels."""

import base64
from dataclasses import dataclass

from grpo.runtime.artifacts.images import png_size


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One image; sizes are in pixels of the page."""

    uri: str
    width: int
    height: int
    is_enlarged: bool  # its own pixels stay visible


def embed(png: bytes, *, longest_pixels: int) -> Picture:
    """Returns an image whose longer side takes about `longest_pixels` on the page, or less."""
    width, height = png_size(png)
    scale = longest_pixels / max(width, height)
    if scale > 1:
        scale = int(scale)
    return Picture(
        uri=f"data:image/png;base64,{base64.b64encode(png).decode()}",
        width=round(scale * width),
        height=round(scale * height),
        is_enlarged=scale > 1,
    )
