"""Inputs of the estimates: runs, model shapes, measurements and assumptions."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from grpo.modalities.shared.flops import Coefficients
from grpo.modalities.tokens.costs import TokenPassFlops
from grpo.params.yaml import parse_yaml

INPUTS = Path(__file__).with_name("inputs.yaml")
COMPUTED_BYTES = 2  # per number: passes and sampling compute in bfloat16


@dataclass(frozen=True, kw_only=True)
class Run:
    """A recipe and its number of GPUs."""

    gpus: int
    prompts_per_iteration: int
    rollouts_per_group: int
    prompt_tokens: int  # per prompt
    mean_steps: int
    max_steps: int
    updates_per_iteration: int
    iterations_per_round: int
    iterations_per_checkpoint: int
    tokens_per_microbatch: int
    rounds: int
    eval_prompts: int
    eval_rollouts: int

    @property
    def rollouts(self) -> int:
        """Rollouts of an iteration."""
        return self.prompts_per_iteration * self.rollouts_per_group

    @property
    def microbatch(self) -> int:
        """Tokens of the largest microbatch; a row wider than the budget is a microbatch alone."""
        return max(self.tokens_per_microbatch, self.prompt_tokens + self.max_steps)


@dataclass(frozen=True, kw_only=True)
class Model:
    """Properties of a model that determine memory, time and traffic."""

    parameters: int
    block_parameters: int
    blocks: int
    hidden_size: int
    cache_bytes: int  # of the KV cache, per token
    activation_bytes: float  # saved for the backward pass, per token and block
    flops: TokenPassFlops

    @property
    def root_parameters(self) -> int:
        """Number of parameters outside the blocks: embeddings and head."""
        return self.parameters - self.blocks * self.block_parameters


@dataclass(frozen=True, kw_only=True)
class Assumed:
    """Quantities that were not measured, at one end of their range."""

    gpu_memory_gb: float
    gpu_tflops: float
    gpu_float32_tflops: float
    gpu_gb_per_second: float
    gpus_per_host: float
    nvlink_gb_per_second: float
    network_gb_per_second: float
    pass_share: float
    decode_share: float
    link_share: float
    engine_memory_share: float
    engine_workspace_gb: float
    engine_start_seconds: float
    engine_compile_seconds: float
    engine_wake_seconds: float
    free_share: float
    files_gb_per_second: float
    host_gb_per_second: float
    s3_gb_per_second: float
    usd_per_gpu_hour: float

    @property
    def flops_per_second(self) -> float:
        """FLOPs per second of a GPU in a pass."""
        return self.gpu_tflops * 1e12 * self.pass_share


def read_inputs() -> dict[str, Any]:
    """Returns the content of inputs.yaml."""
    inputs: dict[str, Any] = parse_yaml(INPUTS.read_text())
    return inputs


def make_run(spec: dict[str, Any]) -> Run:
    """Returns a run without the model it names."""
    about_model = ("model", "architecture", "config")
    return Run(**{name: value for name, value in spec.items() if name not in about_model})


def assume(inputs: dict[str, Any], end: str) -> Assumed:
    """Returns the assumptions at their `worst` or `best` end."""
    found = {name: each.get(end, each.get("value")) for name, each in inputs["assumed"].items()}
    return Assumed(**found)


def make_class(spec: dict[str, Any]) -> type[PreTrainedModel]:
    """Returns the class of a run's model."""
    found: type[PreTrainedModel] = getattr(transformers, spec["architecture"])
    return found


def make_config(spec: dict[str, Any], **changes: Any) -> PretrainedConfig:
    """Returns the config of a run's model, with changes."""
    return make_class(spec).config_class(**{**spec["config"], **changes})


def count(spec: dict[str, Any]) -> dict[str, int]:
    """Returns the shapes of a model without allocating its weights."""
    config = make_config(spec)
    with torch.device("meta"):
        model = make_class(spec)(config)
    blocks = model.get_decoder().layers
    heads, size = config.num_key_value_heads, blocks[0].self_attn.head_dim
    return {
        "parameters": sum(each.numel() for each in model.parameters()),
        "block_parameters": sum(each.numel() for each in blocks[0].parameters()),
        "blocks": len(blocks),
        "hidden_size": config.hidden_size,
        "cache_bytes": 2 * len(blocks) * heads * size * COMPUTED_BYTES,
    }


def make_model(spec: dict[str, Any], block: dict[str, Any]) -> Model:
    """Returns a whole model, extrapolated from measurements of one block.

    Args:
      block: The result of `measure.measure_block`.
    """
    config = make_config(spec)
    return Model(
        **count(spec),
        activation_bytes=block["activation_bytes"]["bfloat16"],
        flops=TokenPassFlops(
            forward=_whole(block["forward_flops"], config, block["vocabulary"]),
            training=_whole(block["training_flops"], config, block["vocabulary"]),
            shares_prompts=True,
            vocabulary=config.vocab_size,
            has_plain_head=True,
        ),
    )


def _whole(one: list[int], config: PretrainedConfig, vocabulary: int) -> Coefficients:
    """Returns the FLOPs of the whole model, given those of one block."""
    body, attention, head = one
    return Coefficients(
        body=body * config.num_hidden_layers,
        attention=attention * config.num_hidden_layers,
        head=head * config.vocab_size // vocabulary,
    )
