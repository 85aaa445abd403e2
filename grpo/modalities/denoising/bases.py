"""Base pipelines of denoising policies: fresh, or from a directory, the hub or S3."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from grpo.errors import refused_by_library
from grpo.modalities.denoising.fresh_flows import make_fresh_pipeline
from grpo.modalities.denoising.pipeline_support import find_unread_component, find_unread_setting
from grpo.modalities.denoising.pipelines import library, quiet
from grpo.modalities.shared.directories import find_wrong_weights
from grpo.modalities.shared.machine import DTYPES
from grpo.params.parameters import Parameters
from grpo.params.policy import DirectoryBase, HubBase, S3Base, ScratchFlowBase
from grpo.params.sources import Source, find_source, refusal
from grpo.runtime.seeds import derive_seed


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
    """Returns a pipeline from a directory under data/, from the hub, or from S3.

    Raises:
      ParameterError: If it is not there, or asks for what is not done here.
    """
    source = find_source(base, data, parameter="policy.base")
    found = {"revision": source.revision, "local_files_only": source.is_local}
    with refused_by_library(lambda why: refusal(source, why)):
        # Before gigabytes are fetched: what the class does not know it would drop in silence.
        index = library.DiffusionPipeline.load_config(source.name, **found)
        if unread := find_unread_component(index):
            raise refusal(source, unread)
        options = {"dtype": dtype, "use_safetensors": True, **found}
        models = {
            name: _read_component(source, name, each, options)
            for name, each in index.items()
            if isinstance(each, list) and _is_model(each)
        }
        pipeline = library.DiffusionPipeline.from_pretrained(
            source.name, trust_remote_code=False, **options, **models
        )
    if unread := find_unread_setting(pipeline):
        raise refusal(source, unread)
    return pipeline


def _is_model(component: list[Any]) -> bool:
    """Returns whether an entry of a model index, a library and a class, has weights."""
    found = _class_of(component)
    return isinstance(found, type) and issubclass(found, nn.Module)


def _class_of(component: list[Any]) -> Any:
    kind, name = component
    return getattr({"diffusers": library, "transformers": transformers}.get(kind), str(name), None)


def _read_component(
    source: Source, name: str, component: list[Any], options: Mapping[str, Any]
) -> nn.Module:
    """Returns a part of a pipeline with all of its weights; a library would draw missing ones.

    Raises:
      ParameterError: If its files hold other weights than its configuration describes.
    """
    model, found = _class_of(component).from_pretrained(
        source.name, subfolder=name, output_loading_info=True, **options
    )
    if wrong := find_wrong_weights(found):
        raise refusal(source, f"the weights of {name} are not those of its config.json: {wrong}")
    loaded: nn.Module = model
    return loaded
