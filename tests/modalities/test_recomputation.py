"""Activations computed again in the backward pass: the same losses and gradients, less memory."""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel, SiglipVisionConfig, SiglipVisionModel

from grpo.errors import ParameterError
from grpo.modalities.action_chunks.model import ActionChunkModel, ChunkShape
from grpo.modalities.denoising.policy import DenoisingPolicy
from grpo.modalities.policy import Policy
from grpo.modalities.shared.recomputation import recompute_blocks, saved_bytes
from grpo.modalities.tokens.modality import RoutingMode
from grpo.modalities.tokens.policy import TokenPolicy
from grpo.modalities.tokens.routing import recorded
from tests.modalities.lora_cases import lora_cases
from tests.modalities.tiny import seeded, tiny_moe, tiny_policy
from tests.modalities.tiny_actor import SCENES, tiny_actor
from tests.modalities.tiny_denoiser import tiny_decoding
from tests.modalities.tiny_pipelines import CLIP, IMAGE, tiny_sd3, tiny_wan

Scored = tuple[Tensor, dict[str, Tensor], int]
TEXTS = ["G12,18=", "S1+2=", "a longer prompt="]
LORA = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "to_q", "attn2.to_k"])


def scored(policy: Policy[Any], trajectory: Any) -> Scored:
    """Returns log-probs, gradients of a sum with unequal weights, and bytes that were saved."""
    policy.model.zero_grad()
    policy.step_log_probs(trajectory)  # measures FLOPs once: its passes are not counted
    with saved_bytes(policy.model) as saved:
        logp = policy.log_prob(trajectory)
        loss = (logp * torch.linspace(0.5, 1.5, logp.numel()).view(logp.shape)).sum()
    loss.backward()
    gradients = {
        name: each.grad.clone()
        for name, each in policy.model.named_parameters()
        if each.grad is not None
    }
    return logp.detach(), gradients, saved.total


def require_same(ours: Scored, plain: Scored) -> None:
    torch.testing.assert_close(ours[0], plain[0], rtol=1e-6, atol=1e-6)
    assert ours[1].keys() == plain[1].keys()
    assert len(plain[1]) > 0
    largest = max(float(each.abs().max()) for each in plain[1].values())
    for name, gradient in plain[1].items():
        torch.testing.assert_close(
            ours[1][name], gradient, rtol=1e-6, atol=1e-6 * largest, msg=name
        )


def denoiser(make: Callable[[], Any], canvas: Any) -> DenoisingPolicy:
    pipeline = make()
    return DenoisingPolicy(
        pipeline, decoding=tiny_decoding(guidance=3.0), canvas=canvas, num_tokens=16
    )


def seeing_model() -> ActionChunkModel:
    """Returns a backbone beside a vision encoder, both of several blocks."""
    torch.manual_seed(0)
    shared = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4}
    backbone = LlamaModel(LlamaConfig(vocab_size=9, num_hidden_layers=4, **shared))
    vision = SiglipVisionModel(
        SiglipVisionConfig(image_size=8, patch_size=4, num_hidden_layers=3, **shared)
    )
    shape = ChunkShape(observations=1, pixels=8, length=2, actions=2, bins=5, positions=2)
    return ActionChunkModel(backbone, shape, vision).eval()


@pytest.fixture
def make() -> Iterator[Callable[[str], tuple[Policy[Any], list[str]]]]:
    """Returns a policy of a kind, and prompts that it takes."""
    with ExitStack() as stack:

        def make_policy(kind: str) -> tuple[Policy[Any], list[str]]:
            if kind == "tokens":
                policy = tiny_policy(max_steps=12)
                return policy, TEXTS
            if kind == "experts":
                return tiny_moe(num_hidden_layers=4), TEXTS
            if kind == "action_chunks":
                return stack.enter_context(tiny_actor()), SCENES
            makers = {"images": (tiny_sd3, IMAGE), "clips": (tiny_wan, CLIP)}
            return denoiser(*makers[kind]), ["2A", "7"]

        yield make_policy


