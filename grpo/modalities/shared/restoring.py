"""The model of a round, from the base's model and the parameters."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from grpo.modalities.modality import PolicyParams, RunParams
from grpo.modalities.shared.directories import read_round
from grpo.runtime.dry_run import DryRun
from grpo.runtime.seeds import derive_seed


def restore_round(
    params: RunParams[Any],
    model: nn.Module,
    *,
    base: Path,
    directory: Path,
    adapted: nn.Module | None = None,
) -> None:
    """Makes the model that a round trains of the base's: adapters, weights, recomputation.

    Args:
      base: The base policy's directory. Another `directory` holds the trained weights.
      adapted: The submodule that gets adapters; None: the model.

    Raises:
      ArtifactError: If the file of weights is missing, broken or belongs to another model.
      MissingExtraError: If there are adapters and peft is not installed.
      ParameterError: If adapters or recomputation do not fit the model.
    """
    _adapt(params, model, adapted)
    read_round(directory, base, model)
    _recompute(params, model)


def place_round(
    params: RunParams[Any], model: nn.Module, run: DryRun, *, adapted: nn.Module | None = None
) -> None:
    """Makes the model that a round trains of one on the meta device, for a dry run.

    Args:
      adapted: As in `restore_round`.

    Raises:
      MissingExtraError: If there are adapters and peft is not installed.
      ParameterError: If adapters or recomputation do not fit the model.
    """
    with torch.device("meta"):
        _adapt(params, model, adapted)
    run.place(model)
    _recompute(params, model)


def _adapt(params: RunParams[Any], model: nn.Module, adapted: nn.Module | None) -> None:
    settings: PolicyParams = params.policy
    if settings.lora:
        # Imported here, as below: few runs train adapters.
        from grpo.modalities.shared.models import add_lora

        add_lora(model, settings.lora, seed=derive_seed(params.seed, "lora"), adapted=adapted)


def _recompute(params: RunParams[Any], model: nn.Module) -> None:
    settings: PolicyParams = params.policy
    if settings.recompute:
        from grpo.modalities.shared.recomputation import recompute_blocks

        recompute_blocks(model)
