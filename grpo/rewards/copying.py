"""The judge that refuses copies of the source, which the judge `embeddings` scores highest."""

import unicodedata

from grpo.rewards.base import Judge, Task


def refuse_copy(answer: str, task: Task) -> float:
    """Returns 0.0 for the source itself, in any case and with any spaces, else 1.0.

    A translation may equal its source, as the name "Estonia" in Spanish.
    """
    return float(_fold(answer) != _fold(task.source))


def _fold(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


JUDGE = Judge(reads="text", load=lambda inputs: refuse_copy)
