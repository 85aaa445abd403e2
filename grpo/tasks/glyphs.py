"""Short texts to be drawn, and how a warm-up draws them: one place per character.

A text may end with an arrow: then it is drawn as a clip, in which it moves that way.
"""

import json
import random
from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from grpo.errors import ParameterError
from grpo.tasks.base import PromptTables, shares

ARROWS = {">": (1, 0), "<": (-1, 0), "v": (0, 1), "^": (0, -1)}  # right and down
Alphabets = Sequence[str]  # the characters that may stand at each place


def make_prompts(
    *,
    families: Mapping[str, Alphabets],
    train_prompts: int,
    eval_prompts: int,
    warmup_prompts: Mapping[str, int],
    wrong_fraction: float,
    seed: int,
    pixels_per_frame: int | None = None,
) -> PromptTables:
    """Returns texts of every family in equal shares; none of the prompts is in the warm-up.

    Args:
      warmup_prompts: Of each family: the more, the better the base will draw it.
      wrong_fraction: Of the warm-up's captions whose drawing shows another text of their family.
      pixels_per_frame: Of what moves, in clips; None: images.

    Raises:
      ParameterError: If a family has too few texts.
    """
    chooser = random.Random(seed)
    parts: dict[str, list[tuple[str, str]]] = {"train": [], "eval": []}
    warmup: list[dict[str, str]] = []
    for index, (family, alphabets) in enumerate(sorted(families.items())):
        quotas = {
            "eval": shares(eval_prompts, len(families))[index],
            "train": shares(train_prompts, len(families))[index],
        }
        wanted = sum(quotas.values())
        total = prod(len(set(each)) for each in alphabets)
        if wanted >= total:
            raise ParameterError(
                f"params.yaml: task.families.{family} has {total} texts, must have more than the "
                f"{wanted} that train_prompts and eval_prompts ask for: the warm-up needs others"
            )
        taken = _draw_distinct(alphabets, wanted, chooser)
        parts["eval"] += [(family, text) for text in taken[: quotas["eval"]]]
        parts["train"] += [(family, text) for text in taken[quotas["eval"] :]]
        count = warmup_prompts.get(family, 0)
        warmup += _captions(family, alphabets, set(taken), count, wrong_fraction, chooser)
    return PromptTables(
        train=_prompt_frame(parts["train"], "train", pixels_per_frame),
        eval=_prompt_frame(parts["eval"], "eval", pixels_per_frame),
        warmup=pd.DataFrame(warmup, columns=["prompt_id", "family", "prompt", "solution"]),
    )


class Drawing(NamedTuple):
    """How a text is drawn, in pixels."""

    height: int
    width: int
    font_size: int
    character_width: int


def draw_texts(texts: Sequence[str], drawing: Drawing) -> NDArray[np.uint8]:
    """Returns light on dark drawings, shape [text, 1, height, width], in 256 levels.

    Characters stand in places of equal width from the left edge, centered, on one baseline. The
    font is the one in the wheel of pillow.
    """
    drawn = [_draw_text(text, drawing, 0.0, 0.0) for text in texts]
    return np.stack(drawn)[:, None]


def draw_clips(
    texts: Sequence[str], drawing: Drawing, *, frames: int, pixels_per_frame: int
) -> NDArray[np.uint8]:
    """Returns light on dark clips, shape [text, 1, frame, height, width], in 256 levels.

    A text crosses the middle of the canvas in the middle of the clip, the way that its last
    character says, in whole pixels: it looks the same in every frame.
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
    """Returns what is written and which way it moves, right and down: "AK >" says both."""
    return text[:-1].strip(), ARROWS[text[-1]]


def _draw_text(
    text: str, drawing: Drawing, right: float, down: float, *, whole: bool = False
) -> NDArray[np.uint8]:
    """Returns one drawing; `whole` puts characters at whole pixels."""
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


def _draw_distinct(alphabets: Alphabets, count: int, chooser: random.Random) -> list[str]:
    texts: dict[str, None] = {}
    while len(texts) < count:
        texts[_draw(alphabets, chooser)] = None
    return list(texts)


def _draw(alphabets: Alphabets, chooser: random.Random) -> str:
    return "".join(chooser.choice(each) for each in alphabets)


def _captions(
    family: str,
    alphabets: Alphabets,
    taken: set[str],
    count: int,
    wrong_fraction: float,
    chooser: random.Random,
) -> list[dict[str, str]]:
    """Returns rows of the schema WARMUP: caption and the text its drawing shows."""
    rows = []
    for index in range(count):
        text = _draw_other(alphabets, taken, chooser)
        is_wrong = chooser.random() < wrong_fraction
        rows.append(
            {
                "prompt_id": f"warmup-{family}-{index:06d}",
                "family": family,
                "prompt": text,
                "solution": _draw_other(alphabets, taken, chooser) if is_wrong else text,
            }
        )
    return rows


def _draw_other(alphabets: Alphabets, taken: set[str], chooser: random.Random) -> str:
    while (text := _draw(alphabets, chooser)) in taken:
        pass
    return text


def _prompt_frame(
    texts: list[tuple[str, str]], part: str, pixels_per_frame: int | None
) -> pd.DataFrame:
    """Returns the prompts under the schema PROMPTS; of a clip the answer is what is written."""
    rows = []
    for index, (family, text) in enumerate(texts):
        answer, entry = text, {}
        if pixels_per_frame is not None:
            answer, (right, down) = split_text(text)
            entry = {"right": right * pixels_per_frame, "down": down * pixels_per_frame}
        rows.append(
            {
                "prompt_id": f"{part}-{family}-{index:05d}",
                "family": family,
                "prompt": text,
                "answer": answer,
                "entry": json.dumps(entry),
            }
        )
    return pd.DataFrame(rows)
