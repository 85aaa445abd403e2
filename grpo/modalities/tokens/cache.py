"""A cache of keys and values that grows in place: nothing is copied from step to step."""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicLayer


def sampling_cache(config: PretrainedConfig, max_steps: int) -> DynamicCache:
    """Returns an empty cache whose full-attention layers reserve room for many steps at once."""
    cache = DynamicCache(config=config)
    steps = min(max_steps, ReservingLayer.MAX_RESERVED_STEPS)
    cache.layers = [
        ReservingLayer(steps) if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    return cache


def attends_fully(config: PretrainedConfig) -> bool:
    """Returns whether every layer keeps all keys and values, so that rows may share a prefix."""
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)


def attends_at_all(config: PretrainedConfig) -> bool:
    """Returns whether some layer keeps keys and values; state-space models keep states alone."""
    layers = DynamicCache(config=config).layers
    return not layers or any(isinstance(layer, CacheLayerMixin) for layer in layers)


def select_rows(cache: DynamicCache, rows: Tensor) -> None:
    """Keeps these rows of a cache that `attends_fully`, differentiably."""
    layers: list[Any] = cache.layers
    for layer in layers:
        layer.keys = layer.keys.index_select(0, rows)
        layer.values = layer.values.index_select(0, rows)


class ReservingLayer(DynamicLayer):  # type: ignore[misc]
    """`keys` and `values` are the filled front of larger buffers.

    DynamicLayer concatenates instead: it copies everything at every step.
    """

    MAX_RESERVED_STEPS = 128

    def __init__(self, reserved_steps: int) -> None:
        super().__init__()
        self._reserved = reserved_steps
        self._length = 0  # positions filled

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Appends to the buffers and returns everything so far; the signature is the parent's."""
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
        """Keeps these rows, in this order; a row may be kept more than once."""
        self._key_buffer = self._grow(self._key_buffer[:, :, : self._length], beam_idx)
        self._value_buffer = self._grow(self._value_buffer[:, :, : self._length], beam_idx)
        self._show()

    def _show(self) -> tuple[Tensor, Tensor]:
        """Sets and returns what is filled."""
        keys = self._key_buffer[:, :, : self._length]
        values = self._value_buffer[:, :, : self._length]
        self.keys, self.values = keys, values
        return keys, values

    def _grow(self, filled: Tensor, rows: Tensor | None = None) -> Tensor:
        """Returns a buffer with more room that starts with what is filled, or its rows."""
        count, heads, _, size = filled.shape
        count = count if rows is None else len(rows)
        buffer = filled.new_empty(count, heads, self._length + self._reserved, size)
        front = buffer[:, :, : filled.shape[2]]
        if rows is None:
            front.copy_(filled)
        else:
            torch.index_select(filled, 0, rows, out=front)
        return buffer
