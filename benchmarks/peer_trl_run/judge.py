"""The judge reasoning_gym of this project without its process, for TRL's environment."""

import json
import re
from functools import cache
from typing import Any

import reasoning_gym


def outcome_of(
    text: str, family: str, entry: str, *, answer_pattern: str, threshold: float
) -> float:
    """Returns 1.0 if reasoning-gym scores the last answer in a text at least `threshold`, or 0.0.

    Args:
      entry: The prompt's entry as JSON, a column of artifacts/prompts.
    """
    answers = re.findall(answer_pattern, text)
    if not answers:
        return 0.0
    try:
        score = _judge(family).score_answer(answers[-1].strip(), json.loads(entry))
    except ValueError:  # the answer cannot be parsed, as for the project's judge
        return 0.0
    return float(score >= threshold)


@cache
def _judge(family: str) -> Any:
    return reasoning_gym.create_dataset(family, size=1, seed=0)
