"""The judge of form: an answer of one line of printable text."""

import unicodedata

from grpo.rewards.base import Judge, Task


def check_form(answer: str, task: Task) -> float:
    """Returns 1.0 for a line that is not empty and has no characters but printable ones.

    The replacement character of broken UTF-8, which byte tokenizers can produce, is refused.
    """
    plain = unicodedata.normalize("NFKC", answer)  # special spaces count as spaces
    return float(plain.isprintable() and plain.strip() != "" and "\ufffd" not in plain)


JUDGE = Judge(reads="text", load=lambda inputs: check_form)
