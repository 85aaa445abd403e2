"""Denoising policies from their directories."""

from pathlib import Path

from grpo.build.machine import DTYPES
from grpo.params.parameters import Parameters
from grpo.policies.denoising import DenoisingPolicy
from grpo.policies.kernels import Denoising
from grpo.policies.lora import load_lora
from grpo.policies.pipelines import load_pipeline
from grpo.seeds import derive_seed


def load_denoising_policy(
    params: Parameters, *, base: Path, directory: Path, decoding: Denoising
) -> DenoisingPolicy:
    """Returns the policy of a directory, on the machine's device, without dropout.

    Args:
      base: The base policy's directory; with LoRA, `directory` holds only the adapter.

    Raises:
      ArtifactError: If a file is missing or broken.
    """
    settings = params.denoising
    pipeline = load_pipeline(base if settings.lora else directory, DTYPES[params.machine.dtype])
    if settings.lora:
        seed = derive_seed(params.seed, "lora")
        pipeline.transformer = load_lora(pipeline.transformer, settings.lora, directory, seed=seed)
    pipeline.to(params.machine.device)
    return DenoisingPolicy(
        pipeline,
        decoding=decoding,
        canvas=settings.canvas,
        num_tokens=settings.caption_tokens,
    )
