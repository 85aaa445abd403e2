"""Base pipelines of denoising policies: fresh, or from a directory, the hub or S3."""

from pathlib import Path
from typing import Any

import torch

from grpo.build.bases.fresh_flows import make_fresh_pipeline
from grpo.build.machine import DTYPES
from grpo.build.sources import find_source, refusal
from grpo.params.parameters import Parameters
from grpo.params.policy import DirectoryBase, HubBase, S3Base, ScratchFlowBase
from grpo.policies.pipelines import library, quiet
from grpo.seeds import derive_seed


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
