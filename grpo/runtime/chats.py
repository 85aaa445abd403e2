"""Prompts of several messages, which tables store as JSON: [{"role": "system", ...}, ...]."""

import json
from collections.abc import Sequence
from typing import Any, TypedDict

ROLES = ("system", "user", "assistant")


class Message(TypedDict):
    """A message of a chat, as chat templates of `transformers` read it."""

    role: str
    content: str


def is_chat(messages: object) -> bool:
    """Returns whether something is a list of messages that ends with one of the user."""
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(_is_message(each) for each in messages)
        and messages[-1]["role"] == "user"
    )


def _is_message(message: object) -> bool:
    match message:
        case {"role": str(role), "content": str(), **rest}:
            return role in ROLES and not rest
    return False


def write_chat(messages: Sequence[Message]) -> str:
    """Returns the prompt of a chat; one message of the user is a plain text."""
    if len(messages) == 1:
        return messages[0]["content"]
    return _canonical(messages)


def read_chat(prompt: str) -> list[Message]:
    """Returns the messages of a prompt; a plain text is one message of the user."""
    return _stored(prompt) or [{"role": "user", "content": prompt}]


def has_messages(prompt: str) -> bool:
    """Returns whether a prompt is a chat of several messages."""
    return _stored(prompt) is not None


def extend_prompt(prompt: str, text: str) -> str:
    """Returns a prompt with a text after it; after the last message of a chat."""
    messages = _stored(prompt)
    if messages is None:
        return prompt + text
    last: Message = {"role": "user", "content": messages[-1]["content"] + text}
    return _canonical([*messages[:-1], last])


def show_prompt(prompt: str) -> str:
    """Returns a prompt for people: the messages of a chat under their roles."""
    messages = _stored(prompt)
    if messages is None:
        return prompt
    return "\n\n".join(f"{each['role']}: {each['content']}" for each in messages)


def _stored(prompt: str) -> list[Message] | None:
    """Returns the messages that `write_chat` stored; None for any other text."""
    if not prompt.startswith('[{"role": "'):
        return None
    try:
        messages: Any = json.loads(prompt)
    except (ValueError, RecursionError):  # no JSON, or a number of thousands of digits
        return None
    is_stored = is_chat(messages) and len(messages) > 1 and _canonical(messages) == prompt
    return messages if is_stored else None


def _canonical(messages: Sequence[Message]) -> str:
    ordered = [{"role": each["role"], "content": each["content"]} for each in messages]
    return json.dumps(ordered, ensure_ascii=False)
