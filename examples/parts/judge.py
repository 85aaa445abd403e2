"""A judge, as a reward function of TRL: say here what it rewards."""

from typing import Any


def my_part(
    prompts: list[str], completions: list[str], answer: list[str], **columns: Any
) -> list[float]:
    """Returns 1 for a text that contains the prompt's answer and 0 for others."""
    return [float(right in text) for text, right in zip(completions, answer)]
