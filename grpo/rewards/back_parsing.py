"""A judge without references: what a text says is read back and compared with the source's.

Reads numbers in words and dates. Needs words2num2 and dateparser, an extra
(pip install -e '.[translation]').
"""

from datetime import date
from decimal import Decimal
from typing import Any

from grpo.errors import MissingExtraError, ParameterError
from grpo.rewards.base import AnswerJudge, Judge, JudgeInputs, Task
from grpo.schema import PARAMS

# Otherwise a missing part would be that of today.
ALL_PARTS = {"REQUIRE_PARTS": ["day", "month", "year"]}


def load(inputs: JudgeInputs) -> AnswerJudge:
    """Returns the judge.

    Raises:
      MissingExtraError: If words2num2 or dateparser is not installed.
    """
    try:
        import dateparser  # noqa: F401
        import words2num2  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            f"{PARAMS}: {inputs.where}.judge back_parsing needs {error.name}; run pip install -e "
            "'.[translation]'"
        ) from None
    return read_back


def read_back(answer: str, task: Task) -> float:
    """Returns 1.0 if the answer is the source's number or date in its language, else 0.0.

    A weekday is not read; an ordinal, as third, is read as its number.

    Raises:
      ValueError: If the answer is not a number in words, or a date, of that language.
      ParameterError: If the text has another kind, or the language is unknown.
    """
    language = str(task.entry["language"])
    if task.entry["kind"] == "numbers":
        return float(_read_number(answer, language) == task.entry["number"])
    if task.entry["kind"] == "dates":
        return float(_read_date(answer, language).isoformat() == task.entry["date"])
    raise ParameterError(
        f"{PARAMS}: the judge back_parsing must have task.kinds numbers and dates only, got "
        f"{task.entry['kind']}; remove it or choose the judge embeddings"
    )


def _read_number(answer: str, language: str) -> int | float | Decimal:
    """Returns a number in words. Digits are no words: they are read alike in every language."""
    # Imported here, as below: an extra, which `grpo check` does not need.
    import words2num2

    library: Any = words2num2  # untyped
    if any(each.isdigit() for each in answer):
        raise ValueError("a number must be in words, has digits")
    try:
        number: int | float | Decimal = library.words2num(answer, lang=language)
    except library.Words2NumError as error:
        raise ValueError(str(error)) from None
    return number


def _read_date(answer: str, language: str) -> date:
    """Returns a date in words. 1996-09-16, also with UTC or T behind it, is read in every language.

    Finnish and Georgian share no word of a date with other languages: what one of them reads, too,
    has no word of its language.
    """
    import dateparser

    library: Any = dateparser

    def parse(of_language: str) -> Any:
        return library.parse(answer, languages=[of_language], settings=ALL_PARTS)

    try:
        found = parse(language)
    except ValueError as error:
        raise ParameterError(
            f"{PARAMS}: the judge back_parsing must have languages whose dates dateparser "
            f"reads, got {language}: {error}; remove it from task.languages"
        ) from None
    if found is None:
        raise ValueError(f"no date of the language {language}")
    if found == parse("ka" if language == "fi" else "fi"):
        raise ValueError(f"a date must have words of the language {language}")
    return date(found.year, found.month, found.day)


JUDGE = Judge(reads="text", load=load, needs_task="translation")
