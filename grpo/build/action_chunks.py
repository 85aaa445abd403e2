"""Chunked action policies from parameters: fresh and imported backbones, trained directories."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

from grpo.build.machine import DTYPES
from grpo.build.sources import find_source, refusal
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
from grpo.policies.lora import add_lora
from grpo.policies.phases import LABELLERS
from grpo.policies.storage import ADAPTER, LOADING_ERRORS, read_trainable
from grpo.policy_params import ActionChunkPolicyParams, ScratchBackbone
from grpo.seeds import derive_seed
from grpo.simulation.pool import EnvironmentPool
from grpo.warmup import WarmupSettings, WarmupUpdate

SIMULATOR = "grpo.simulation.metaworld:MetaWorld"


def make_action_model(params: Parameters, data: Path) -> tuple[ActionChunkModel, Any]:
    """Returns the base model, before any warm-up, and its tokenizer.

    Raises:
      ParameterError: If the source does not exist or the class refuses its configuration.
    """
    # Imported here: the simulator takes seconds, and updates need only its dimensions.
    from grpo.simulation.metaworld import ACTIONS, OBSERVATIONS, instruction_of

    base = params.action_chunks.base
    torch.manual_seed(derive_seed(params.seed, "base"))
    if isinstance(base.backbone, ScratchBackbone):
        told = [instruction_of(each) for each in sorted(base.warmup.demonstrations)]
        tokenizer = make_word_tokenizer(told)
        backbone = _from_scratch(base.backbone, tokenizer)
    else:
        backbone, tokenizer = _from_pretrained(base.backbone, data)
    chunk = base.chunk
    shape = ChunkShape(
        observations=OBSERVATIONS,
        length=chunk.length,
        actions=ACTIONS,
        bins=chunk.bins,
        positions=chunk.positions,
    )
    dtype = DTYPES[params.machine.dtype]
    model = ActionChunkModel(backbone, shape).to(params.machine.device, dtype)
    return model.eval(), tokenizer


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
        demonstrate(scene, noise=warmup.noise, seed=int(solution))
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
    params: Parameters, *, base: Path, directory: Path, decoding: ChunkDecoding
) -> ActionChunkPolicy:
    """Returns the policy of a directory, on the machine's device, without dropout.

    Args:
      base: The base policy's directory; with LoRA, `directory` holds only the adapter.

    Raises:
      ArtifactError: If a file is missing or broken.
    """
    settings = params.action_chunks
    dtype = DTYPES[params.machine.dtype]
    model = load_action_model(base if settings.lora else directory, dtype)
    if settings.lora:
        seed = derive_seed(params.seed, "lora")
        model.backbone = add_lora(model.backbone, settings.lora, seed=seed)
        if (directory / ADAPTER).exists():
            read_trainable(directory, model, optimizer=None)
    nn.Module.to(model, params.machine.device)
    return ActionChunkPolicy(
        model,
        AutoTokenizer.from_pretrained(base, local_files_only=True),
        decoding=decoding,
        scenes=EnvironmentPool(
            SIMULATOR,
            processes=min(_available_cores(), settings.scenes.at_once),
            timeout_seconds=settings.scenes.timeout_seconds,
        ),
        slots=settings.scenes.at_once,
        label=LABELLERS[settings.phases],
    )


def _available_cores() -> int:
    """Returns how many cores this process may use; macOS tells only how many there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _from_scratch(backbone: ScratchBackbone, tokenizer: Any) -> PreTrainedModel:
    """Returns a fresh model of a transformers class."""
    model_class: Any = getattr(transformers, backbone.architecture, None)
    if not backbone.architecture.endswith("Model") or model_class is None:
        raise ParameterError(
            f"{PARAMS}: policy.base.backbone.architecture must be a class of transformers without "
            f"a head, such as LlamaModel, got {backbone.architecture!r}"
        )
    try:
        config = model_class.config_class(
            **backbone.config, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id
        )
        model: PreTrainedModel = model_class(config)
    except (TypeError, ValueError, RuntimeError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        path = "policy.base.backbone.config"
        raise ParameterError(f"{PARAMS}: {path} is refused: {reason}") from None
    return model


def _from_pretrained(backbone: Any, data: Path) -> tuple[PreTrainedModel, Any]:
    """Returns a model from a directory under data/, or from the hub."""
    source = find_source(backbone, data, parameter="policy.base.backbone")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source.name, revision=source.revision, local_files_only=source.is_local
        )
        model = AutoModel.from_pretrained(
            source.name,
            revision=source.revision,
            use_safetensors=True,
            local_files_only=source.is_local,
        )
    except (OSError, ValueError, KeyError, RuntimeError, *LOADING_ERRORS) as error:
        raise refusal(source, error) from None
    if tokenizer.pad_token is None:  # what pads is never seen
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer
