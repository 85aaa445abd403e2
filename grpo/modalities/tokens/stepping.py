"""A token per rollout at a time: the same numbers at less expense than by the model's own call."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import Cache


@contextmanager
def laid_by_input(body: nn.Module) -> Iterator[None]:
    """Within, a CPU's matrices lie in memory input by input: products of few rows are faster so."""
    weights = [
        each.weight
        for each in body.modules()
        # Not what ranks share, nor what has bits of its own.
        if type(each) is nn.Linear and type(each.weight) is nn.Parameter and each.weight.is_cpu
    ]
    try:
        for weight in weights:
            weight.data = weight.data.t().contiguous().t()
        yield
    finally:
        for weight in weights:
            weight.data = weight.data.contiguous()


def step_through(
    body: Any, tokens: Tensor, attention: Tensor, positions: Tensor, cache: Cache
) -> Tensor:
    """Returns the hidden states of new tokens by the body's layers, one by one.

    The body's own call also looks at its configuration, records outputs and makes masks, for every
    token anew. `ForwardPasses.can_step` says whether that is all that it does.
    """
    hidden: Tensor = body.embed_tokens(tokens)
    embeddings = body.rotary_emb(hidden, position_ids=positions)
    for layer in body.layers:
        hidden = layer(
            hidden,
            attention_mask=attention,
            position_ids=positions,
            position_embeddings=embeddings,
            past_key_values=cache,
            use_cache=True,
        )
    normed: Tensor = body.norm(hidden)
    return normed
