"""The judge of equality with the reference."""

import unicodedata

from grpo.rewards.base import Judge, Task


def match(answer: str, task: Task) -> float:
    """Returns 1.0 if answer and reference are equal after NFKC and with single spaces, else 0.0."""
    return float(_normalize(answer) == _normalize(task.answer))


def _normalize(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).split())


JUDGE = Judge(reads="text", load=lambda inputs: match)
