"""Chunked action policies from parameters: fresh and imported backbones, trained directories."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

from grpo.build.machine import DTYPES
from grpo.build.models import make_fresh_model, read_pretrained
from grpo.build.tokenizers import make_word_tokenizer
from grpo.cloning import CloningSettings, clone_demonstrations
from grpo.errors import ParameterError
from grpo.params import PARAMS, Parameters
from grpo.policies.action_chunks import ActionChunkPolicy
from grpo.policies.action_model import (
    ActionChunkModel,
    ChunkShape,
    encode_instructions,
    load_action_model,
)
from grpo.policies.chunk_decoding import ChunkDecoding
from grpo.policies.lora import load_lora
from grpo.policies.phases import LABELLERS
from grpo.policy_params import ActionChunkPolicyParams, ChunkBase, Eyes, ScratchBackbone
from grpo.seeds import derive_seed
from grpo.simulation.pool import EnvironmentPool
from grpo.warmup import WarmupSettings, WarmupUpdate

SIMULATOR = "grpo.simulation.metaworld:MetaWorld"
BACKBONE = "policy.base.backbone"
ENCODER = "policy.base.eyes.encoder"


def make_action_model(params: Parameters, data: Path) -> tuple[ActionChunkModel, Any]:
    """Returns the base model, before any warm-up, and its tokenizer.

    Raises:
      ParameterError: If a source does not exist, a class refuses its configuration, or an encoder
        pictures of that size.
    """
    # Imported here: the simulator takes seconds, and updates need only its dimensions.
    from grpo.simulation.metaworld import ACTIONS, HAND, OBSERVATIONS

    base = params.action_chunks.base
    torch.manual_seed(derive_seed(params.seed, "base"))
    backbone, tokenizer = _make_backbone(base, data)
    eyes = _make_eyes(base.eyes, data) if base.eyes else None
    chunk = base.chunk
    shape = ChunkShape(
        observations=HAND if base.state == "hand" else OBSERVATIONS,
        pixels=base.eyes.pixels if base.eyes else 0,
        length=chunk.length,
        actions=ACTIONS,
        bins=chunk.bins,
        positions=chunk.positions,
    )
    try:
        model = ActionChunkModel(backbone, shape, eyes)
    except (ValueError, RuntimeError) as error:  # it has looked at a picture
        reason = " ".join(str(error).split())
        raise ParameterError(
            f"{PARAMS}: policy.base.eyes.pixels: the encoder refuses pictures of {shape.pixels} "
            f"pixels: {reason}"
        ) from None
    return model.to(params.machine.device, DTYPES[params.machine.dtype]).eval(), tokenizer


def clone_experts(
    policy: ActionChunkPolicyParams,
    model: ActionChunkModel,
    tokenizer: Any,
    table: pd.DataFrame,
    settings: WarmupSettings,
) -> Iterator[WarmupUpdate]:
    """Trains a fresh model on what scripted experts do in the scenes of a table of schema WARMUP.

    Scenes in which the expert fails are left out.
    """
    from grpo.simulation.experts import demonstrate

    warmup = policy.base.warmup
    shown = [
        demonstrate(scene, noise=warmup.noise, seed=int(solution), pixels=model.shape.pixels)
        for scene, solution in zip(table["prompt"], table["solution"])
    ]
    return clone_demonstrations(
        model,
        lambda told: encode_instructions(tokenizer, told),
        [each for each in shown if each.is_solved],
        settings,
        CloningSettings(bin_spread=warmup.bin_spread, observation_noise=warmup.observation_noise),
    )


def load_chunk_policy(
    params: Parameters, *, base: Path, directory: Path, decoding: ChunkDecoding, sharing: int = 1
) -> ActionChunkPolicy:
    """Returns the policy of a directory, on the machine's device, without dropout.

    Args:
      base: The base policy's directory; with LoRA, `directory` holds only the adapter.
      sharing: Policies that share this host's processors, on which scenes are played.

    Raises:
      ArtifactError: If a file is missing or broken.
    """
    settings = params.action_chunks
    dtype = DTYPES[params.machine.dtype]
    model = load_action_model(base if settings.lora else directory, dtype)
    if settings.lora:
        seed = derive_seed(params.seed, "lora")
        load_lora(model, settings.lora, directory, seed=seed, adapted=model.backbone)
    nn.Module.to(model, params.machine.device)
    return ActionChunkPolicy(
        model,
        AutoTokenizer.from_pretrained(base, local_files_only=True, trust_remote_code=False),
        decoding=decoding,
        scenes=EnvironmentPool(
            SIMULATOR,
            processes=min(max(1, _available_cores() // sharing), settings.scenes.at_once),
            timeout_seconds=settings.scenes.timeout_seconds,
            settings={"pixels": model.shape.pixels},
        ),
        slots=settings.scenes.at_once,
        label=LABELLERS[settings.phases],
    )


def _make_backbone(base: ChunkBase, data: Path) -> tuple[PreTrainedModel, Any]:
    """Returns the backbone and its tokenizer; a fresh one's knows the words of its demonstrations.

    Raises:
      ParameterError: If it does not exist, or its class refuses its configuration.
    """
    from grpo.simulation.metaworld import instruction_of  # seconds, as above

    if isinstance(base.backbone, ScratchBackbone):
        told = [instruction_of(each) for each in sorted(base.warmup.demonstrations)]
        words: Any = make_word_tokenizer(told)
        fresh = make_fresh_model(
            base.backbone.architecture,
            base.backbone.config,
            {"vocab_size": len(words), "pad_token_id": words.pad_token_id},
            ending="Model",
            what="a class of transformers without a head such as LlamaModel",
            parameter=BACKBONE,
        )
        return fresh, words
    tokenizer = read_pretrained(AutoTokenizer, base.backbone, data, parameter=BACKBONE)
    backbone = read_pretrained(
        AutoModel, base.backbone, data, parameter=BACKBONE, use_safetensors=True
    )
    if tokenizer.pad_token is None:  # what pads is never seen
        tokenizer.pad_token = tokenizer.eos_token
    return backbone, tokenizer


def _make_eyes(eyes: Eyes, data: Path) -> PreTrainedModel:
    """Returns a vision encoder.

    Raises:
      ParameterError: If it does not exist or is none.
    """
    if isinstance(eyes.encoder, ScratchBackbone):
        model: Any = make_fresh_model(
            eyes.encoder.architecture,
            eyes.encoder.config,
            {"image_size": eyes.pixels},
            ending="Model",
            what="a vision encoder of transformers such as SiglipVisionModel",
            parameter=ENCODER,
        )
    else:
        model = read_pretrained(
            AutoModel, eyes.encoder, data, parameter=ENCODER, use_safetensors=True
        )
    if model.main_input_name != "pixel_values":
        raise ParameterError(
            f"{PARAMS}: {ENCODER} must be a vision encoder, {type(model).__name__} reads "
            f"{model.main_input_name}"
        )
    return model


def _available_cores() -> int:
    """Returns how many cores this process may use; macOS tells only how many there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
