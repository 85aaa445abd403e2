"""A judge without references: a number in words is read back and compared with the source's.

Needs words2num2, an extra (pip install -e '.[translation]').
"""

from typing import Any

from grpo.errors import MissingExtraError
from grpo.rewards.base import AnswerJudge, Judge, JudgeInputs, Task
from grpo.schema import PARAMS


def load(inputs: JudgeInputs) -> AnswerJudge:
    """Returns the judge.

    Raises:
      MissingExtraError: If words2num2 is not installed.
    """
    try:
        import words2num2  # noqa: F401
    except ImportError:
        raise MissingExtraError(
            f"{PARAMS}: {inputs.where}.judge back_parsing needs words2num2; run pip install -e "
            "'.[translation]'"
        ) from None
    return read_back


def read_back(answer: str, task: Task) -> float:
    """Returns 1.0 if the answer is the source's number in the words of its language, else 0.0.

    Digits are no words: a copy of them would be read as the number in any language.

    Raises:
      ValueError: If the answer is not a number in words of that language.
    """
    # Imported here: an extra, which `grpo check` does not need.
    import words2num2

    library: Any = words2num2  # untyped
    if any(each.isdigit() for each in answer):
        raise ValueError("an answer must be in words, without digits")
    try:
        number = library.words2num(answer, lang=str(task.entry["language"]))
    except library.Words2NumError as error:
        raise ValueError(str(error)) from None
    return float(number == task.entry["number"])


JUDGE = Judge(reads="text", load=load, needs_task="translation")
