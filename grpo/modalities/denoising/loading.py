"""Denoising policies from their directories."""

from pathlib import Path

from grpo.errors import ArtifactError, ParameterError
from grpo.modalities.denoising.modality import DenoisingPolicyParams
from grpo.modalities.denoising.pipelines import (
    find_misfit,
    find_unread_component,
    find_unread_setting,
    load_pipeline,
    read_index,
)
from grpo.modalities.denoising.policy import DenoisingPolicy
from grpo.modalities.denoising.sde_steps import Denoising
from grpo.modalities.modality import RunParams
from grpo.modalities.shared.directories import read_round
from grpo.modalities.shared.models import add_lora
from grpo.modalities.shared.recomputation import recompute_blocks
from grpo.runtime.machine import DTYPES
from grpo.runtime.seeds import derive_seed
from grpo.schema import PARAMS


def load_denoising_policy(
    params: RunParams[DenoisingPolicyParams], *, base: Path, directory: Path, decoding: Denoising
) -> DenoisingPolicy:
    """Returns the policy of a directory, on the machine's device, without dropout.

    Args:
      base: The base policy's directory; `directory`, if it is another, holds what changed.

    Raises:
      ArtifactError: If a file is missing or broken, or asks for what is not done here.
      ParameterError: If the pipeline cannot draw the canvas.
    """
    settings = params.policy
    pipeline = load_pipeline(base, DTYPES[params.machine.dtype])
    unread = find_unread_component(read_index(base)) or find_unread_setting(pipeline)
    if unread:
        raise ArtifactError(f"{base}: {unread}")
    if misfit := find_misfit(pipeline, settings.canvas):
        raise ParameterError(f"{PARAMS}: policy.canvas.{misfit}")
    if settings.lora:
        add_lora(pipeline.transformer, settings.lora, seed=derive_seed(params.seed, "lora"))
    read_round(directory, base, pipeline.transformer)
    if settings.recompute:
        recompute_blocks(pipeline.transformer)
    pipeline.to(params.machine.device)
    return DenoisingPolicy(
        pipeline,
        decoding=decoding,
        canvas=settings.canvas,
        num_tokens=settings.caption_tokens,
    )
