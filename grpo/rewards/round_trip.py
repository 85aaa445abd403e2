"""A judge without references: chrF++ of the source and the answer's translation back.

Needs sacrebleu, an extra (pip install -e '.[translation]').
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from grpo.errors import ParameterError, brief
from grpo.rewards import chrf
from grpo.rewards.base import AnswerJudge, Judge, JudgeInputs, Reader, Task, View
from grpo.runtime.language_tokens import find_language_token
from grpo.runtime.sources import find_source
from grpo.schema import LANGUAGE_TAG, PARAMS

LONGEST = 2  # tokens of a back-translation per token of the source; it is cut off there


def load(inputs: JudgeInputs) -> Reader:
    """Returns the judge with its model on the machine's device.

    Raises:
      MissingExtraError: If sacrebleu is not installed.
      ParameterError: If the model cannot be loaded, or the device is missing.
    """
    # Imported here: these import torch, which `grpo check` does not need.
    from transformers import AutoModelForSeq2SeqLM

    from grpo.rewards._frozen_models import load_frozen, load_tokenizer
    from grpo.runtime.machine import prepare_machine

    assert inputs.model is not None
    score = chrf.load(inputs)
    prepare_machine(inputs.machine)
    source = find_source(inputs.model, inputs.data, parameter=f"{inputs.where}.model")
    model = load_frozen(source, AutoModelForSeq2SeqLM)
    return compare_round_trips(model.to(inputs.machine.device), load_tokenizer(source), score)


def compare_round_trips(model: Any, tokenizer: Any, score: AnswerJudge) -> Reader:
    """Returns a judge whose raw score is chrF++ of the source and the answer's translation back.

    Decoding is greedy. If the tokenizer has tokens of languages (NLLB, M2M100), the answer is in
    the language of the prompt's tag, and the decoder is forced to begin with the token of the
    tokenizer's `src_lang`, which must be the language of the sources. An empty answer scores 0.

    It cannot tell a translation from another text that the model maps to the source. A copy of the
    source is such a text if the model leaves it as it is: combine it with the judge `copying` or
    `language`.

    Args:
      model: An encoder-decoder model in evaluation mode.
      score: The judge `chrf`.
    """
    language = getattr(tokenizer, "src_lang", None)
    forced = {}
    if language is not None:
        forced["forced_bos_token_id"] = find_language_token(tokenizer, language)

    def read(texts: Sequence[str], tasks: Sequence[Task]) -> list[View]:
        # Rollouts of a group repeat texts.
        asked = {(text, task.prompt): task for text, task in zip(texts, tasks) if text.strip()}
        rows = [
            _encode(tokenizer, text, task, model.config, has_languages=language is not None)
            for (text, _), task in asked.items()
        ]
        positions = getattr(model.config, "max_position_embeddings", None)  # T5 has none
        limits = [
            min(LONGEST * len(tokenizer(task.source)["input_ids"]), (positions or sys.maxsize) - 1)
            for task in asked.values()
        ]
        translated = dict(zip(asked, _translate(model, tokenizer, rows, limits, forced)))
        back = [translated.get((text, task.prompt), "") for text, task in zip(texts, tasks)]
        return [
            View(text, score(text, replace(task, answer=task.source)))
            for text, task in zip(back, tasks)
        ]

    return read


def _encode(
    tokenizer: Any, text: str, task: Task, config: Any, *, has_languages: bool
) -> list[int]:
    """Returns the tokens of an answer.

    Raises:
      ParameterError: If the tokenizer has tokens of languages, but not that of the prompt's tag.
    """
    if has_languages:
        tag = LANGUAGE_TAG.match(task.prompt)
        if tag is None or find_language_token(tokenizer, tag[1]) is None:
            raise ParameterError(
                f"{PARAMS}: the judge round_trip needs prompts that begin with a token of a "
                f"language of its model, as >>fin_Latn<< of NLLB, got {brief(repr(task.prompt))}"
            )
        tokenizer.src_lang = tag[1].strip("_")  # fi, if the tag is __fi__ of M2M100
    limit = getattr(config, "max_position_embeddings", None)  # T5 has none
    tokens: list[int] = tokenizer(text, truncation=True, max_length=limit)["input_ids"]
    return tokens


def _translate(
    model: Any, tokenizer: Any, rows: list[list[int]], limits: list[int], forced: dict[str, Any]
) -> list[str]:
    """Returns the model's greedy translations, each cut off at its own limit of tokens."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    if not rows:
        return []
    tokens = [torch.tensor(row, device=model.device) for row in rows]
    found = model.generate(
        input_ids=pad_sequence(tokens, batch_first=True, padding_value=tokenizer.pad_token_id),
        attention_mask=pad_sequence([torch.ones_like(each) for each in tokens], batch_first=True),
        do_sample=False,
        num_beams=1,
        max_length=None,
        # One more than is kept, because models may force the end token at the last position.
        max_new_tokens=max(limits) + 1,
        **forced,
    )
    kept = [row[1 : 1 + limit].tolist() for row, limit in zip(found, limits)]
    texts: list[str] = tokenizer.batch_decode(kept, skip_special_tokens=True)
    return texts


JUDGE = Judge(reads="text", load=load, needs_model=True, reads_together=True)
