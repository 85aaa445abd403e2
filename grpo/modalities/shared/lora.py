"""Low-rank adapters on a model of transformers or diffusers, by peft.

An extra: pip install -e '.[lora]'.
"""

from difflib import get_close_matches
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from grpo.errors import MissingExtraError, ParameterError
from grpo.modalities.shared.parameters import Lora


def add_lora(model: Any, lora: Lora, *, seed: int, adapted: Any | None = None) -> None:
    """Adds fresh adapters to a model.

    Adapters and what is not `adapted` are all that trains.

    Args:
      adapted: The part of the model that gets adapters; None: the model.

    Raises:
      MissingExtraError: If peft is not installed.
      ParameterError: If a target is no layer of the model.
    """
    try:
        # Imported here: peft takes four seconds, and most runs train all weights.
        from peft import LoraConfig
    except ImportError:
        raise MissingExtraError(
            "params.yaml: policy.lora needs peft; run pip install -e '.[lora]'"
        ) from None
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
    )
    part = model if adapted is None else adapted
    _require_targets(part, lora.target_modules)
    torch.manual_seed(seed)
    part.add_adapter(config)
    model.eval()


def _require_targets(model: Any, targets: list[str]) -> None:
    """Raises ParameterError for a target that no linear map is called: peft passes over some."""
    adaptable = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, Conv1D)
    names = [name for name, each in model.named_modules() if isinstance(each, adaptable)]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            endings = sorted({name.rpartition(".")[2] for name in names})
            near = get_close_matches(target.rpartition(".")[2], endings, n=1, cutoff=0.0)
            raise ParameterError(
                f"params.yaml: policy.lora.target_modules: no layer that can be adapted is called "
                f"{target!r}; the nearest name is {near[0] if near else 'none'}"
            )
