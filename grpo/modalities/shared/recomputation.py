"""Activation memory: what a backward pass keeps, and blocks that compute it again instead."""

import copy
import os
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
from grpo.modalities.tokens.forward import FORCE_GQA, grouped_query_attention
from grpo.modalities.tokens.routing import repeat_current_routing
from grpo.schema import PARAMS


class SavedBytes:
    """What autograd has saved so far, each tensor's memory counted once, parameters not."""

    def __init__(self, model: nn.Module) -> None:
        held = [*model.parameters(), *model.buffers()]
        self._known = {each.untyped_storage().data_ptr() for each in held}
        self.total = 0

    def note(self, tensor: Tensor) -> Tensor:
        """Counts a tensor's memory, and returns it without its graph.

        An operation that saves its own output would else hold itself forever.
        """
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:
            self._known.add(storage.data_ptr())
            self.total += storage.nbytes()
        return tensor.detach()


@contextmanager
def saved_bytes(model: nn.Module) -> Iterator[SavedBytes]:
    """Yields what the block's forward passes save for their backward passes.

    The block must keep their outputs: memory that is given back may be counted again.
    """
    saved = SavedBytes(model)
    with saved_tensors_hooks(saved.note, lambda tensor: tensor):
        yield saved


def recompute_blocks(model: nn.Module) -> None:
    """Makes a model's blocks compute their activations again where gradients are on.

    Blocks are the modules of its outermost lists. Outputs and gradients stay what they are.

    Raises:
      ParameterError: If it has no blocks.
    """
    blocks = _find_blocks(model)
    if not blocks:
        raise ParameterError(
            f"{PARAMS}: policy.recompute needs a model of repeated blocks, "
            f"{type(model).__name__} has none; set it to false"
        )
    for block in blocks:
        own: Any = block
        own.forward = partial(_run, block, block.forward)


def _find_blocks(module: nn.Module) -> list[nn.Module]:
    if isinstance(module, nn.ModuleList):
        return list(module)
    return [block for child in module.children() for block in _find_blocks(child)]


def _run(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns the block's output; the second time a pass computes it, from what was then."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    routed, shares_heads = repeat_current_routing(block), FORCE_GQA in os.environ
    # Tensors by position: hooks then see, and count, what is saved of a checkpoint's inputs.
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
    """A cache of keys and values as a block finds it: the block writes into it."""

    def __init__(self, cache: Cache) -> None:
        self.live: Any = cache  # None: the block has written
        self.found = _copied(cache)

    def take(self) -> Any:
        """Returns the cache for the first pass, and copies of what it was for others."""
        return _copied(self.found) if self.live is None else self.live

    def release(self) -> None:
        """Forgets all but what the block has read: tensors need not live as long as this."""
        layers = zip(self.found.layers, self.live.layers, strict=True)
        self.found.layers = [None if old.keys is new.keys else old for old, new in layers]
        self.live = None


def _copied(cache: Any) -> Any:
    """Returns a cache that can be written into; the tensors are the same."""
    other = copy.copy(cache)
    other.layers = [copy.copy(layer) for layer in cache.layers]
    return other
