"""Writes a policy as a model directory that transformers or diffusers load."""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from grpo.errors import ParameterError
from grpo.modalities.shared.directories import STATE, TRANSFORMER_WEIGHTS, WEIGHT_FILES
from grpo.modalities.shared.models import merged_weights
from grpo.registry.sample import find_policy
from grpo.runtime.artifacts.files import named_output, require_replaceable
from grpo.runtime.artifacts.tensors import PART_BYTES
from grpo.runtime.machine import prepare_machine
from grpo.wiring.policies import draws_of_evaluation, load_policy

PIPELINE = "model_index.json"  # of diffusers


def export_policy(directory: Path, out: Path) -> None:
    """Writes configuration, tokenizer and weights of a policy; adapters are merged into weights.

    Args:
      directory: As for `grpo.registry.sample.draw_from`.

    Raises:
      ParameterError: If the parameters are wrong, or no library loads such policies.
      ArtifactError: If the directory holds no policy, a file of it is missing or wrong, or `out`
        holds anything but an earlier export.
    """
    require_replaceable(out)
    found, base, own = find_policy(directory)
    if not found.modality.has_library_format:
        raise ParameterError(
            f"{directory}: a policy of kind {found.policy.kind} cannot be exported, because no "
            "library has its model; use grpo sample, or grpo load"
        )
    params = found.model_copy(
        update={"machine": found.machine.model_copy(update={"device": "cpu", "compile": False})}
    )
    prepare_machine(params.machine)
    draws = draws_of_evaluation(params)["sampled"]
    model: Any = load_policy(params, base=base, directory=own, draws=draws).model
    if params.policy.lora is not None:
        bare = params.model_copy(update={"policy": params.policy.model_copy(update={"lora": None})})
        trained, model = model, load_policy(bare, base=base, directory=base, draws=draws).model
        merge_adapters(trained, model)
    with named_output(out) as temporary:
        write_model(temporary, base, model)


def merge_adapters(trained: nn.Module, model: nn.Module) -> None:
    """Gives a model without adapters the weights of one with adapters, merged."""
    merged = merged_weights(trained)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(merged[name])


def write_model(directory: Path, base: Path, model: Any) -> None:
    """Writes a base's directory with the weights of another model of its class."""
    shutil.copytree(base, directory, ignore=shutil.ignore_patterns(STATE))
    folder = directory
    if (directory / PIPELINE).exists():
        folder = (directory / TRANSFORMER_WEIGHTS).parent
    for file in folder.iterdir():
        if WEIGHT_FILES.fullmatch(file.name):
            file.unlink()
    model.save_pretrained(folder, max_shard_size=PART_BYTES)
