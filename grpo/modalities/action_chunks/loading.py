"""Chunked action policies from their directories."""

import os
from pathlib import Path

from torch import nn
from transformers import AutoTokenizer

from grpo.modalities.action_chunks.modality import ActionChunkPolicyParams, ChunkDecoding
from grpo.modalities.action_chunks.model import load_action_model
from grpo.modalities.action_chunks.phases import choose_labeller
from grpo.modalities.action_chunks.policy import ActionChunkPolicy
from grpo.modalities.action_chunks.simulation.pool import EnvironmentPool
from grpo.modalities.modality import RunParams
from grpo.modalities.shared.directories import read_round
from grpo.modalities.shared.models import add_lora
from grpo.modalities.shared.recomputation import recompute_blocks
from grpo.runtime.machine import DTYPES
from grpo.runtime.seeds import derive_seed

SIMULATOR = "grpo.modalities.action_chunks.simulation.metaworld:MetaWorld"


def load_chunk_policy(
    params: RunParams[ActionChunkPolicyParams],
    *,
    base: Path,
    directory: Path,
    decoding: ChunkDecoding,
    sharing: int = 1,
) -> ActionChunkPolicy:
    """Returns the policy of a directory, on the machine's device, without dropout.

    Args:
      base: The base policy's directory; `directory`, if it is another, holds what changed.
      sharing: Policies that share this host's processors, on which scenes are played.

    Raises:
      ArtifactError: If a file is missing or broken.
    """
    settings = params.policy
    dtype = DTYPES[params.machine.dtype]
    model = load_action_model(base, dtype)
    if settings.lora:
        seed = derive_seed(params.seed, "lora")
        add_lora(model, settings.lora, seed=seed, adapted=model.backbone)
    read_round(directory, base, model)
    if settings.recompute:
        recompute_blocks(model)
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
        label=choose_labeller(settings.phases, settings.max_steps),
    )


def _available_cores() -> int:
    """Returns how many cores this process may use; macOS tells only how many there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
