"""Activation memory: its measurement, and gradient checkpointing of blocks."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import Cache

from grpo.errors import ParameterError
from grpo.modalities.tokens.forward import grouped_query_attention, groups_queries
from grpo.modalities.tokens.routing import repeat_current_routing
from grpo.schema import PARAMS


class SavedBytes:
    """Counts the memory that autograd saves: each storage once, without parameters."""

    def __init__(self, model: nn.Module) -> None:
        held = [*model.parameters(), *model.buffers()]
        self._known = {each.untyped_storage().data_ptr() for each in held}
        self.total = 0

    def note(self, tensor: Tensor) -> Tensor:
        """Counts a tensor's memory and returns the tensor without its graph.

        The detached tensor avoids a reference cycle for operations that save their own output.
        """
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:
            self._known.add(storage.data_ptr())
            self.total += storage.nbytes()
        return tensor.detach()


@contextmanager
def saved_bytes(model: nn.Module) -> Iterator[SavedBytes]:
    """Yields the bytes that forward passes within save for their backward passes.

    The caller must keep the outputs: reuse of freed memory would be counted wrongly.
    """
    saved = SavedBytes(model)
    with saved_tensors_hooks(saved.note, lambda tensor: tensor):
        yield saved


@contextmanager
def recomputed_blocks(model: nn.Module, is_on: bool) -> Iterator[None]:
    """Enables gradient checkpointing of a model's blocks within, if `is_on`."""
    if not is_on:
        yield
        return
    recompute_blocks(model)
    try:
        yield
    finally:
        for block in find_blocks(model):
            del block.forward


def recompute_blocks(model: nn.Module) -> None:
    """Enables gradient checkpointing for a model's blocks, the modules of its outermost lists.

    Outputs and gradients do not change.

    Raises:
      ParameterError: If the model has no blocks.
    """
    blocks = find_blocks(model)
    if not blocks:
        raise ParameterError(
            f"{PARAMS}: policy.recompute needs a model of repeated blocks, "
            f"{type(model).__name__} has none; set it to false"
        )
    for block in blocks:
        own: Any = block
        own.forward = partial(_run, block, block.forward)


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """Returns the modules of the outermost lists of a model."""
    if isinstance(module, nn.ModuleList):
        return list(module)
    return [block for child in module.children() for block in find_blocks(child)]


def _run(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns the block's output; recomputation uses the inputs and routing of the first pass."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    routed, shares_heads = repeat_current_routing(block), groups_queries()
    # Tensors are positional arguments, so that saved-tensor hooks see a checkpoint's inputs.
    names = list(kwargs)
    given = [
        _CacheSnapshot(e) if isinstance(e, Cache) else e for e in (*args, *map(kwargs.get, names))
    ]
    caches = [each for each in given if isinstance(each, _CacheSnapshot)]
    is_again = False

    def compute(*given: Any) -> Any:
        nonlocal is_again
        values = [each.take() if isinstance(each, _CacheSnapshot) else each for each in given]
        positional, named = values[: len(args)], dict(zip(names, values[len(args) :], strict=True))
        if not is_again:
            is_again = True
            return forward(*positional, **named)
        with routed(), grouped_query_attention(shares_heads):  # the pass has left both by then
            return forward(*positional, **named)

    output = checkpoint(compute, *given, use_reentrant=False, preserve_rng_state=False)
    for each in caches:
        each.release()
    return output


class _CacheSnapshot:
    """A snapshot of a key-value cache before a block writes to it."""

    def __init__(self, cache: Cache) -> None:
        self.live: Any = cache  # None: the block has written to it
        self.found = _copied(cache)

    def take(self) -> Any:
        """Returns the cache itself for the first pass, and a copy of the snapshot later."""
        return _copied(self.found) if self.live is None else self.live

    def release(self) -> None:
        """Drops all layers except those that the block changed, to free their tensors."""
        layers = zip(self.found.layers, self.live.layers, strict=True)
        self.found.layers = [None if old.keys is new.keys else old for old, new in layers]
        self.live = None


def _copied(cache: Any) -> Any:
    """Returns a shallow copy of a cache; it shares the tensors."""
    other = copy.copy(cache)
    other.layers = [copy.copy(layer) for layer in cache.layers]
    return other
