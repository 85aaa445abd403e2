"""Short texts to be drawn, and how a warm-up draws them: one place per character."""

import random
from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from grpo.errors import ParameterError
from grpo.tasks.base import PromptTables, shares

Alphabets = Sequence[str]  # the characters that may stand at each place


def make_prompts(
    *,
    families: Mapping[str, Alphabets],
    train_prompts: int,
    eval_prompts: int,
    warmup_prompts: Mapping[str, int],
    wrong_fraction: float,
    seed: int,
) -> PromptTables:
    """Returns texts of every family in equal shares; none of the prompts is in the warm-up.

    Args:
      warmup_prompts: Of each family: the more, the better the base will draw it.
      wrong_fraction: Of the warm-up's captions whose drawing shows another text of their family.

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
        train=_prompt_frame(parts["train"], "train"),
        eval=_prompt_frame(parts["eval"], "eval"),
        warmup=pd.DataFrame(warmup, columns=["prompt_id", "family", "prompt", "solution"]),
    )


def draw_texts(
    texts: Sequence[str], *, height: int, width: int, font_size: int, character_width: int
) -> NDArray[np.uint8]:
    """Returns light on dark drawings, shape [text, 1, height, width], in 256 levels.

    Characters stand in places of equal width from the left edge, centered, on one baseline. The
    font is the one in the wheel of pillow.
    """
    font = ImageFont.load_default(size=font_size)
    drawn = np.empty((len(texts), 1, height, width), dtype=np.uint8)
    for index, text in enumerate(texts):
        image = Image.new("L", (width, height), 0)
        pen = ImageDraw.Draw(image)
        _, top, _, bottom = pen.textbbox((0, 0), "H8", font=font)
        for place, character in enumerate(text):
            left = character_width * (place + 0.5) - pen.textlength(character, font=font) / 2
            pen.text((left, (height - top - bottom) / 2), character, 255, font=font)
        drawn[index, 0] = np.asarray(image)
    return drawn


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


def _prompt_frame(texts: list[tuple[str, str]], part: str) -> pd.DataFrame:
    """Returns the prompts under the schema PROMPTS."""
    rows = [
        {
            "prompt_id": f"{part}-{family}-{index:05d}",
            "family": family,
            "prompt": text,
            "answer": text,
            "entry": "{}",
        }
        for index, (family, text) in enumerate(texts)
    ]
    return pd.DataFrame(rows)
