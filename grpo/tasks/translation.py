"""Numbers in words to translate from English; the contents of all parts are disjoint.

Needs num2words2, an extra (pip install -e '.[translation]').
"""

import json
import random
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import Field

from grpo.errors import MissingExtraError, ParameterError
from grpo.modalities.modality import TextWarmup
from grpo.schema import PARAMS, Fraction, Positive
from grpo.tasks.base import PromptTables, Task, TaskInputs, shares

SOURCE = "en"
WARMUP_COLUMNS = ["prompt_id", "family", "prompt", "solution"]
Language = Annotated[str, Field(pattern="^[a-z]{2,3}$")]


class TranslationTask(Task):
    """English numbers in words, to be written in other languages; the family is the language."""

    prompt_kinds = ("text",)

    kind: Literal["translation"]
    train_prompts: Positive
    eval_prompts: Positive
    below: Annotated[int, Field(gt=1, le=10**6)]  # numbers are smaller
    # Share of the warm-up's pairs, relative to the other languages: 0 for a language of which the
    # base sees none.
    languages: dict[Language, Fraction] = Field(min_length=1)

    def make_prompts(self, inputs: TaskInputs) -> PromptTables:
        """Returns prompts of every language in equal shares, and pairs for the warm-up.

        A prompt names its language: ">>fi<< forty-two". No number is in two parts.

        Raises:
          MissingExtraError: If num2words2 is not installed.
          ParameterError: If a language is unknown, or there are too few numbers.
        """
        spell = _speller(self.languages)
        chooser = random.Random(inputs.seed)
        numbers = list(range(self.below))
        chooser.shuffle(numbers)
        evaluation = _ask("eval", self._asked(self.eval_prompts, numbers, chooser), spell)
        train = _ask("train", self._asked(self.train_prompts, numbers, chooser), spell)
        warmup = pd.DataFrame(columns=WARMUP_COLUMNS)
        if inputs.warmup:
            if isinstance(inputs.warmup, TextWarmup):
                raise ParameterError(
                    f"{PARAMS}: policy.base.warmup.answer_mark is unknown with task.kind "
                    "translation, so are worked_fraction and wrong_fraction; remove them"
                )
            pairs = _ask("warmup", self._pairs(inputs.warmup.prompts, numbers, chooser), spell)
            warmup = pairs.rename(columns={"answer": "solution"})[WARMUP_COLUMNS]
        return PromptTables(train, evaluation, warmup)

    def _asked(
        self, count: int, numbers: list[int], chooser: random.Random
    ) -> Iterator[tuple[str, int]]:
        """Yields languages in equal shares with numbers, which are taken out of `numbers`.

        Languages share numbers, so that there are as many as prompts of one language.
        """
        wanted = shares(count, len(self.languages))
        if max(wanted) > len(numbers):
            raise ParameterError(
                f"{PARAMS}: task.below must leave {max(wanted)} numbers for task.train_prompts and "
                f"task.eval_prompts, leaves {len(numbers)}; raise it"
            )
        taken = [numbers.pop() for _ in range(max(wanted))]
        for language, share in zip(sorted(self.languages), wanted):
            yield from ((language, number) for number in chooser.sample(taken, share))

    def _pairs(
        self, count: int, numbers: list[int], chooser: random.Random
    ) -> Iterator[tuple[str, int]]:
        """Yields languages by their weights with the numbers that are left, which may repeat."""
        weights = [self.languages[each] for each in sorted(self.languages)]
        if not numbers or not any(weights):
            raise ParameterError(
                f"{PARAMS}: task.below must leave numbers for the warm-up, and some share in "
                f"task.languages must be above 0; {len(numbers)} numbers are left"
            )
        for language in chooser.choices(sorted(self.languages), weights, k=count):
            yield language, chooser.choice(numbers)


def _ask(
    part: str, asked: Iterator[tuple[str, int]], spell: Callable[[int, str], str]
) -> pd.DataFrame:
    """Returns a table of schema PROMPTS."""
    rows: list[dict[str, Any]] = []
    for index, (language, number) in enumerate(asked):
        rows.append(
            {
                "prompt_id": f"{part}-{language}-{index:06d}",
                "family": language,
                "prompt": f">>{language}<< {spell(number, SOURCE)}",
                "answer": spell(number, language),
                "entry": json.dumps({"language": language, "number": number}),
            }
        )
    return pd.DataFrame(rows)


def _speller(languages: dict[str, float]) -> Callable[[int, str], str]:
    """Returns a function that writes a number in a language.

    Raises:
      MissingExtraError: If num2words2 is not installed.
      ParameterError: If it does not know a language.
    """
    try:
        import num2words2
    except ImportError:
        raise MissingExtraError(
            f"{PARAMS}: task.kind translation needs num2words2; run pip install -e '.[translation]'"
        ) from None

    library: Any = num2words2  # untyped

    def spell(number: int, language: str) -> str:
        return str(library.num2words(number, lang=language))

    for language in languages:
        try:
            spell(1, language)
        except NotImplementedError:
            raise ParameterError(
                f"{PARAMS}: task.languages.{language} must be a language that num2words2 knows"
            ) from None
    return spell
