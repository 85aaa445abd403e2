"""Behavior cloning: what is learned, and the same weights twice."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from grpo.errors import ParameterError
from grpo.modalities.action_chunks.bases import CloningSettings, clone_demonstrations
from grpo.modalities.action_chunks.model import ActionChunkModel, encode_instructions
from grpo.modalities.action_chunks.simulation.base import Demonstration
from grpo.modalities.shared.tokenizers import make_word_tokenizer
from grpo.modalities.shared.warmup import WarmupSettings
from tests.modalities.tiny_actor import tiny_model

SETTINGS = WarmupSettings(updates=40, rows_per_update=16, learning_rate=0.02, seed=0)
TOKENIZER = make_word_tokenizer(["go left", "go right"])


def demonstrations() -> list[Demonstration]:
    """Returns two ways through the same states: all the way left, all the way right."""
    seen = np.linspace(-1, 1, 12)[:, None]
    return [
        Demonstration(
            instruction=instruction,
            observation=seen,
            action=np.full((12, 2), value),
            picture=np.zeros((12, 3, 0, 0), np.uint8),
            is_solved=True,
        )
        for instruction, value in (("go left", -1.0), ("go right", 1.0))
    ]


def cloned() -> tuple[ActionChunkModel, list[float]]:
    model = tiny_model()
    updates = clone_demonstrations(
        model,
        lambda instructions: encode_instructions(TOKENIZER, instructions),
        demonstrations(),
        SETTINGS,
        CloningSettings(bin_spread=0.0, observation_noise=0.01),
    )
    return model, [each.loss for each in updates]


@pytest.mark.parametrize("change", [{"is_solved": False}, {"action": np.zeros((1, 2))}])
def test_what_cannot_be_cloned_is_left_out_or_refused(change: dict[str, object]):
    """Scenes that the expert did not solve, and those shorter than a chunk."""
    useless = [replace(each, **change) for each in demonstrations()]
    model, short = tiny_model(), replace(SETTINGS, updates=1)

    def train(shown: list[Demonstration]) -> float:
        encode = partial(encode_instructions, TOKENIZER)
        how = CloningSettings(bin_spread=0.0, observation_noise=0.0)
        return next(clone_demonstrations(model, encode, shown, short, how)).loss

    assert train([*useless, *demonstrations()]) > 0
    with pytest.raises(ParameterError, match="has none in 2; lower"):
        train(useless)


def test_a_clone_does_what_it_is_told_and_is_the_same_twice():
    model, losses = cloned()
    assert losses[-1] < 0.1 * losses[0]
    words, mask = encode_instructions(TOKENIZER, ["go left", "go right"])
    with torch.no_grad():
        chosen = model(words, mask, torch.zeros(2, 1)).argmax(dim=-1)
    # Bins 0 and 4 are -1 and 1.
    assert chosen.tolist() == [[0] * 4, [4] * 4]
    again, _ = cloned()
    for name, each in model.state_dict().items():
        assert torch.equal(each, again.state_dict()[name]), name
    # The scale of observations is that of the states where a chunk of two actions can begin.
    assert float(model.get_buffer("mean")) == pytest.approx(-1 / 11)
