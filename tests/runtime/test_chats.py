"""Prompts of several messages: what is written is read, and any other text is left as it is."""

from hypothesis import given
from hypothesis import strategies as st

from grpo.runtime.chats import (
    Message,
    extend_prompt,
    has_messages,
    is_chat,
    read_chat,
    show_prompt,
    write_chat,
)

SAID = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text()}
)
LAST = st.fixed_dictionaries({"role": st.just("user"), "content": st.text()})
CHATS = st.builds(lambda before, last: [*before, last], st.lists(SAID, max_size=3), LAST)


@given(CHATS, st.text())
def test_the_messages_that_are_written_are_read_and_extended(chat: list[Message], more: str):
    if len(chat) == 1 and has_messages(chat[0]["content"]):
        return  # refused by tasks
    assert is_chat(chat)
    prompt = write_chat(chat)
    assert read_chat(prompt) == chat
    assert has_messages(prompt) == (len(chat) > 1)
    extended = [*chat[:-1], {"role": "user", "content": chat[-1]["content"] + more}]
    assert read_chat(extend_prompt(prompt, more)) == extended
    assert all(each["content"] in show_prompt(prompt) for each in chat)


@given(st.text() | st.sampled_from(['[{"role": "', '[{"role": "user", "content": "x"}]']))
def test_a_plain_text_is_one_message_of_the_user(text: str):
    assert read_chat(text) == [{"role": "user", "content": text}]
    assert show_prompt(text) == text
    assert extend_prompt(text, "!") == text + "!"


def test_a_text_with_a_number_that_python_does_not_read_is_a_plain_text():
    text = f'[{{"role": "user", "content": {"9" * 5000}}}]'
    assert read_chat(text) == [{"role": "user", "content": text}]
    assert not has_messages(text)