@pytest.mark.parametrize(
    ("kind", "lora"),
    lora_cases(
        {
            "tokens": "lora",
            "experts": "full",
            "images": "lora",
            "action_chunks": "full",
            "clips": None,
        }
    ),
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_losses_and_gradients_are_the_same_and_less_is_saved(
    make: Callable[[str], tuple[Policy[Any], list[str]]], kind: str, lora: bool
):
    policy, prompts = make(kind)
    model: Any = policy.model
    if lora:
        (model.backbone if kind == "action_chunks" else model).add_adapter(LORA)
        for name, each in model.named_parameters():
            if "lora_B" in name:  # zero when they are fresh: their partners had no gradient
                nn.init.normal_(each, std=0.1)
        model.eval()
    sizes = [3] * len(prompts)
    trajectory, _ = policy.sample(prompts, group_sizes=sizes, generator=seeded())
    plain = scored(policy, trajectory)
    if isinstance(policy, DenoisingPolicy):
        del policy._training_flops
    recompute_blocks(model)
    ours = scored(policy, trajectory)
    require_same(ours, plain)
    require_same(scored(policy, trajectory), plain)  # nothing is left over from the first
    assert ours[2] < 0.75 * plain[2], (ours[2], plain[2])
    again, _ = policy.sample(prompts, group_sizes=sizes, generator=seeded())
    with torch.no_grad():
        torch.testing.assert_close(policy.log_prob(again), plain[0], rtol=1e-6, atol=1e-6)


def test_a_vision_encoders_blocks_are_computed_again_too():
    model = seeing_model()
    inputs = (
        torch.zeros(3, 2, dtype=torch.long),
        torch.ones(3, 2, dtype=torch.bool),
        torch.randn(3, 1, generator=seeded()),
        torch.randint(0, 256, (3, 3, 8, 8), dtype=torch.uint8, generator=seeded()),
    )
    found = []
    for _ in range(2):
        model.zero_grad()
        with saved_bytes(model) as saved:
            output = model(*inputs).square().sum()
        output.backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        found.append((output.detach(), gradients, saved.total))
        recompute_blocks(model)
    require_same(found[1], found[0])
    assert any(name.startswith("eyes") for name in found[0][1])
    assert found[1][2] < 0.6 * found[0][2]


@pytest.mark.parametrize("mode", ["replay_sampled", "replay_proximal"])
def test_replayed_experts_are_replayed_again_and_recorded_once(mode: RoutingMode):
    """Routers tie but for their last bits: only a replay finds what was chosen."""
    policy = tiny_moe(routing=mode, num_hidden_layers=3)
    trajectory, _ = policy.sample(TEXTS, group_sizes=[3, 2, 4], generator=seeded())
    trajectory = policy.replayed(trajectory)
    with torch.no_grad():
        policy.log_prob(trajectory)  # the first scoring fills open routing
    assert trajectory.routing is not None
    stored = copy.deepcopy(trajectory.routing)
    for parameter in policy.model.parameters():  # now live routing differs
        parameter.data *= 1 + 0.2 * torch.randn(parameter.shape, generator=seeded(7))
    live = tiny_moe(num_hidden_layers=3)
    live.model.load_state_dict(policy.model.state_dict())
    assert not torch.allclose(
        live.log_prob(trajectory).detach(), policy.log_prob(trajectory).detach()
    )
    plain = scored(policy, trajectory)
    recompute_blocks(policy.model)
    with recorded(policy.model) as passes:
        ours = scored(policy, trajectory)
    require_same(ours, plain)
    assert len(passes) == 2  # the passes of `scored`, not those computed again
    assert torch.equal(trajectory.routing.prompt, stored.prompt)
    assert torch.equal(trajectory.routing.steps, stored.steps)


def test_flops_count_what_is_computed_again():
    plain, ours = tiny_policy(), tiny_policy()
    recompute_blocks(ours.model)
    assert ours.flops.forward == plain.flops.forward
    extra = ours.flops.training.body - plain.flops.training.body
    assert 0 < extra <= plain.flops.forward.body


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ParameterError, match=r"policy\.recompute needs .*, Linear has none"):
        recompute_blocks(nn.Linear(2, 2))


def test_a_copy_computes_its_own_blocks():
    policy = tiny_policy()
    recompute_blocks(policy.model)
    other = copy.deepcopy(policy.model)
    for parameter in other.parameters():
        parameter.data *= 2
    tokens = torch.arange(1, 5)[None]
    assert not torch.allclose(other(tokens).logits, policy.model(tokens).logits)
    assert isinstance(policy, TokenPolicy)
