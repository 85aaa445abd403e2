"""The judge of texts by a reward model: a sequence classifier with one output."""

from collections.abc import Sequence
from typing import Any

from grpo.rewards.base import Judge, JudgeInputs, Reader, Task, View
from grpo.runtime.chats import Message, read_chat, show_prompt
from grpo.runtime.sources import find_source, refusal


def load(inputs: JudgeInputs) -> Reader:
    """Returns the judge with its model on the machine's device.

    Raises:
      ParameterError: If the model cannot be loaded, has several outputs, or the device is missing.
    """
    # Imported here: these import torch, which `grpo check` does not need.
    from transformers import AutoModelForSequenceClassification

    from grpo.rewards._frozen_models import load_frozen, load_tokenizer
    from grpo.runtime.machine import prepare_machine

    assert inputs.model is not None
    prepare_machine(inputs.machine)
    source = find_source(inputs.model, inputs.data, parameter=f"{inputs.where}.model")
    model = load_frozen(source, AutoModelForSequenceClassification)
    if model.config.num_labels != 1:
        raise refusal(source, f"it has {model.config.num_labels} outputs; a reward model has one")
    return read_by_model(model.to(inputs.machine.device), load_tokenizer(source))


def read_by_model(model: Any, tokenizer: Any) -> Reader:
    """Returns a judge whose raw score is the model's output for a prompt and the rollout's text.

    They are the messages of a chat if the tokenizer has a chat template, else a pair of texts. A
    tag of a language is no part of the prompt, so that the model may be one of translation quality.
    Without a padding token, texts are read one by one: another token in its place could be taken
    for the end of a text.

    Args:
      model: A model with one output, in evaluation mode.
    """
    tokenizer.padding_side = "right"  # the first token has the first position
    model.config.pad_token_id = tokenizer.pad_token_id  # a decoder's output is before it

    def read(texts: Sequence[str], tasks: Sequence[Task]) -> list[View]:
        size = len(texts) if tokenizer.pad_token else 1
        prompts = [each.source for each in tasks]
        scores = [
            score
            for start in range(0, len(texts), size)
            for score in _score(
                model, tokenizer, prompts[start : start + size], texts[start : start + size]
            )
        ]
        return [View(f"{each:.3f}", each) for each in scores]

    return read


def _score(model: Any, tokenizer: Any, prompts: Sequence[str], texts: Sequence[str]) -> list[float]:
    """Returns the model's outputs for prompts and texts of one batch."""
    import torch

    asked: tuple[list[str], ...] = ([*map(show_prompt, prompts)], list(texts))
    if tokenizer.chat_template is not None:
        chats = [_as_chat(*each) for each in zip(prompts, texts)]
        asked = (tokenizer.apply_chat_template(chats, tokenize=False),)
    inputs = tokenizer(
        *asked,
        add_special_tokens=tokenizer.chat_template is None,  # the template has them
        padding=tokenizer.pad_token is not None,
        return_tensors="pt",
    ).to(model.device)
    with torch.no_grad():
        scores: list[float] = model(**inputs).logits[:, 0].double().tolist()
    return scores


def _as_chat(prompt: str, text: str) -> list[Message]:
    return [*read_chat(prompt), {"role": "assistant", "content": text}]


JUDGE = Judge(reads="text", load=load, needs_model=True, reads_together=True)
