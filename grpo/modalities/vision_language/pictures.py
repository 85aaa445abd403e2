"""Pictures for the report: a prompt's image with the boxes of answer and rollout."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from grpo.modalities.shared.exhibits import PICTURE_PIXELS, Picture, embed
from grpo.modalities.shared.images import split_prompt
from grpo.rewards.boxes import find_objects
from grpo.runtime.artifacts.tables import FIRST_ANSWER, PROMPTS, read_table

TRUE, GIVEN = (0, 150, 90), (220, 0, 160)  # colors of the answer and of the rollout
FIRST = (110, 110, 120)  # of the first answer that the rollout revises
POINT = 3  # half the size of a point, in pixels of the page


def draw_answers(
    artifacts: Path, rollouts: pd.DataFrame, chosen: pd.DataFrame
) -> Sequence[Picture]:
    """Returns a picture per chosen rollout: the answer in green, the rollout's objects in magenta.

    The objects of its group's first answer are gray. Texts without boxes and points leave the image
    as it is.

    Args:
      rollouts: All rollouts of the iteration.
      chosen: Has the columns row (index in `rollouts`) and prompt.

    Raises:
      ArtifactError: If the table of prompts is missing or broken.
    """
    prompts = read_table(artifacts / "prompts" / "train.parquet", PROMPTS)
    answers = prompts.set_index("prompt_id")["answer"]
    pictures = []
    for row, prompt in zip(chosen["row"], chosen["prompt"]):
        rollout = rollouts.iloc[row]
        image, _ = split_prompt(prompt)
        first = rollout.get(FIRST_ANSWER)
        drawn = draw_objects(
            image,
            answers[rollout["prompt_id"]],
            rollout["text"],
            first="" if pd.isna(first) else first,
        )
        pictures.append(embed(drawn, longest_pixels=PICTURE_PIXELS, has_text=True))
    return pictures


def draw_objects(image: bytes, answer: str, text: str, *, first: str = "") -> bytes:
    """Returns an image with boxes and points as PNG; small ones are enlarged by a whole number."""
    # Imported here: only runs with images need Pillow.
    from PIL import Image, ImageDraw

    picture = Image.open(io.BytesIO(image)).convert("RGB")
    scale = max(1, PICTURE_PIXELS // max(picture.size))
    width, height = picture.size
    picture = picture.resize((scale * width, scale * height), Image.Resampling.NEAREST)
    pen = ImageDraw.Draw(picture)
    for color, written in ((TRUE, answer), (FIRST, first), (GIVEN, text)):
        for each in find_objects(written):
            _draw_object(pen, [scale * number for number in each], color)
    stream = io.BytesIO()
    picture.save(stream, format="PNG")
    return stream.getvalue()


def _draw_object(pen: Any, numbers: list[float], color: tuple[int, int, int]) -> None:
    """Draws a box, whose right and bottom are exclusive, or a point."""
    if len(numbers) == 2:
        x, y = numbers
        pen.ellipse((x - POINT, y - POINT, x + POINT, y + POINT), outline=color, width=2)
        return
    left, top, right, bottom = numbers
    if left < right and top < bottom:
        corner = (max(left, right - 1), max(top, bottom - 1))  # a box may be thinner than a pixel
        pen.rectangle((left, top, *corner), outline=color, width=2)
