"""Warm-up of a fresh chunked policy: behavior cloning of demonstrations."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from grpo.modalities.action_chunks.model import ActionChunkModel, ChunkShape
from grpo.modalities.action_chunks.simulation.experts import Demonstration
from grpo.modalities.shared.flops import left_out_by_torch
from grpo.modalities.shared.optimizer import PreciseAdamW
from grpo.modalities.shared.warmup import (
    WarmupSettings,
    WarmupUpdate,
    learning_rate_at,
    require_useful,
    step_on_gradient,
)
from grpo.types import Cost

LEAST_SCALE = 1e-3  # of an observation's number, in its own units


@dataclass(frozen=True, kw_only=True)
class CloningSettings:
    """How demonstrations are shown."""

    bin_spread: float  # deviation of a target around its action's bin, in bins; 0: that bin alone
    observation_noise: float  # deviation of what is added to observations, in their own units


def clone_demonstrations(
    model: ActionChunkModel,
    encode: Callable[[list[str]], tuple[Tensor, Tensor]],
    demonstrations: Sequence[Demonstration],
    settings: WarmupSettings,
    how: CloningSettings,
) -> Iterator[WarmupUpdate]:
    """Trains a model on all chunks of the demonstrations, cross-entropy over bins.

    The model's scale of observations is set to theirs.

    Args:
      encode: Instructions to tokens and their mask.

    Raises:
      DivergedError: As `grpo.modalities.shared.warmup.warm_up`.
    """
    rows = _collect(demonstrations, encode, model.shape)
    device = model.queries.device
    model.get_buffer("mean").copy_(rows.observation.mean(dim=0))
    model.get_buffer("scale").copy_(rows.observation.std(dim=0) + LEAST_SCALE)
    spread = _spread_bins(model.shape.bins, how.bin_spread).to(device)
    optimizer = PreciseAdamW(
        model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.99), weight_decay=0.01
    )
    generator = torch.Generator().manual_seed(settings.seed)
    first_loss: float | None = None
    counter: Any = FlopCounterMode(display=False, custom_mapping=left_out_by_torch())
    for update in range(settings.updates):
        rate = learning_rate_at(update, settings)
        for group in optimizer.param_groups:
            group["lr"] = rate
        chosen = torch.randint(len(rows.target), (settings.rows_per_update,), generator=generator)
        batch = rows.select(chosen, how.observation_noise, generator).to(device)
        # Every update has the same shapes: the first one's count is that of all.
        with counter if update == 0 else torch.enable_grad():
            loss = _loss(model, batch, spread)
            loss.backward()
        value = step_on_gradient(optimizer, loss, update)
        first_loss = value if first_loss is None else first_loss
        cost = Cost(flops=counter.get_total_flops(), trained_steps=len(chosen))
        yield WarmupUpdate(update=update, loss=value, learning_rate=rate, cost=cost)
    if first_loss is not None:
        require_useful(first_loss, lambda: _loss(model, batch, spread), update)


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Chunks of demonstrations."""

    instruction: Int[Tensor, "row width"]
    instruction_mask: Tensor
    observation: Float[Tensor, "row number"]
    picture: UInt8[Tensor, "row 3 pixel pixel"]
    target: Int[Tensor, "row token"]  # bins

    def select(
        self, rows: Int[Tensor, " kept"], noise: float, generator: torch.Generator
    ) -> "_Rows":
        """Returns some rows, their observations with noise."""
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
    """Returns every chunk of the demonstrations, at every step where one can begin."""
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
    """Returns the target distribution of each bin: neighbors are nearly right."""
    distance = (torch.arange(bins)[:, None] - torch.arange(bins)).float()
    if spread == 0:
        return (distance == 0).float()
    return (-(distance**2) / (2 * spread**2)).softmax(dim=1)


def _loss(model: ActionChunkModel, batch: _Rows, spread: Tensor) -> Float[Tensor, ""]:
    """Returns the cross-entropy per action token in nats."""
    logits = model(batch.instruction, batch.instruction_mask, batch.observation, batch.picture)
    loss: Tensor = -(spread[batch.target] * logits.float().log_softmax(dim=-1)).sum(dim=-1).mean()
    return loss
