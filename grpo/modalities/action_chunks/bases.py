"""Base models of action-chunk policies: backbones and behavior cloning of demonstrations."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel, PreTrainedModel

from grpo.errors import ParameterError
from grpo.modalities.action_chunks.modality import (
    ActionChunkPolicyParams,
    ChunkBase,
    ChunkDecoding,
    ScratchBackbone,
    Vision,
)
from grpo.modalities.action_chunks.model import (
    ActionChunkModel,
    ChunkShape,
    encode_instructions,
    save_action_model,
)
from grpo.modalities.action_chunks.phases import choose_labeller
from grpo.modalities.action_chunks.policy import ActionChunkPolicy
from grpo.modalities.action_chunks.simulation.base import Demonstration, Moment
from grpo.modalities.action_chunks.simulation.pool import Order
from grpo.modalities.action_chunks.simulation.sizes import (
    ACTIONS,
    HAND,
    OBSERVATIONS,
    instruction_of,
)
from grpo.modalities.modality import RunParams
from grpo.modalities.shared.directories import PolicyState, write_state
from grpo.modalities.shared.flops import missing_flop_formulas
from grpo.modalities.shared.models import (
    make_fresh_model,
    read_model,
    read_tokenizer,
    require_embedded,
    shape_model,
)
from grpo.modalities.shared.optimizer import PreciseAdamW
from grpo.modalities.shared.restoring import place_round
from grpo.modalities.shared.tokenizers import make_word_tokenizer
from grpo.modalities.shared.warmup import (
    BasePolicy,
    WarmupSettings,
    WarmupUpdate,
    learning_rate_at,
    require_low_loss,
    step_on_gradient,
    warmup_settings,
    with_remedy,
)
from grpo.runtime.dry_run import DryRun
from grpo.runtime.machine import DTYPES
from grpo.runtime.seeds import derive_seed
from grpo.schema import PARAMS
from grpo.types import Cost

ReadModel = Callable[..., Any]  # read_model, or shape_model for a dry run
MIN_SCALE = 1e-3  # added to the deviation of each observation number, in its own units
BACKBONE = "policy.base.backbone"
ENCODER = "policy.base.vision.encoder"


@dataclass(frozen=True, kw_only=True)
class CloningSettings:
    """Label smoothing and input noise of behavior cloning."""

    bin_spread: float  # deviation of the target distribution, in bins; 0: one-hot
    observation_noise: float  # deviation of Gaussian noise on observations, in their own units


def clone_demonstrations(
    model: ActionChunkModel,
    encode: Callable[[list[str]], tuple[Tensor, Tensor]],
    demonstrations: Sequence[Demonstration],
    settings: WarmupSettings,
    how: CloningSettings,
) -> Iterator[WarmupUpdate]:
    """Trains a model on all chunks of the demonstrations with cross-entropy over bins.

    Leaves out demonstrations in which the expert fails, or that are shorter than a chunk. Sets the
    model's observation mean and scale to those of the others.

    Args:
      encode: Maps instructions to tokens and their mask.

    Raises:
      DivergedError: As `grpo.modalities.shared.warmup.warm_up`.
      ParameterError: If no demonstration is left.
    """
    length = model.shape.length
    usable = [each for each in demonstrations if each.is_solved and len(each.action) >= length]
    if not usable:
        raise ParameterError(
            f"{PARAMS}: policy.base.warmup must have a scene that the expert solves in at least "
            f"the {length} steps of policy.chunk.length, has none in {len(demonstrations)}; lower "
            "warmup.noise or the length"
        )
    rows = _collect(usable, encode, model.shape)
    device = model.queries.device
    model.get_buffer("mean").copy_(rows.observation.mean(dim=0))
    model.get_buffer("scale").copy_(rows.observation.std(dim=0) + MIN_SCALE)
    spread = _spread_bins(model.shape.bins, how.bin_spread).to(device)
    optimizer = PreciseAdamW(
        model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.99), weight_decay=0.01
    )
    generator = torch.Generator().manual_seed(settings.seed)
    first_loss: float | None = None
    counter: Any = FlopCounterMode(display=False, custom_mapping=missing_flop_formulas())
    for update in range(settings.updates):
        rate = learning_rate_at(update, settings)
        for group in optimizer.param_groups:
            group["lr"] = rate
        chosen = torch.randint(len(rows.target), (settings.rows_per_update,), generator=generator)
        batch = rows.select(chosen, how.observation_noise, generator).to(device)
        # All updates have the same shapes, so the FLOPs of the first one hold for all.
        with counter if update == 0 else torch.enable_grad():
            loss = _loss(model, batch, spread)
            loss.backward()
        value = step_on_gradient(optimizer, loss, update)
        first_loss = value if first_loss is None else first_loss
        cost = Cost(flops=counter.get_total_flops(), trained_steps=len(chosen))
        yield WarmupUpdate(update=update, loss=value, learning_rate=rate, cost=cost)
    if first_loss is not None:
        require_low_loss(first_loss, lambda: _loss(model, batch, spread), update)


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Chunks of demonstrations as training rows."""

    instruction: Int[Tensor, "row width"]
    instruction_mask: Tensor
    observation: Float[Tensor, "row number"]
    picture: UInt8[Tensor, "row 3 pixel pixel"]
    target: Int[Tensor, "row token"]  # bins

    def select(
        self, rows: Int[Tensor, " kept"], noise: float, generator: torch.Generator
    ) -> "_Rows":
        """Returns the selected rows with noise added to their observations."""
        observation = self.observation[rows]
        return _Rows(
            instruction=self.instruction[rows],
            instruction_mask=self.instruction_mask[rows],
            observation=observation + noise * torch.randn(observation.shape, generator=generator),
            picture=self.picture[rows],
            target=self.target[rows],
        )

    def to(self, device: torch.device) -> "_Rows":
        """Returns the rows on a device."""
        return _Rows(**{name: each.to(device) for name, each in vars(self).items()})


