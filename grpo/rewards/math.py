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
            f"{PARAMS}: reward.judge math needs math-verify; run pip install -e '.[math]'"
        ) from None
    # It warns at every call that its own timeouts are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return verify_math


def verify_math(answer: str, task: Task) -> float:
    """Returns 1.0 if the answer equals the prompt's in mathematics, else 0.0."""
    # Imported here: an extra, which `grpo check` need not load.
    import math_verify

    # Its own timeouts use SIGALRM, which the caller holds.
    expected = math_verify.parse(task.answer, parsing_timeout=None)
    given = math_verify.parse(answer, parsing_timeout=None)
    return float(math_verify.verify(expected, given, timeout_seconds=None))


JUDGE = Judge(reads="text", load=load)
