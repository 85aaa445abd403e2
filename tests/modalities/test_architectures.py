"""Causal LMs whose caches or attention differ from Llama's: they run, or are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from grpo.errors import ArtifactError
from grpo.modalities.shared.tokenizers import make_byte_tokenizer
from grpo.modalities.tokens.bases import require_sampling
from grpo.modalities.tokens.policy import Decoding, TokenPolicy
from grpo.params.parameters import read_params
from grpo.params.yaml import dump_yaml, parse_yaml
from grpo.wiring.policies import build_base
from tests.modalities.test_forward import plain_log_prob
from tests.modalities.tiny import seeded

ROOT = Path(__file__).parents[2]
PROMPTS = ["G12,18=", "S1+2=", "a longer prompt="]
SIZES = [3, 2, 4]
TOKENIZER = make_byte_tokenizer()
MARKS = {
    "vocab_size": len(TOKENIZER),
    "pad_token_id": TOKENIZER.pad_token_id,
    "bos_token_id": TOKENIZER.bos_token_id,
    "eos_token_id": TOKENIZER.eos_token_id,
}
WIDTHS = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ATTENTION = ["full_attention"]
COMMON = ("FalconH1", "GPT2", "Lfm2", "Mamba2")  # in every run of the tests
RUNNING: dict[str, dict[str, Any]] = {
    "Bamba": {**WIDTHS, **MAMBA, "attn_layer_indices": [1, 3]},
    "Bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "Falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True},
    "FalconH1": {**WIDTHS, **MAMBA, "mamba_d_ssm": 64},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "GraniteMoeHybrid": {
        **WIDTHS,
        **MAMBA,
        "layer_types": ["mamba", "attention"] * 2,
        "num_local_experts": 0,
        "shared_intermediate_size": 32,
    },
    "Jamba": {**WIDTHS, "num_experts": 1, "attn_layer_period": 2, "attn_layer_offset": 1},
    "Lfm2": {**WIDTHS, "layer_types": ["conv", *ATTENTION] * 2, "block_auto_adjust_ff_dim": False},
    "Mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    "Mamba2": {
        "hidden_size": 32,
        "num_heads": 8,
        "head_dim": 8,
        "num_hidden_layers": 2,
        "state_size": 8,
        "n_groups": 1,
    },
    "Mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4},
    "Qwen3Next": {
        **WIDTHS,
        **EXPERTS,
        "head_dim": 8,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "shared_expert_intermediate_size": 16,
        "layer_types": ["linear_attention"] * 3 + ATTENTION,
    },
}
REFUSED: dict[str, dict[str, Any]] = {
    "MiniMax": {**WIDTHS, "head_dim": 8, "num_local_experts": 2, "block_size": 4},
    "RecurrentGemma": {**WIDTHS, "lru_width": 32, "attention_window_size": 16},  # reads padding
    "Rwkv": {"hidden_size": 32, "num_hidden_layers": 2},
}


def model_of(name: str, settings: dict[str, Any]) -> PreTrainedModel:
    """Returns a model with sharp random weights."""
    cls: Callable[..., PreTrainedModel] = getattr(
        transformers, f"{name}ForCausalLM", None
    ) or getattr(transformers, f"{name}LMHeadModel")
    torch.manual_seed(0)
    model = cls(cls.config_class(**MARKS, **settings)).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.normal_(std=0.2)
    return model


@pytest.mark.filterwarnings("ignore")  # of transformers: kernels that are not installed
@pytest.mark.parametrize(
    "name",
    [each if each in COMMON else pytest.param(each, marks=pytest.mark.long) for each in RUNNING],
)
def test_a_rollout_has_the_log_probs_of_one_unpadded_pass(name: str):
    """While sampling, in training, and by the model's own call; prompts of unequal lengths."""
    model = model_of(name, RUNNING[name])
    require_sampling(model)
    decoding = Decoding(temperature=1.0, max_steps=12)
    policy = TokenPolicy(model, TOKENIZER, decoding=decoding, uses_chat_template=False)
    policy.end_tokens = torch.arange(0, len(TOKENIZER), 16)
    trajectory, sampled = policy.sample(PROMPTS, group_sizes=SIZES, generator=seeded())
    assert len(set(trajectory.mask.sum(dim=1).tolist())) > 1  # some end early
    with torch.no_grad():
        plain = plain_log_prob(policy, trajectory, model)
        scored = policy.log_prob(trajectory)
    torch.testing.assert_close(scored, plain, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(sampled, plain, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_sampled_is_refused_by_name(name: str):
    with pytest.raises(ArtifactError, match=f"{name}ForCausalLM cannot be sampled") as raised:
        require_sampling(model_of(name, REFUSED[name]))
    assert "\n" not in str(raised.value)


@pytest.mark.filterwarnings("ignore")
def test_the_base_stage_refuses_it_in_one_line(tmp_path: Path):
    content = parse_yaml((ROOT / "recipes" / "smoke.yaml").read_text())
    content["policy"]["base"] |= {
        "architecture": "MiniMaxForCausalLM",
        "config": REFUSED["MiniMax"],
    }
    (tmp_path / "params.yaml").write_text(dump_yaml(content))
    with pytest.raises(ArtifactError, match=r"^params\.yaml: policy\.base: MiniMaxForCausalLM"):
        build_base(read_params(tmp_path / "params.yaml"), tmp_path)
