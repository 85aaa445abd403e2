"""The judge chrF++ against the reference, for evaluation and as an upper line of training.

Needs sacrebleu, an extra (pip install -e '.[translation]').
"""

from functools import cache
from typing import Any

from grpo.errors import MissingExtraError
from grpo.rewards.base import AnswerJudge, Judge, JudgeInputs, Task
from grpo.schema import PARAMS

WORDS = 2  # longest n-gram of words: the ++ of chrF++


def load(inputs: JudgeInputs) -> AnswerJudge:
    """Returns the judge.

    Raises:
      MissingExtraError: If sacrebleu is not installed.
    """
    _metric()
    return score_chrf


def score_chrf(answer: str, task: Task) -> float:
    """Returns the sentence's chrF++ with the reference, in [0, 1]. [Popovic, 2017]"""
    score: float = _metric().sentence_score(answer, [task.answer]).score
    return min(score / 100, 1.0)  # rounding can exceed 100


@cache
def _metric() -> Any:
    try:
        # Imported here: an extra, which `grpo check` does not need.
        from sacrebleu.metrics.chrf import CHRF
    except ImportError:
        raise MissingExtraError(
            f"{PARAMS}: the judge chrf needs sacrebleu; run pip install -e '.[translation]'"
        ) from None
    return CHRF(word_order=WORDS)


JUDGE = Judge(reads="text", load=load)
