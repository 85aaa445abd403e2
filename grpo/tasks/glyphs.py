"""Short texts to be drawn as images or as clips of moving text."""

import json
import random
from collections.abc import Mapping, Sequence
from math import prod
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import Field

from grpo.errors import ParameterError
from grpo.modalities.shared.drawings import split_text
from grpo.schema import PARAMS, Name, Positive
from grpo.tasks.base import PromptTables, Task, TaskInputs, shares

Alphabets = Sequence[str]  # the allowed characters at each position


class GlyphsTask(Task):
    """Short texts to be drawn; prompts of train, eval and warm-up are disjoint."""

    prompt_kinds = ("caption",)

    kind: Literal["glyphs"]
    train_prompts: Positive
    eval_prompts: Positive
    families: dict[Name, list[Annotated[str, Field(min_length=1)]]] = Field(min_length=1)
    # family -> the allowed characters at each position; for clips, the last is an arrow: > < v ^
    pixels_per_frame: Positive | None  # speed of the text in clips; null: images

    def make_prompts(self, inputs: TaskInputs) -> PromptTables:
        warmup = inputs.warmup
        return make_prompts(
            families=self.families,
            train_prompts=self.train_prompts,
            eval_prompts=self.eval_prompts,
            warmup_prompts=self._divide(warmup) if warmup else {},
            wrong_fraction=warmup.wrong_fraction if warmup else 0.0,
            seed=inputs.seed,
            pixels_per_frame=self.pixels_per_frame,
        )

    def _divide(self, warmup: Any) -> dict[str, int]:
        """Returns the number of warm-up prompts per family.

        Raises:
          ParameterError: If the shares do not name the task's families.
        """
        if warmup.shares.keys() != self.families.keys():
            raise ParameterError(
                f"{PARAMS}: policy.base.warmup.shares must name the families of the task, "
                f"{sorted(self.families)}, got {sorted(warmup.shares)}"
            )
        total = sum(warmup.shares.values())
        return {name: round(warmup.prompts * each / total) for name, each in warmup.shares.items()}


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
    """Returns texts of every family in equal shares; the warm-up contains none of the prompts.

    Args:
      warmup_prompts: Number per family, which determines the base's skill in it.
      wrong_fraction: Fraction of warm-up captions whose drawing shows another text of the family.
      pixels_per_frame: Speed of the text in clips; None: images.

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
                f"{PARAMS}: task.families.{family} must have more texts than the {wanted} that "
                f"train_prompts and eval_prompts take, because the warm-up needs others, got "
                f"{total}; add characters or lower the prompts"
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
    """Returns rows of the schema WARMUP: the caption and the text of its drawing."""
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
    """Returns a table of schema PROMPTS; the answer of a clip is its text without the arrow."""
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
