"""Base models of chunked action policies: fresh and imported backbones, and their warm-up."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from transformers import AutoModel, PreTrainedModel

from grpo.errors import ParameterError
from grpo.modalities.action_chunks.cloning import CloningSettings, clone_demonstrations
from grpo.modalities.action_chunks.model import (
    ActionChunkModel,
    ChunkShape,
    encode_instructions,
    save_action_model,
)
from grpo.modalities.action_chunks.parameters import ActionChunkPolicyParams, ChunkBase, Eyes
from grpo.modalities.modality import RunParams
from grpo.modalities.shared.directories import PolicyState, write_state
from grpo.modalities.shared.machine import DTYPES
from grpo.modalities.shared.models import (
    make_fresh_model,
    read_model,
    read_tokenizer,
    require_embedded,
)
from grpo.modalities.shared.parameters import ScratchBackbone
from grpo.modalities.shared.tokenizers import make_word_tokenizer
from grpo.modalities.shared.warmup import (
    BasePolicy,
    WarmupSettings,
    WarmupUpdate,
    name_remedy,
    settings_of,
)
from grpo.runtime.seeds import derive_seed
from grpo.schema import PARAMS

BACKBONE = "policy.base.backbone"
ENCODER = "policy.base.eyes.encoder"


def make_base_policy(params: RunParams[ActionChunkPolicyParams], data: Path) -> BasePolicy:
    """Returns the base policy that the parameters describe.

    Raises:
      ParameterError: If a source does not exist, a class refuses its configuration, or an encoder
        pictures of that size.
    """
    model, tokenizer = make_action_model(params, data)
    settings = settings_of(params.policy.base.warmup, params.seed)

    def save(directory: Path) -> None:
        save_action_model(directory, model, tokenizer)
        write_state(directory, PolicyState(name="base"))

    return BasePolicy(
        num_updates=settings.updates,
        warm_up=lambda table: name_remedy(
            clone_experts(params.policy, model, tokenizer, table, settings), settings
        ),
        save=save,
    )


def make_action_model(
    params: RunParams[ActionChunkPolicyParams], data: Path
) -> tuple[ActionChunkModel, Any]:
    """Returns the base model, before any warm-up, and its tokenizer.

    Raises:
      ParameterError: If a source does not exist, a class refuses its configuration, or an encoder
        pictures of that size.
    """
    # Imported here: the simulator takes seconds, and updates need only its dimensions.
    from grpo.modalities.action_chunks.simulation.metaworld import ACTIONS, HAND, OBSERVATIONS

    base = params.policy.base
    torch.manual_seed(derive_seed(params.seed, "base"))
    backbone, tokenizer = _make_backbone(base, data)
    eyes = _make_eyes(base.eyes, data) if base.eyes else None
    chunk = base.chunk
    shape = ChunkShape(
        observations=HAND if base.state == "hand" else OBSERVATIONS,
        pixels=base.eyes.pixels if base.eyes else 0,
        length=chunk.length,
        actions=ACTIONS,
        bins=chunk.bins,
        positions=chunk.positions,
    )
    try:
        model = ActionChunkModel(backbone, shape, eyes)
    except (ValueError, RuntimeError) as error:  # it has looked at a picture
        reason = " ".join(str(error).split())
        raise ParameterError(
            f"{PARAMS}: policy.base.eyes.pixels: the encoder refuses pictures of {shape.pixels} "
            f"pixels: {reason}"
        ) from None
    return model.to(params.machine.device, DTYPES[params.machine.dtype]).eval(), tokenizer


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
    from grpo.modalities.action_chunks.simulation.experts import demonstrate

    warmup = policy.base.warmup
    shown = [
        demonstrate(scene, noise=warmup.noise, seed=int(solution), pixels=model.shape.pixels)
        for scene, solution in zip(table["prompt"], table["solution"])
    ]
    return clone_demonstrations(
        model,
        lambda told: encode_instructions(tokenizer, told),
        [each for each in shown if each.is_solved],
        settings,
        CloningSettings(bin_spread=warmup.bin_spread, observation_noise=warmup.observation_noise),
    )


def _make_backbone(base: ChunkBase, data: Path) -> tuple[PreTrainedModel, Any]:
    """Returns the backbone and its tokenizer; a fresh one's knows the words of its demonstrations.

    Raises:
      ParameterError: If it does not exist, or its class refuses its configuration.
    """
    from grpo.modalities.action_chunks.simulation.metaworld import (
        instruction_of,
    )  # seconds, as above

    if isinstance(base.backbone, ScratchBackbone):
        told = [instruction_of(each) for each in sorted(base.warmup.demonstrations)]
        words: Any = make_word_tokenizer(told)
        fresh = make_fresh_model(
            base.backbone.architecture,
            base.backbone.config,
            {"vocab_size": len(words), "pad_token_id": words.pad_token_id},
            ending="Model",
            what="a class of transformers without a head such as LlamaModel",
            parameter=BACKBONE,
        )
        return fresh, words
    backbone = read_model(AutoModel, base.backbone, data, parameter=BACKBONE)
    tokenizer = read_tokenizer(base.backbone, data, parameter=BACKBONE)
    require_embedded(backbone, tokenizer, parameter=BACKBONE)
    if tokenizer.pad_token is None:  # what pads is never seen
        tokenizer.pad_token = tokenizer.eos_token
    return backbone, tokenizer


def _make_eyes(eyes: Eyes, data: Path) -> PreTrainedModel:
    """Returns a vision encoder.

    Raises:
      ParameterError: If it does not exist or is none.
    """
    if isinstance(eyes.encoder, ScratchBackbone):
        model: Any = make_fresh_model(
            eyes.encoder.architecture,
            eyes.encoder.config,
            {"image_size": eyes.pixels},
            ending="Model",
            what="a vision encoder of transformers such as SiglipVisionModel",
            parameter=ENCODER,
        )
    else:
        model = read_model(AutoModel, eyes.encoder, data, parameter=ENCODER)
    if model.main_input_name != "pixel_values":
        raise ParameterError(
            f"{PARAMS}: {ENCODER} must be a vision encoder, {type(model).__name__} reads "
            f"{model.main_input_name}"
        )
    return model
