"""Supervised warm-up of a fresh base policy on generated solutions."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo.errors import DivergedError
from grpo.modalities.shared.flops import TokenFlops
from grpo.modalities.shared.optimizer import (
    PreciseAdamW,
    optimized_tensors,
    require_finite_numbers,
    take_step,
)
from grpo.runtime.seeds import derive_seed
from grpo.schema import PARAMS
from grpo.types import Cost

WARMUP_UPDATES = 30  # updates of linear learning-rate warm-up
FINAL_FRACTION = 0.02  # of the learning rate, at the end of the cosine decay
PARTS = 4  # of the rows of an update, by length: less padding
MAX_GRADIENT_NORM = 1.0  # gradient clipping
MAX_LOSS_RATIO = 10.0  # largest final loss relative to that of the untrained model


@dataclass(frozen=True, kw_only=True)
class WarmupSettings:
    updates: int
    rows_per_update: int
    learning_rate: float
    seed: int


@dataclass(frozen=True, kw_only=True)
class WarmupUpdate:
    """One optimizer step of the warm-up."""

    update: int
    loss: float  # nats per solution token; of a flow, squared velocity per dimension
    learning_rate: float
    cost: Cost


class BasePolicy(NamedTuple):
    """A base policy before its warm-up, with functions to warm it up and save it."""

    num_updates: int  # updates of the warm-up
    warm_up: Callable[[pd.DataFrame], Iterator[WarmupUpdate]]  # takes a table of schema WARMUP
    save: Callable[[Path], None]


@runtime_checkable
class WarmupParams(Protocol):
    """The fields common to all sections policy.base.warmup."""

    @property
    def updates(self) -> int: ...

    @property
    def rows_per_update(self) -> int: ...

    @property
    def learning_rate(self) -> float: ...


def learning_rate_at(update: int, settings: WarmupSettings) -> float:
    """Returns the learning rate: linear warm-up times cosine decay."""
    fall = 0.5 * (1 + math.cos(math.pi * update / settings.updates))
    rise = min(1.0, (update + 1) / WARMUP_UPDATES)
    return settings.learning_rate * (rise * (FINAL_FRACTION + (1 - FINAL_FRACTION) * fall))


def step_on_gradient(optimizer: PreciseAdamW, loss: Tensor, update: int) -> float:
    """Clips the gradient, makes an optimizer step and returns the loss.

    Raises:
      DivergedError: If loss, gradient or weights are not finite.
    """
    norm = torch.nn.utils.clip_grad_norm_(optimized_tensors(optimizer), MAX_GRADIENT_NORM)
    value = loss.item()
    require_finite_numbers(update, {"loss": value, "gradient norm": float(norm)})
    take_step(optimizer, update)
    optimizer.zero_grad(set_to_none=True)
    return value


@torch.no_grad()
def require_low_loss(first_loss: float, loss: Callable[[], Tensor], update: int) -> None:
    """Raises DivergedError if the final model is far worse than the untrained one.

    Args:
      loss: Computes the current loss on the rows of the last update; not part of the cost.
    """
    last = float(loss())
    require_finite_numbers(update, {"loss after the last update": last})
    if last > MAX_LOSS_RATIO * first_loss:
        raise DivergedError(
            f"update {update}: the final loss must be at most {MAX_LOSS_RATIO:g} times the initial "
            f"loss {first_loss:.3g}, got {last:.3g}"
        )


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pairs: list[tuple[str, str]],
    settings: WarmupSettings,
) -> Iterator[WarmupUpdate]:
    """Trains on (prompt, solution) pairs with cross-entropy on solution and end token.

    Raises:
      DivergedError: If a number is not finite or the final loss is far above the initial one.
    """
    flops = TokenFlops(model)
    rows = _encode(tokenizer, pairs)

    def prepare(chosen: list[int]) -> tuple[Callable[[], Tensor], Cost]:
        parts = [
            tuple(each.to(model.device) for each in _collate([rows[index] for index in part]))
            for part in split_by_length(chosen, lambda index: sum(map(len, rows[index])), PARTS)
        ]
        total = sum(int((targets != -100).sum()) for _, targets in parts)
        used = 0
        for tokens, _ in parts:
            count, width = tokens.shape
            used += flops.training(rows=count, query=width, context=width, logits=width)

        def compute() -> Tensor:
            return torch.stack([_loss(model, *part) for part in parts]).sum() / total

        return compute, Cost(flops=used, trained_steps=total)

    yield from fit(model, len(rows), settings, prepare)


def split_by_length(rows: list[int], length: Callable[[int], int], parts: int) -> list[list[int]]:
    """Returns the rows of an update in parts of similar lengths, which need less padding."""
    ordered = sorted(rows, key=length)
    return [part.tolist() for part in np.array_split(ordered, min(parts, len(ordered)))]


def fit(
    model: nn.Module,
    num_rows: int,
    settings: WarmupSettings,
    prepare: Callable[[list[int]], tuple[Callable[[], Tensor], Cost]],
) -> Iterator[WarmupUpdate]:
    """Trains a model on random batches of rows.

    Args:
      prepare: Returns the loss of some rows, in nats per target token, and what an update with it
        costs.

    Raises:
      DivergedError: If a number is not finite or the final loss is far above the initial one.
    """
    optimizer = PreciseAdamW(
        model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.05
    )
    first_loss: float | None = None
    for update, batch in enumerate(_batches(num_rows, settings)):
        rate = learning_rate_at(update, settings)
        for group in optimizer.param_groups:
            group["lr"] = rate
        compute, cost = prepare(batch)
        loss = compute()
        loss.backward()
        value = step_on_gradient(optimizer, loss, update)
        first_loss = value if first_loss is None else first_loss
        yield WarmupUpdate(update=update, loss=value, learning_rate=rate, cost=cost)
    if first_loss is not None:
        require_low_loss(first_loss, compute, update)


def _loss(
    model: PreTrainedModel, tokens: Int[Tensor, "row width"], targets: Int[Tensor, "row width"]
) -> Float[Tensor, ""]:
    """Returns the sum of the cross-entropies in nats of all target tokens."""
    logits = model(input_ids=tokens, use_cache=False).logits
    return cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100, reduction="sum"
    )


def _encode(
    tokenizer: PreTrainedTokenizerBase, pairs: list[tuple[str, str]]
) -> list[tuple[list[int], list[int]]]:
    """Returns prompt and solution tokens; the solution includes the end token."""
    prompts = tokenizer([prompt for prompt, _ in pairs])["input_ids"]
    solutions = tokenizer([text for _, text in pairs], add_special_tokens=False)["input_ids"]
    end = [tokenizer.eos_token_id]
    return [(prompt, solution + end) for prompt, solution in zip(prompts, solutions)]


def _batches(num_rows: int, settings: WarmupSettings) -> Iterator[list[int]]:
    """Yields random row indices per update, without replacement within an update."""
    generator = np.random.default_rng(settings.seed)
    size = min(settings.rows_per_update, num_rows)
    for _ in range(settings.updates):
        yield generator.choice(num_rows, size, replace=False).tolist()


def _collate(rows: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    """Returns inputs padded on the right, and targets with -100 outside the solution.

    The last token is no input, because it has no target.
    """
    width = max(len(prompt) + len(solution) for prompt, solution in rows)
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    targets = torch.full((len(rows), width), -100)
    for index, (prompt, solution) in enumerate(rows):
        total = len(prompt) + len(solution)
        tokens[index, :total] = torch.tensor(prompt + solution)
        targets[index, len(prompt) - 1 : total - 1] = torch.tensor(solution)
    return tokens[:, :-1], targets[:, :-1]


def warmup_settings(warmup: WarmupParams, seed: int) -> WarmupSettings:
    """Returns the settings of a warm-up.

    Args:
      seed: The seed of the run.
    """
    return WarmupSettings(
        updates=warmup.updates,
        rows_per_update=warmup.rows_per_update,
        learning_rate=warmup.learning_rate,
        seed=derive_seed(seed, "warmup"),
    )


def with_remedy(
    updates: Iterator[WarmupUpdate], settings: WarmupSettings
) -> Iterator[WarmupUpdate]:
    """Yields the updates; adds the parameter to lower to the message of a DivergedError."""
    try:
        yield from updates
    except DivergedError as error:
        raise DivergedError(
            f"warm-up of the base diverged at {error}; lower policy.base.warmup.learning_rate, "
            f"which is {settings.learning_rate:g}, in {PARAMS}"
        ) from None
