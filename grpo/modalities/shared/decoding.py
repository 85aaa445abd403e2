"""Cached decoding: caches with preallocated memory, attention biases, the storage of weights."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer

MAX_RESERVED_STEPS = 128  # for which a cache preallocates memory, at most
SHOWN_STEPS = 16  # the same for a cache that shows what it has reserved


def sampling_cache(
    config: PretrainedConfig, max_steps: int, *, shows_reserved: bool = False
) -> "SamplingCache":
    """Returns an empty cache whose full-attention layers preallocate memory for many steps.

    Args:
      shows_reserved: Whether steps of decoding get the whole buffers, which end with zeros that
        `hide_reserved` masks. A CPU reads them faster than the filled part alone, which has a gap
        behind every row.
    """
    cache = SamplingCache(config=config)
    steps = min(max_steps, SHOWN_STEPS if shows_reserved else MAX_RESERVED_STEPS)
    cache.layers = [
        _ReservingLayer(steps, shows_reserved) if type(layer) is DynamicLayer else layer
        for layer in cache.layers
    ]
    return cache


def hide_reserved(attention: Tensor, cache: DynamicCache) -> Tensor:
    """Returns an attention bias over all tokens so far, extended to what a cache shows of them.

    A cache that shows no more than that leaves a bias, or a mask, as it is.
    """
    layer: Any = cache.layers[0] if cache.layers else None
    if not isinstance(layer, _ReservingLayer):
        return attention
    hidden = layer.num_shown(attention.shape[-1]) - attention.shape[-1]
    return nn.functional.pad(attention, (0, hidden), value=float("-inf")) if hidden else attention


def select_rows(cache: DynamicCache, rows: Tensor) -> None:
    """Selects rows of a cache with full attention, differentiably."""
    layers: list[Any] = cache.layers
    for layer in layers:
        layer.keys = layer.keys.index_select(0, rows)
        layer.values = layer.values.index_select(0, rows)


@contextmanager
def column_major_weights(body: nn.Module) -> Iterator[None]:
    """Stores the weights column-major within, which speeds up products with few rows on a CPU."""
    weights = [
        each.weight
        for each in body.modules()
        # Leaves out sharded and quantized weights.
        if type(each) is nn.Linear and type(each.weight) is nn.Parameter and each.weight.is_cpu
    ]
    try:
        for weight in weights:
            weight.data = weight.data.t().contiguous().t()
        yield
    finally:
        for weight in weights:
            weight.data = weight.data.contiguous()


def score_bias(
    mask: Bool[Tensor, "row seen"], new: int, dtype: torch.dtype
) -> Float[Tensor, "row one query seen"]:
    """Returns the additive attention bias: -inf on padding and on later positions.

    transformers passes a mask with four axes on unchanged. The bias is built once per pass; a
    boolean mask would be converted in every layer.
    """
    seen = mask.shape[1]
    allowed = mask[:, None, None, :]
    if new > 1:
        causal = torch.ones(new, seen, dtype=torch.bool, device=mask.device).tril(seen - new)
        allowed = allowed & causal
    return torch.where(allowed, 0.0, float("-inf")).to(dtype)


class _Move(NamedTuple):
    """A selection of rows, computed once for all layers."""

    rows: Int[Tensor, " kept"]  # all of them, in order
    targets: Int[Tensor, " moved"]  # places whose row changes
    sources: Int[Tensor, " moved"]
    is_from_end: bool  # whether the moved rows come from behind those that are kept

    @classmethod
    def of(cls, rows: Int[Tensor, " kept"], device: torch.device) -> "_Move":
        """Returns the move, on a device; `rows` are on the host, where nothing waits for them."""
        count = len(rows)
        targets = (rows != torch.arange(count)).nonzero()[:, 0]
        sources = rows[targets]
        is_from_end = not bool((sources < count).any())
        return cls(rows.to(device), targets.to(device), sources.to(device), is_from_end)


class SamplingCache(DynamicCache):  # type: ignore[misc]
    """A cache of transformers whose rows are selected by indices on the host."""

    def reorder_cache(self, beam_idx: Int[Tensor, " kept"]) -> None:
        """Selects rows in the given order; a row may repeat."""
        move = None
        for layer in self.layers:
            if isinstance(layer, _ReservingLayer):
                move = move or _Move.of(beam_idx, layer.device)
                layer.move(move)
            else:
                layer.reorder_cache(beam_idx)


class _ReservingLayer(DynamicLayer):  # type: ignore[misc]
    """A cache layer whose `keys` and `values` are views of preallocated buffers.

    DynamicLayer concatenates instead and so copies the whole cache at every step.
    """

    def __init__(self, reserved_steps: int, shows_reserved: bool) -> None:
        super().__init__()
        self._reserved, self._shows_reserved = reserved_steps, shows_reserved
        self._prompt = self._length = 0  # numbers of positions: of the first update, of all

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Appends keys and values and returns all cached ones, with what is reserved if asked."""
        start, self._length = self._length, self._length + key_states.shape[2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._prompt = self._length
            self._key_buffer, self._value_buffer = key_states, value_states
            return self._show()
        if self._length > self._key_buffer.shape[2]:
            self._key_buffer = self._grow(self._key_buffer[:, :, :start])
            self._value_buffer = self._grow(self._value_buffer[:, :, :start])
        self._key_buffer[:, :, start : self._length] = key_states
        self._value_buffer[:, :, start : self._length] = value_states
        filled = self._show()
        return (self._key_buffer, self._value_buffer) if self._shows_reserved else filled

    def reorder_cache(self, beam_idx: Int[Tensor, " kept"]) -> None:
        """Selects rows in the given order; a row may repeat."""
        self.move(_Move.of(beam_idx.cpu(), self.device))

    def move(self, move: _Move) -> None:
        """Selects rows."""
        if move.is_from_end:  # rows from the end fill those that are left out: no other is copied
            with torch.inference_mode():  # `update` may have made the buffers in this mode
                for buffer in (self._key_buffer, self._value_buffer):
                    filled = buffer[:, :, : self._length]
                    filled[move.targets] = filled[move.sources]
            self._key_buffer = self._key_buffer[: len(move.rows)]
            self._value_buffer = self._value_buffer[: len(move.rows)]
        else:
            self._key_buffer = self._grow(self._key_buffer[:, :, : self._length], move.rows)
            self._value_buffer = self._grow(self._value_buffer[:, :, : self._length], move.rows)
        self._show()

    def num_shown(self, length: int) -> int:
        """Returns the positions that an update up to `length` returns."""
        return self._room(length) if self._shows_reserved and self.is_initialized else length

    def _room(self, length: int) -> int:
        """Returns the positions of a buffer that holds `length`: the first update and blocks."""
        blocks = max(1, math.ceil((length - self._prompt) / self._reserved))
        return self._prompt + blocks * self._reserved

    def _show(self) -> tuple[Tensor, Tensor]:
        """Sets and returns the views of the filled part."""
        keys = self._key_buffer[:, :, : self._length]
        values = self._value_buffer[:, :, : self._length]
        self.keys, self.values = keys, values
        return keys, values

    def _grow(self, filled: Tensor, rows: Tensor | None = None) -> Tensor:
        """Returns a larger buffer that starts with the filled part, or with rows of it."""
        count, heads, length, size = filled.shape
        count = count if rows is None else len(rows)
        buffer = filled.new_empty(count, heads, self._room(self._length), size)
        if self._shows_reserved:
            buffer[:, :, length:] = 0.0  # a weight of 0 does not hide what is not finite
        front = buffer[:, :, :length]
        if rows is None:
            front.copy_(filled)
        else:
            torch.index_select(filled, 0, rows, out=front)
        return buffer
