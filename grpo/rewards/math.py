"""The judge of mathematical answers: math-verify, an extra (pip install -e '.[math]')."""

import logging

from grpo.errors import MissingExtraError
from grpo.rewards.base import AnswerJudge, Judge, JudgeInputs, Task
from grpo.schema import PARAMS


def load(inputs: JudgeInputs) -> AnswerJudge:
    """Returns the judge.

    Raises:
      MissingExtraError: If math-verify is not installed.
    """
    try:
        import math_verify  # noqa: F401
    except ImportError:
        raise MissingExtraError(
            f"{PARAMS}: {inputs.where}.judge math needs math-verify; run pip install -e '.[math]'"
        ) from None
    # math-verify warns at every call that its timeouts are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return verify_math


def verify_math(answer: str, task: Task) -> float:
    """Returns 1.0 if the answer is mathematically equal to the task's answer, else 0.0."""
    # Imported here: an extra, which `grpo check` does not need.
    import math_verify

    # Timeouts are off, because they use SIGALRM, which the caller uses.
    expected = math_verify.parse(task.answer, parsing_timeout=None)
    given = math_verify.parse(answer, parsing_timeout=None)
    return float(math_verify.verify(expected, given, timeout_seconds=None))


JUDGE = Judge(reads="text", load=load)
