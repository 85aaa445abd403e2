"""What the report shows of a rollout beside its text: a picture, or a film of a robot."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo.runtime.artifacts.media import encode_png, png_size, read_rows

PICTURE_PIXELS = 192  # of the longer side


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


def read_pictures(tensors: Path, rows: Sequence[int]) -> list[Picture]:
    """Returns what the rollouts of some rows drew.

    Args:
      tensors: The file in which a round's rollouts are stored.

    Raises:
      ArtifactError: If it is missing or broken, or has no such rows.
    """
    images = read_rows(tensors, "media", rows)
    return [embed(encode_png(each), longest_pixels=PICTURE_PIXELS) for each in images]


@dataclass(frozen=True, kw_only=True)
class Phase:
    """What chunks are told apart by, as the legend shows it."""

    name: str
    color: str


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One chunk of a rollout."""

    number: int  # from 1
    phase: Phase
    executed: int  # actions
    kept: float | None  # how likely, 1 being the likeliest phase; None: all phases alike


@dataclass(frozen=True, kw_only=True)
class Shot:
    """What a scene looked like before a chunk, or at the end."""

    picture: Picture
    cell: Cell | None  # None: at the end


@dataclass(frozen=True, kw_only=True)
class Film:
    """One rollout: some shots in time, and all chunks."""

    shots: list[Shot]  # none if it ends otherwise when it is played again
    cells: list[Cell]

    @property
    def numbers(self) -> set[int]:
        """The chunks before which there is a shot."""
        return {each.cell.number for each in self.shots if each.cell}

    @property
    def summary(self) -> str:
        """The phases as they followed, to be read aloud: "2 of approach, 7 of active-grip"."""
        runs: list[tuple[str, int]] = []
        for cell in self.cells:
            name, count = runs[-1] if runs else ("", 0)
            if name == cell.phase.name:
                runs[-1] = (name, count + 1)
            else:
                runs.append((cell.phase.name, 1))
        return ", ".join(f"{count} of {name}" for name, count in runs)
