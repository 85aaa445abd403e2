"""A judge without references: the cosine of source and answer in LaBSE, a multilingual BERT."""

from collections.abc import Sequence
from typing import Any

from grpo.rewards.base import Judge, JudgeInputs, Reader, Task, View
from grpo.runtime.sources import find_source


def load(inputs: JudgeInputs) -> Reader:
    """Returns the judge with its model on the machine's device.

    Raises:
      ParameterError: If the model cannot be loaded or has no pooler, or the device is missing.
    """
    # Imported here: these import torch, which `grpo check` does not need.
    from transformers import BertModel

    from grpo.rewards._frozen_models import load_frozen, load_tokenizer
    from grpo.runtime.machine import prepare_machine

    assert inputs.model is not None
    prepare_machine(inputs.machine)
    source = find_source(inputs.model, inputs.data, parameter=f"{inputs.where}.model")
    model = load_frozen(source, BertModel)
    return compare_by_model(model.to(inputs.machine.device), load_tokenizer(source))


def compare_by_model(model: Any, tokenizer: Any) -> Reader:
    """Returns a judge whose raw score is the cosine of the source's and the answer's embedding.

    An embedding is the pooler's output. A copy of the source has a cosine of 1: combine it with a
    judge of the language. [Feng et al., 2022]

    Args:
      model: A BertModel with its pooler, in evaluation mode.
    """

    def read(texts: Sequence[str], tasks: Sequence[Task]) -> list[View]:
        import torch

        sources = [task.source for task in tasks]
        row_of = {text: row for row, text in enumerate(dict.fromkeys([*sources, *texts]))}
        inputs = tokenizer(
            [*row_of],
            padding=True,
            truncation=True,
            max_length=model.config.max_position_embeddings,
            return_tensors="pt",
        ).to(model.device)
        with torch.no_grad():
            embedded = torch.nn.functional.normalize(model(**inputs).pooler_output.double(), dim=1)
        cosines = [
            float(embedded[row_of[source]] @ embedded[row_of[text]])
            for source, text in zip(sources, texts, strict=True)
        ]
        return [View(f"{each:.3f}", each) for each in cosines]

    return read


JUDGE = Judge(reads="text", load=load, needs_model=True, reads_together=True)
