"""Pictures and films of rollouts for the report."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo.runtime.artifacts.media import encode_png, png_size, read_rows

PICTURE_PIXELS = 192  # length of the longer side


@dataclass(frozen=True, kw_only=True)
class Picture:
    """An image with its size on the page in pixels."""

    uri: str
    width: int
    height: int
    is_enlarged: bool  # whether to render it with sharp pixels
    has_text: bool = False  # whether the rollout's text is shown below it


def embed(png: bytes, *, longest_pixels: int, has_text: bool = False) -> Picture:
    """Returns an image whose longer side takes at most about `longest_pixels` on the page."""
    width, height = png_size(png)
    scale = longest_pixels / max(width, height)
    if scale > 1:
        scale = int(scale)
    return Picture(
        uri=f"data:image/png;base64,{base64.b64encode(png).decode()}",
        width=round(scale * width),
        height=round(scale * height),
        is_enlarged=scale > 1,
        has_text=has_text,
    )


def read_pictures(tensors: Path, rows: Sequence[int]) -> list[Picture]:
    """Returns the generated images of some rollouts.

    Args:
      tensors: The file of a round's rollouts.

    Raises:
      ArtifactError: If the file is missing or broken, or lacks the rows.
    """
    images = read_rows(tensors, "media", rows)
    return [embed(encode_png(each), longest_pixels=PICTURE_PIXELS) for each in images]


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A phase of chunks with its color in the legend."""

    name: str
    color: str


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One chunk of a rollout."""

    number: int  # from 1
    phase: Phase
    executed: int  # number of executed actions
    kept: float | None  # probability that training keeps it; None: equal for all phases


@dataclass(frozen=True, kw_only=True)
class Shot:
    """A picture of the scene before a chunk or at the end."""

    picture: Picture
    cell: Cell | None  # None: at the end


@dataclass(frozen=True, kw_only=True)
class Film:
    """A rollout with some shots and all its chunks."""

    shots: list[Shot]  # empty if the replay ends differently
    cells: list[Cell]

    @property
    def numbers(self) -> set[int]:
        """The numbers of the chunks with a shot."""
        return {each.cell.number for each in self.shots if each.cell}

    @property
    def summary(self) -> str:
        """The sequence of phases for screen readers: "2 of approach, 7 of active-grip"."""
        runs: list[tuple[str, int]] = []
        for cell in self.cells:
            name, count = runs[-1] if runs else ("", 0)
            if name == cell.phase.name:
                runs[-1] = (name, count + 1)
            else:
                runs.append((cell.phase.name, 1))
        return ", ".join(f"{count} of {name}" for name, count in runs)
