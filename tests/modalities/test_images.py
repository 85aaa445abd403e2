"""Prompts with an image: what is joined comes apart again, and people read the question only."""

import pytest

from grpo.errors import ParameterError
from grpo.modalities.shared.images import join_prompt, split_prompt, without_images
from grpo.report.samples import visible


@pytest.mark.parametrize("question", ["", "where is (it)?", "two\nlines ![](x)"])
@pytest.mark.parametrize("image", [b"a", bytes(range(256))])
def test_a_prompt_comes_apart_into_its_image_and_its_question(image: bytes, question: str):
    prompt = join_prompt(image, question)
    assert split_prompt(prompt) == (image, question)
    assert without_images(prompt) == f"[image] {question}"
    assert visible(prompt) == f"[image] {question}"


def test_a_text_without_an_image_is_shown_unchanged_and_is_no_such_prompt():
    for text in ("where is it?", "![](photo.png)where", f" {join_prompt(b'a', 'late')}"[:20]):
        assert without_images(text) == text
        with pytest.raises(ParameterError, match="must give prompts that begin with an image"):
            split_prompt(text)
