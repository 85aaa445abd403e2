"""The judge chrF++ against the reference, for evaluation and as an upper line of training.

An evaluation also has chrF++ and BLEU of the whole corpus of each family.

Needs sacrebleu, an extra (pip install -e '.[translation]').
"""

import unicodedata
from collections.abc import Sequence
from functools import cache
from typing import Any

from grpo.errors import MissingExtraError
from grpo.rewards.base import AnswerJudge, Judge, JudgeInputs, Task
from grpo.schema import PARAMS

WORDS = 2  # longest n-gram of words: the ++ of chrF++
# Scripts without spaces between words, as the names of their characters begin.
UNSPACED = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN")


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


def score_corpus(texts: Sequence[str], tasks: Sequence[Task]) -> dict[str, float]:
    """Returns chrF++ and BLEU of a corpus, in [0, 1]. [Papineni et al., 2002]

    BLEU is of characters in scripts without spaces, else of sacrebleu's words (13a).
    """
    from sacrebleu.metrics.bleu import BLEU

    references = [[task.answer for task in tasks]]
    letters = {letter for text in references[0] for letter in text}
    is_unspaced = any(unicodedata.name(each, "").startswith(UNSPACED) for each in letters)
    bleu = BLEU(tokenize="char" if is_unspaced else "13a")
    stripped = [text.strip() for text in texts]
    return {
        "chrf": min(_metric().corpus_score(stripped, references).score / 100, 1.0),
        "bleu": min(bleu.corpus_score(stripped, references).score / 100, 1.0),
    }


@cache
def _metric() -> Any:
    try:
        # Imported here: an extra, which `grpo check` does not need.
        from sacrebleu.metrics.chrf import CHRF
    except ImportError:
        raise MissingExtraError(
            f"{PARAMS}: judges of chrF++ need sacrebleu; run pip install -e '.[translation]'"
        ) from None
    return CHRF(word_order=WORDS)


JUDGE = Judge(reads="text", load=load, score_corpus=score_corpus)