def _collect(
    demonstrations: Sequence[Demonstration],
    encode: Callable[[list[str]], tuple[Tensor, Tensor]],
    shape: ChunkShape,
) -> _Rows:
    """Returns all chunks of the demonstrations; one starts at every step that leaves room."""
    tokens, token_mask = encode([each.instruction for each in demonstrations])
    source, seen, looked, target = [], [], [], []
    for index, each in enumerate(demonstrations):
        bins = ((torch.tensor(each.action) + 1) / 2 * (shape.bins - 1)).round().long()
        chunks = bins.unfold(0, shape.length, 1).transpose(1, 2).flatten(1)
        target.append(chunks)
        seen.append(torch.tensor(each.observation[: len(chunks), : shape.observations]).float())
        looked.append(torch.tensor(each.picture[: len(chunks)]))
        source += [index] * len(chunks)
    return _Rows(
        instruction=tokens[source],
        instruction_mask=token_mask[source],
        observation=torch.cat(seen),
        picture=torch.cat(looked),
        target=torch.cat(target),
    )


def _spread_bins(bins: int, spread: float) -> Float[Tensor, "bin bin"]:
    """Returns the target distribution of each bin, smoothed over neighboring bins."""
    distance = (torch.arange(bins)[:, None] - torch.arange(bins)).float()
    if spread == 0:
        return (distance == 0).float()
    return (-(distance**2) / (2 * spread**2)).softmax(dim=1)


def _loss(model: ActionChunkModel, batch: _Rows, spread: Tensor) -> Float[Tensor, ""]:
    """Returns the cross-entropy per action token in nats."""
    logits = model(batch.instruction, batch.instruction_mask, batch.observation, batch.picture)
    loss: Tensor = -(spread[batch.target] * logits.float().log_softmax(dim=-1)).sum(dim=-1).mean()
    return loss


