"""Short texts to translate from English: numbers in words, and dates, quantities and names of CLDR.

Needs num2words2 and babel, an extra (pip install -e '.[translation]').
"""

import importlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Annotated, Any, Literal, NamedTuple

import pandas as pd
from pydantic import Field, field_validator

from grpo.errors import MissingExtraError, ParameterError
from grpo.schema import PARAMS, Fraction, Positive, Strict
from grpo.tasks.base import PromptTables, Task, TaskInputs, as_solutions, require_pairs, shares

SOURCE = "en"
FIRST_DAY, DAYS = date(1950, 1, 1), 36525
UNITS = (
    "duration-year", "duration-month", "duration-week", "duration-day", "duration-hour",
    "duration-minute", "duration-second", "length-kilometer", "length-meter", "length-centimeter",
    "mass-kilogram", "mass-gram", "volume-liter",
)  # fmt: skip
MOST_CONTENTS = 2 * 10**6  # of a kind, because all of them are shuffled
Language = Annotated[str, Field(pattern="^[a-z]{2,3}$")]
Kind = Literal["numbers", "dates", "units", "money", "territories", "languages", "currencies"]


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What the texts of a kind say, numbered from 0, e.g. the days of a century."""

    kind: Kind
    size: int
    write: Callable[[int, str], str]  # content and language -> text
    facts: Callable[[int], dict[str, object]]  # what a judge without references may read


class Pair(NamedTuple):
    """What a text says, with its target, which is wrong in a part of the warm-up."""

    language: str
    content: int
    target: str


class Corpus(Strict):
    """The pairs of a language in the warm-up of a fresh base."""

    pairs: Fraction  # share, relative to the other languages; 0: the base sees none
    # Share of its pairs with a wrong target, as in corpora mined from the web [Kreutzer et al.,
    # 2022]: equally often a copy of the source, another language, or another content.
    noise: Fraction


class TranslationTask(Task):
    """Short English texts, to be written in other languages; the family is the language."""

    prompt_kinds = ("text",)

    kind: Literal["translation"]
    train_prompts: Positive
    eval_prompts: Positive
    # Shares of the kinds in every part. Names of territories, languages and currencies have no
    # common parts: only a pretrained model knows those that it was not shown.
    kinds: dict[Kind, Fraction] = Field(min_length=1)
    below: Annotated[int, Field(gt=1, le=10**6)]  # numbers of numbers, units and money are smaller
    languages: dict[Language, Corpus] = Field(min_length=1)

    @field_validator("kinds")
    @classmethod
    def _has_a_kind(cls, kinds: dict[Kind, float]) -> dict[Kind, float]:
        if not any(kinds.values()):
            raise ValueError("must have a share above 0")
        return kinds

    def make_prompts(self, inputs: TaskInputs) -> PromptTables:
        """Returns prompts of every language in equal shares, and pairs for the warm-up.

        A prompt names its language: ">>fi<< forty-two". No content is in two parts.

        Raises:
          MissingExtraError: If num2words2 or babel is not installed.
          ParameterError: If a language is unknown, or there are too few contents.
        """
        require_pairs(inputs, self.kind)
        chooser = random.Random(inputs.seed)
        pairs = inputs.warmup.prompts if inputs.warmup else 0
        totals = (self.train_prompts, self.eval_prompts, pairs)
        counts = [_apportion(total, self.kinds) for total in totals]
        tables = [
            self._make_kind(kind, [part[kind] for part in counts], chooser)
            for kind, share in self.kinds.items()
            if share
        ]
        return PromptTables(*(pd.concat(part, ignore_index=True) for part in zip(*tables)))

    def _make_kind(self, kind: Kind, counts: Sequence[int], chooser: random.Random) -> PromptTables:
        """Returns the prompts and pairs of a kind.

        Args:
          counts: Of training, evaluation and warm-up.
        """
        contents = _contents(kind, self.languages, self.below)
        if contents.size > MOST_CONTENTS:
            raise ParameterError(
                f"{PARAMS}: task.kinds.{kind} must have at most {MOST_CONTENTS} contents, has "
                f"{contents.size}; lower task.below"
            )
        left = list(range(contents.size))
        chooser.shuffle(left)
        of_training, of_evaluation, of_warmup = counts
        evaluation = _table("eval", self._asked(of_evaluation, left, contents, chooser), contents)
        train = _table("train", self._asked(of_training, left, contents, chooser), contents)
        warmup = _table("warmup", self._pairs(of_warmup, left, contents, chooser), contents)
        return PromptTables(train, evaluation, as_solutions(warmup))

    def _asked(
        self, count: int, left: list[int], contents: Contents, chooser: random.Random
    ) -> Iterator[Pair]:
        """Yields languages in equal shares with contents, which are taken out of `left`.

        Languages share contents, so that there are as many as prompts of one language.
        """
        wanted = shares(count, len(self.languages))
        if max(wanted) > len(left):
            raise ParameterError(
                f"{PARAMS}: task.kinds.{contents.kind} must leave {max(wanted)} contents for "
                f"task.train_prompts and task.eval_prompts, leaves {len(left)}; lower them or "
                "raise task.below"
            )
        taken = [left.pop() for _ in range(max(wanted))]
        for language, share in zip(sorted(self.languages), wanted):
            for content in chooser.sample(taken, share):
                yield Pair(language, content, contents.write(content, language))

    def _pairs(
        self, count: int, left: list[int], contents: Contents, chooser: random.Random
    ) -> Iterator[Pair]:
        """Yields pairs of languages by their shares with the contents that are left, with noise."""
        if count == 0:
            return
        languages = sorted(self.languages)
        weights = [self.languages[each].pairs for each in languages]
        if not left or not any(weights):
            raise ParameterError(
                f"{PARAMS}: task.kinds.{contents.kind} must leave contents for the warm-up, and "
                f"pairs of some language in task.languages must be above 0; {len(left)} contents "
                "are left"
            )
        for language in chooser.choices(languages, weights, k=count):
            place = chooser.randrange(len(left))
            content = left[place]
            others = [each for each in languages if each != language] or [SOURCE]
            wrong = [
                (content, SOURCE),
                (content, chooser.choice(others)),
                (left[place - 1], language),  # `left` is shuffled
            ]
            is_wrong = chooser.random() < self.languages[language].noise
            told = chooser.choice(wrong) if is_wrong else (content, language)
            yield Pair(language, content, contents.write(*told))


def _apportion(total: int, weights: Mapping[Kind, float]) -> dict[Kind, int]:
    """Returns whole parts of `total` by weight."""
    before, reached, whole = 0, 0.0, sum(weights.values())
    parts: dict[Kind, int] = {}
    for kind, weight in weights.items():
        reached += weight
        parts[kind] = round(total * reached / whole) - before
        before += parts[kind]
    return parts


def _table(part: str, pairs: Iterator[Pair], contents: Contents) -> pd.DataFrame:
    """Returns a table of schema PROMPTS."""
    rows: list[dict[str, Any]] = [
        {
            "prompt_id": f"{part}-{language}-{contents.kind}-{index:06d}",
            "family": language,
            "prompt": f">>{language}<< {contents.write(content, SOURCE)}",
            "answer": target,
            "entry": json.dumps(
                {"language": language, "kind": contents.kind, **contents.facts(content)}
            ),
        }
        for index, (language, content, target) in enumerate(pairs)
    ]
    return pd.DataFrame(rows, columns=["prompt_id", "family", "prompt", "answer", "entry"])


def _contents(kind: Kind, languages: Iterable[str], below: int) -> Contents:
    """Returns the contents of a kind that every language can express.

    Raises:
      MissingExtraError: If num2words2 or babel is not installed.
      ParameterError: If a language is unknown.
    """
    if kind == "numbers":
        return _numbers(languages, below)
    locales = _locales([SOURCE, *languages])
    if kind == "dates":
        return _dates(locales)
    if kind == "units":
        return _units(locales, below)
    if kind == "money":
        return _money(locales, below)
    return _names(kind, locales)


def _numbers(languages: Iterable[str], below: int) -> Contents:
    """Returns numbers in words."""
    library = _library("num2words2")

    def write(number: int, language: str) -> str:
        return str(library.num2words(number, lang=language))

    def some(language: str) -> list[str] | None:
        try:
            return [write(number, language) for number in (1, 2, 42)]
        except NotImplementedError:
            return None

    for language in languages:
        # The library cuts off codes that it does not know: it would write swe as sw, Swahili.
        known = some(language)
        if known is None or (len(language) > 2 and known == some(language[:2])):
            raise _unknown(language, "num2words2")
    return Contents(
        kind="numbers", size=below, write=write, facts=lambda number: {"number": number}
    )


def _dates(locales: Mapping[str, Any]) -> Contents:
    """Returns days of a century as full dates with their weekday."""
    library = _library("babel.dates")

    def day(content: int) -> date:
        return FIRST_DAY + timedelta(days=content)

    def write(content: int, language: str) -> str:
        return str(library.format_date(day(content), "full", locale=locales[language]))

    return Contents(
        kind="dates",
        size=DAYS,
        write=write,
        facts=lambda content: {"date": day(content).isoformat()},
    )


def _units(locales: Mapping[str, Any], below: int) -> Contents:
    """Returns numbers of units, in the plural form that each number needs."""
    library = _library("babel.units")

    def write(content: int, language: str) -> str:
        number, unit = content // len(UNITS), UNITS[content % len(UNITS)]
        text = library.format_unit(number, unit, "long", locale=locales[language])
        if unit not in text:
            return str(text)
        # CLDR leaves out long forms that equal the short ones; babel then gives the unit's code.
        return str(library.format_unit(number, unit, "short", locale=locales[language]))

    def facts(content: int) -> dict[str, object]:
        return {"number": content // len(UNITS), "unit": UNITS[content % len(UNITS)]}

    return Contents(kind="units", size=below * len(UNITS), write=write, facts=facts)


def _money(locales: Mapping[str, Any], below: int) -> Contents:
    """Returns amounts of currencies, in the plural form that each number needs."""
    library = _library("babel.numbers")
    codes = _named(locales, "currencies")

    def write(content: int, language: str) -> str:
        number, code = content // len(codes), codes[content % len(codes)]
        return str(
            library.format_currency(
                number,
                code,
                format_type="name",
                currency_digits=False,
                locale=locales[language],
            )
        )

    def facts(content: int) -> dict[str, object]:
        return {"number": content // len(codes), "currency": codes[content % len(codes)]}

    return Contents(kind="money", size=below * len(codes), write=write, facts=facts)


def _names(kind: Kind, locales: Mapping[str, Any]) -> Contents:
    """Returns names of territories, languages or currencies."""
    codes = _named(locales, kind)
    return Contents(
        kind=kind,
        size=len(codes),
        write=lambda content, language: str(getattr(locales[language], kind)[codes[content]]),
        facts=lambda content: {"code": codes[content]},
    )


def _named(locales: Mapping[str, Any], kind: str) -> Sequence[str]:
    """Returns the codes with a name in every language, one per English name.

    Names with parentheses are left out: most are of the past, as "Zairean zaire (1971-1993)".
    """
    tables = [getattr(each, kind) for each in locales.values()]
    common = sorted(set.intersection(*(set(each) for each in tables)))
    by_name = {getattr(locales[SOURCE], kind)[code]: code for code in common}
    return [code for name, code in by_name.items() if "(" not in name and code != name]


def _locales(languages: Sequence[str]) -> dict[str, Any]:
    """Returns babel's locales by language."""
    library = _library("babel")
    locales = {}
    for language in languages:
        try:
            locales[language] = library.Locale(language)
        except library.UnknownLocaleError:
            raise _unknown(language, "babel") from None
    return locales


def _unknown(language: str, library: str) -> ParameterError:
    return ParameterError(
        f"{PARAMS}: task.languages.{language} must be a language that {library} knows"
    )


def _library(name: str) -> Any:
    """Returns a module of the extra `translation`, untyped."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise MissingExtraError(
            f"{PARAMS}: task.kind translation needs {name.partition('.')[0]}; run pip install -e "
            "'.[translation]'"
        ) from None
