"""Tiny models with a byte tokenizer: the classes that recipes load with real weights."""

import copy

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from grpo.modalities.policy import Trajectory, make_rollouts
from grpo.modalities.shared.tokenizers import make_byte_tokenizer
from grpo.modalities.tokens.modality import RoutingMode
from grpo.modalities.tokens.policy import Decoding, TokenPolicy
from grpo.training.frozen import FrozenLogProbs
from grpo.types import Rollouts


def tiny_policy(
    *, temperature: float = 1.0, max_steps: int = 6, seed: int = 0, **config: int | bool
) -> TokenPolicy:
    """Returns a policy of 2 layers with grouped key-value heads and sharp random weights."""
    tokenizer = make_byte_tokenizer()
    torch.manual_seed(seed)
    shape = {"num_hidden_layers": 2, "max_position_embeddings": 64, **config}
    settings = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **shape,
    )
    return TokenPolicy(
        LlamaForCausalLM(settings).eval(),
        tokenizer,
        decoding=Decoding(temperature=temperature, max_steps=max_steps),
        uses_chat_template=False,
    )


def in_bfloat16(policy: TokenPolicy) -> TokenPolicy:
    """Returns a policy's copy in bfloat16, after its weights are rounded to what that can hold."""
    for weight in policy.model.parameters():
        weight.data = weight.data.bfloat16().float()
    return TokenPolicy(
        copy.deepcopy(policy.model).bfloat16(),
        policy.tokenizer,
        decoding=policy.decoding,
        uses_chat_template=False,
    )


def tiny_moe(
    *,
    temperature: float = 1.0,
    max_steps: int = 6,
    seed: int = 0,
    routing: RoutingMode = "live",
    dtype: torch.dtype = torch.float32,
    **config: int | float | bool,
) -> TokenPolicy:
    """Returns a mixture of 4 experts per layer, of which each token takes 2."""
    tokenizer = make_byte_tokenizer()
    torch.manual_seed(seed)
    shape = {"num_experts": 4, "num_hidden_layers": 2, **config}
    settings = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        head_dim=4,
        moe_intermediate_size=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **shape,
    )
    return TokenPolicy(
        Qwen3MoeForCausalLM(settings).to(dtype).eval(),
        tokenizer,
        decoding=Decoding(temperature=temperature, max_steps=max_steps, routing=routing),
        uses_chat_template=False,
    )


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sampled_scores(rollouts: Rollouts, shift: float = 0.0) -> FrozenLogProbs:
    """Returns what the steps scored when they were sampled, moved by `shift` nats."""
    return FrozenLogProbs(logp=rollouts.behavior_logp + shift, computed=rollouts.mask)


def rewarded(trajectory: Trajectory, logp: torch.Tensor, reward: torch.Tensor) -> Rollouts:
    """Returns what an objective may know of rollouts whose outcomes are their rewards."""
    return make_rollouts(trajectory, logp, group=trajectory.group, reward=reward, outcome=reward)
