"""Sampling's shortcuts: the bits of the model's own call, and weights that lie as they lay."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GraniteConfig, MistralConfig, Qwen3Config

from grpo.modalities.shared.decoding import column_major_weights
from grpo.modalities.tokens.forward import ForwardPasses
from grpo.modalities.tokens.policy import TokenPolicy
from tests.modalities.tiny import seeded, tiny_moe, tiny_policy

PROMPTS, SIZES = ["G12,18=", "S1+2="], [4, 3]
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}


@pytest.mark.parametrize("make", [tiny_policy, tiny_moe])
def test_stepping_through_the_layers_gives_the_bits_of_the_bodys_own_call(
    make: Callable[[], TokenPolicy], monkeypatch: pytest.MonkeyPatch
):
    policy = make()
    assert policy.forward.can_run_layers
    steps, logp = policy.sample(PROMPTS, group_sizes=SIZES, generator=seeded())
    monkeypatch.setattr(policy.forward, "can_run_layers", False)
    expected, expected_logp = policy.sample(PROMPTS, group_sizes=SIZES, generator=seeded())
    assert torch.equal(steps.tokens, expected.tokens)
    assert torch.equal(logp, expected_logp)


@pytest.mark.parametrize(
    ("config", "can_run_layers"),
    [
        (Qwen3Config(**SHAPE, head_dim=4), True),
        (GraniteConfig(**SHAPE), True),
        (GraniteConfig(**SHAPE, embedding_multiplier=2.0), False),  # its body scales what it reads
        (MistralConfig(**SHAPE), False),  # its layers see a window
    ],
)
def test_a_body_that_does_more_than_call_its_layers_is_called(config: object, can_run_layers: bool):
    model = AutoModelForCausalLM.from_config(config).eval()
    assert ForwardPasses(model).can_run_layers == can_run_layers


def test_weights_lie_as_before_once_rollouts_are_drawn():
    policy = tiny_policy()
    assert policy.forward.can_run_layers  # has been probed
    before = {name: each.clone() for name, each in policy.model.named_parameters()}
    seen: list[tuple[int, ...]] = []
    layer = next(each for each in policy.model.get_decoder().modules() if type(each) is nn.Linear)
    layer.register_forward_hook(lambda module, *_: seen.append(module.weight.stride()))
    policy.sample(PROMPTS, group_sizes=SIZES, generator=seeded())
    assert set(seen) == {(1, layer.out_features)}
    for name, each in policy.model.named_parameters():
        assert torch.equal(each, before[name])
        assert each.is_contiguous()


def test_weights_lie_as_before_if_sampling_fails():
    body = tiny_policy().model.get_decoder()
    with pytest.raises(KeyboardInterrupt), column_major_weights(body):
        raise KeyboardInterrupt
    assert all(each.is_contiguous() for each in body.parameters())
