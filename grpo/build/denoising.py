"""Denoising policies from parameters: fresh and imported pipelines, and trained directories."""

from pathlib import Path
from typing import Any

import torch

from grpo.build.fresh_flows import make_fresh_pipeline
from grpo.build.machine import DTYPES
from grpo.build.sources import find_source, refusal
from grpo.errors import MissingExtraError
from grpo.params import Parameters
from grpo.policies.denoising import DenoisingPolicy
from grpo.policies.kernels import Denoising
from grpo.policies.lora import load_lora
from grpo.policies.pipelines import load_pipeline
from grpo.policy_params import DirectoryBase, HubBase, S3Base, ScratchFlowBase
from grpo.seeds import derive_seed

try:
    import diffusers
except ImportError:
    raise MissingExtraError(
        "params.yaml: policy.kind denoising needs diffusers; run pip install -e '.[denoising]'"
    ) from None

library: Any = diffusers  # it is not typed


def make_pipeline(params: Parameters, data: Path) -> Any:
    """Returns the base pipeline, before any warm-up.

    Raises:
      ParameterError: If the source does not exist or a class refuses its configuration.
    """
    quiet()
    base = params.denoising.base
    dtype = DTYPES[params.machine.dtype]
    if isinstance(base, ScratchFlowBase):
        return make_fresh_pipeline(base, dtype, seed=derive_seed(params.seed, "base"))
    return _from_pretrained(base, dtype, data)


def load_denoising_policy(
    params: Parameters, *, base: Path, directory: Path, decoding: Denoising
) -> DenoisingPolicy:
    """Returns the policy of a directory, on the machine's device, without dropout.

    Args:
      base: The base policy's directory; with LoRA, `directory` holds only the adapter.

    Raises:
      ArtifactError: If a file is missing or broken.
    """
    quiet()
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


def quiet() -> None:
    """Turns diffusers' own bars and remarks off."""
    library.utils.logging.disable_progress_bar()
    library.utils.logging.set_verbosity_error()


def _from_pretrained(base: DirectoryBase | HubBase | S3Base, dtype: torch.dtype, data: Path) -> Any:
    """Returns a pipeline from a directory under data/, from the hub, or from S3."""
    source = find_source(base, data, parameter="policy.base")
    from_pretrained: Any = library.DiffusionPipeline.from_pretrained
    try:
        return from_pretrained(
            source.name,
            revision=source.revision,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=source.is_local,
        )
    except (OSError, ValueError, KeyError, RuntimeError, TypeError) as error:
        raise refusal(source, error) from None
