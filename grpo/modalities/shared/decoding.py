"""Cached decoding: caches with preallocated memory, attention biases, the storage of weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer

MAX_RESERVED_STEPS = 128  # for which a cache preallocates memory


def sampling_cache(config: PretrainedConfig, max_steps: int) -> DynamicCache:
    """Returns an empty cache whose full-attention layers preallocate memory for many steps."""
    cache = DynamicCache(config=config)
    steps = min(max_steps, MAX_RESERVED_STEPS)
    cache.layers = [
        _ReservingLayer(steps) if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    return cache


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
        allowed = allowed & torch.ones(new, seen, dtype=torch.bool).tril(seen - new)
    return torch.where(allowed, 0.0, float("-inf")).to(dtype)


class _ReservingLayer(DynamicLayer):  # type: ignore[misc]
    """A cache layer whose `keys` and `values` are views of preallocated buffers.

    DynamicLayer concatenates instead and so copies the whole cache at every step.
    """

    def __init__(self, reserved_steps: int) -> None:
        super().__init__()
        self._reserved = reserved_steps
        self._length = 0  # number of cached positions

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Appends keys and values and returns all cached ones."""
        start, self._length = self._length, self._length + key_states.shape[2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._key_buffer, self._value_buffer = key_states[:, :, :0], value_states[:, :, :0]
        if self._length > self._key_buffer.shape[2]:
            self._key_buffer = self._grow(self._key_buffer[:, :, :start])
            self._value_buffer = self._grow(self._value_buffer[:, :, :start])
        self._key_buffer[:, :, start : self._length] = key_states
        self._value_buffer[:, :, start : self._length] = value_states
        return self._show()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Selects rows in the given order; a row may repeat."""
        count = len(beam_idx)
        moved = (beam_idx != torch.arange(count, device=beam_idx.device)).nonzero()[:, 0]
        sources = beam_idx[moved]
        if bool((sources < count).any()):
            self._key_buffer = self._grow(self._key_buffer[:, :, : self._length], beam_idx)
            self._value_buffer = self._grow(self._value_buffer[:, :, : self._length], beam_idx)
        else:  # rows from the end fill those that are left out: no other row is copied
            with torch.inference_mode():  # `update` may have made the buffers in this mode
                for buffer in (self._key_buffer, self._value_buffer):
                    filled = buffer[:, :, : self._length]
                    filled[moved] = filled[sources]
            self._key_buffer = self._key_buffer[:count]
            self._value_buffer = self._value_buffer[:count]
        self._show()

    def _show(self) -> tuple[Tensor, Tensor]:
        """Sets and returns the views of the filled part."""
        keys = self._key_buffer[:, :, : self._length]
        values = self._value_buffer[:, :, : self._length]
        self.keys, self.values = keys, values
        return keys, values

    def _grow(self, filled: Tensor, rows: Tensor | None = None) -> Tensor:
        """Returns a larger buffer that starts with the filled part, or with rows of it."""
        count, heads, _, size = filled.shape
        count = count if rows is None else len(rows)
        buffer = filled.new_empty(count, heads, self._length + self._reserved, size)
        front = buffer[:, :, : filled.shape[2]]
        if rows is None:
            front.copy_(filled)
        else:
            torch.index_select(filled, 0, rows, out=front)
        return buffer