def make_base_policy(params: RunParams[ActionChunkPolicyParams], data: Path) -> BasePolicy:
    """Returns the base policy that the parameters describe.

    Raises:
      ParameterError: If a source does not exist, a class refuses its configuration, or an encoder
        pictures of that size.
    """
    model, tokenizer = make_action_model(params, data)
    settings = warmup_settings(params.policy.base.warmup, params.seed)

    def save(directory: Path) -> None:
        save_action_model(directory, model, tokenizer)
        write_state(directory, PolicyState(name="base"))

    return BasePolicy(
        num_updates=settings.updates,
        warm_up=lambda table: with_remedy(
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
    torch.manual_seed(derive_seed(params.seed, "base"))
    model, tokenizer = _make_model(params.policy.base, data, read_model)
    return model.to(params.machine.device, DTYPES[params.machine.dtype]).eval(), tokenizer


def _make_model(base: ChunkBase, data: Path, read: ReadModel) -> tuple[ActionChunkModel, Any]:
    """Returns a model, in the dtype of its sources, and its tokenizer.

    Args:
      read: Returns the model of a source.
    """
    backbone, tokenizer = _make_backbone(base, data, read)
    vision = _make_vision_encoder(base.vision, data, read) if base.vision else None
    chunk = base.chunk
    shape = ChunkShape(
        observations=HAND if base.state == "hand" else OBSERVATIONS,
        pixels=base.vision.pixels if base.vision else 0,
        length=chunk.length,
        actions=ACTIONS,
        bins=chunk.bins,
        positions=chunk.positions,
    )
    try:
        model = ActionChunkModel(backbone, shape, vision)
    except (ValueError, RuntimeError) as error:  # the constructor encodes a blank picture
        reason = " ".join(str(error).split())
        raise ParameterError(
            f"{PARAMS}: policy.base.vision.pixels must be a size that the encoder accepts, got "
            f"{shape.pixels}: {reason}"
        ) from None
    return model, tokenizer


class BlankScenes:
    """Scenes without a simulator, for a dry run: all observations are 0, and no scene ends."""

    seconds = 0.0

    def __init__(self, shape: ChunkShape) -> None:
        self._shape = shape

    def play(self, orders: dict[int, Order]) -> dict[int, Moment]:
        """Returns an observation of each scene."""
        size = self._shape.pixels
        blank = Moment(
            observation=np.zeros(OBSERVATIONS, np.float32),
            executed=self._shape.length,
            ending=None,
            picture=np.zeros((3, size, size), np.uint8),
        )
        return dict.fromkeys(orders, blank)


def load_unfilled(
    params: RunParams[ActionChunkPolicyParams], *, data: Path, decoding: ChunkDecoding, run: DryRun
) -> ActionChunkPolicy:
    """Returns the policy of the base for a dry run.

    Raises:
      ParameterError: If a configuration of the base is not on this machine.
    """
    settings = params.policy
    with torch.device("meta"):
        model, tokenizer = _make_model(settings.base, data, shape_model)
        model.to(DTYPES[params.machine.dtype]).eval()
    place_round(params, model, run, adapted=model.backbone)
    with run:
        return ActionChunkPolicy(
            model,
            tokenizer,
            decoding=decoding,
            scenes=BlankScenes(model.shape),
            slots=settings.scenes.at_once,
            label=choose_labeller(settings.phases, settings.max_steps),
        )


def clone_experts(
    policy: ActionChunkPolicyParams,
    model: ActionChunkModel,
    tokenizer: Any,
    table: pd.DataFrame,
    settings: WarmupSettings,
) -> Iterator[WarmupUpdate]:
    """Trains a fresh model on expert demonstrations in the scenes of a table of schema WARMUP."""
    from grpo.modalities.action_chunks.simulation.experts import demonstrate

    warmup = policy.base.warmup
    shown = [
        demonstrate(scene, noise=warmup.noise, seed=int(solution), pixels=model.shape.pixels)
        for scene, solution in zip(table["prompt"], table["solution"])
    ]
    return clone_demonstrations(
        model,
        lambda instructions: encode_instructions(tokenizer, instructions),
        shown,
        settings,
        CloningSettings(bin_spread=warmup.bin_spread, observation_noise=warmup.observation_noise),
    )


def _make_backbone(base: ChunkBase, data: Path, read: ReadModel) -> tuple[PreTrainedModel, Any]:
    """Returns the backbone and its tokenizer.

    The vocabulary of a fresh tokenizer is the words of the demonstrations' instructions.

    Raises:
      ParameterError: If the source does not exist or its class refuses its configuration.
    """
    if isinstance(base.backbone, ScratchBackbone):
        instructions = [instruction_of(each) for each in sorted(base.warmup.demonstrations)]
        words: Any = make_word_tokenizer(instructions)
        fresh = make_fresh_model(
            base.backbone.architecture,
            base.backbone.config,
            {"vocab_size": len(words), "pad_token_id": words.pad_token_id},
            ending="Model",
            what="a class of transformers without a head such as LlamaModel",
            parameter=BACKBONE,
        )
        return fresh, words
    backbone = read(AutoModel, base.backbone, data, parameter=BACKBONE)
    tokenizer = read_tokenizer(base.backbone, data, parameter=BACKBONE)
    require_embedded(backbone, tokenizer, parameter=BACKBONE)
    if tokenizer.pad_token is None:  # any token will do: attention masks padding
        tokenizer.pad_token = tokenizer.eos_token
    return backbone, tokenizer


def _make_vision_encoder(vision: Vision, data: Path, read: ReadModel) -> PreTrainedModel:
    """Returns the vision encoder.

    Raises:
      ParameterError: If the source does not exist or is not a vision encoder.
    """
    if isinstance(vision.encoder, ScratchBackbone):
        model: Any = make_fresh_model(
            vision.encoder.architecture,
            vision.encoder.config,
            {"image_size": vision.pixels},
            ending="Model",
            what="a vision encoder of transformers such as SiglipVisionModel",
            parameter=ENCODER,
        )
    else:
        model = read(AutoModel, vision.encoder, data, parameter=ENCODER)
    if model.main_input_name != "pixel_values":
        raise ParameterError(
            f"{PARAMS}: {ENCODER} must be a vision encoder, got {type(model).__name__} with input "
            f"{model.main_input_name}"
        )
    return model
