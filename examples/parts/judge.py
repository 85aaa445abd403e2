"""A judge, as a reward function of TRL: say here what it rewards."""

from typing import Any


def my_part(
    prompts: list[Any], completions: list[Any], answer: list[str], **columns: Any
) -> list[float]:
    """Returns 1 for a completion that contains the prompt's answer and 0 for others.

    With `policy.prompt_format: chat` a completion is a list with one message.
    """
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [float(right in text) for text, right in zip(texts, answer)]
