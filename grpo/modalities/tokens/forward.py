"""Forward passes of a causal LM: logits for sampling, log-probs for training."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer
from transformers.integrations import sdpa_attention

from grpo.modalities.shared.decoding import (
    column_major_weights,
    hide_reserved,
    sampling_cache,
    score_bias,
    select_rows,
)
from grpo.modalities.shared.flops import Pass
from grpo.modalities.shared.logits import TokenScores, num_recomputed, score_logits, score_tokens
from grpo.modalities.shared.texts import PASS_ERRORS
from grpo.modalities.tokens.routing import find_routers
from grpo.runtime.ranks import all_agree

MIN_SAVED_FRACTION = 0.25  # of the positions; below it, a separate pass over prompts costs more
Scored = tuple[TokenScores, list[Pass]]  # scores of steps, and the passes that computed them


def has_full_attention(config: PretrainedConfig) -> bool:
    """Returns whether every layer caches all keys and values, so that rows can share a prefix."""
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)


def has_attention(config: PretrainedConfig) -> bool:
    """Returns whether any layer caches keys and values; state-space models cache states only."""
    layers = DynamicCache(config=config).layers
    return not layers or any(isinstance(layer, CacheLayerMixin) for layer in layers)


def run_layers(
    body: Any, tokens: Tensor, attention: Tensor, positions: Tensor, cache: Cache
) -> Tensor:
    """Returns the hidden states of new tokens by calling the body's layers directly.

    The body's own forward method also checks its configuration, records outputs and builds masks
    for every token. `ForwardPasses.can_run_layers` tests that it computes nothing else.
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


class _AttentionInputs(NamedTuple):
    """Attention mask and position ids of new tokens, in the form that the model takes."""

    attention: Tensor  # over all positions so far: an additive bias, or a mask of integers
    positions: Int[Tensor, "row new"]


class _StepAttention(NamedTuple):
    """Attention masks and position ids for all steps of decoding, built once."""

    attention: Tensor  # of the last step
    start: Int[Tensor, "row one"]  # position ids of the first tokens after the prompts
    width: int  # padded length of the prompts

    def select(self, rows: Int[Tensor, " kept"]) -> "_StepAttention":
        """Returns the inputs of some rows."""
        return _StepAttention(self.attention[rows], self.start[rows], self.width)

    def at(self, step: int) -> _AttentionInputs:
        """Returns the attention inputs of decoding step `step`."""
        seen = self.width + step + 1
        attention = self.attention if self.attention.shape[-1] == 1 else self.attention[..., :seen]
        return _AttentionInputs(attention, self.start + step)


def body_passes(
    *, rollouts: int, prompts: int, width: int, steps: int, may_share: bool
) -> list[Pass]:
    """Returns the passes of the model's body that score a microbatch.

    If reading each prompt only once saves enough, there are two passes, over the prompts and then
    over the rollouts; otherwise one pass covers both.

    Args:
      width: Tokens of the longest prompt.
      steps: Steps of the longest rollout; its last token is not an input.
    """
    seen = width + steps - 1
    saved = (rollouts - prompts) * width
    if may_share and saved >= MIN_SAVED_FRACTION * rollouts * seen:
        return [
            Pass(rows=prompts, query=width, context=width, logits=0),
            Pass(rows=rollouts, query=steps - 1, context=seen, logits=0),
        ]
    return [Pass(rows=rollouts, query=seen, context=seen, logits=0)]


def logits_passes(*, rollouts: int, width: int, steps: int) -> list[Pass]:
    """Returns the pass of a model that computes logits itself, also those of padding."""
    seen = width + steps - 1
    return [Pass(rows=rollouts, query=seen, context=seen, logits=steps)]


def head_passes(num_positions: int, vocabulary: int, *, is_training: bool) -> list[Pass]:
    """Returns the passes of the head over scored positions, including recomputation."""
    passes = [Pass(rows=1, query=0, context=0, logits=num_positions)]
    if is_training:
        again = num_recomputed(num_positions, vocabulary)
        passes.append(Pass(rows=1, query=0, context=0, logits=again, is_training=False))
    return passes


class ForwardPasses:
    """Runs a model's body and head separately, so that only needed positions reach the head."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        wrapped = hasattr(model, "get_base_model")  # peft changes the inner layers in place
        self._causal: Any = model.get_base_model() if wrapped else model
        self._body: Any = self._causal.get_decoder()  # or its compiled form
        taken = inspect.signature(self._causal.forward).parameters
        self._cache_argument = "cache_params" if "cache_params" in taken else "past_key_values"
        self._words: Any = self._causal.get_input_embeddings()
        is_full = has_full_attention(self._causal.config)
        self._has_attention = has_attention(self._causal.config)
        is_sdpa = self._causal.config._attn_implementation == "sdpa"
        self._takes_score_bias = is_full and is_sdpa and self._accepts_score_bias()
        # Routers decide near ties by the last bits, so all passes of an MoE must be of one kind.
        self.can_share = is_full and not find_routers(model)
        self._head = self._find_head()

    def compile(self, backend: str | Callable[..., Any]) -> None:
        """Compiles the model's body for scoring and training; compilation happens on first use.

        Does not compile sampling or a model whose head is more than a matrix product.

        Args:
          backend: The backend of torch.compile.
        """
        body = self._causal.get_decoder()
        self._body = torch.compile(body, backend=backend, dynamic=True)

    def attention_ahead(
        self, prompt_mask: Bool[Tensor, "row width"], num_steps: int
    ) -> _StepAttention:
        """Returns the attention inputs of up to `num_steps` decoding steps."""
        rows, width = prompt_mask.shape
        mask = torch.cat([prompt_mask, prompt_mask.new_ones(rows, num_steps)], dim=1)
        last = self._attention_inputs(mask, 1)
        return _StepAttention(last.attention, last.positions - (num_steps - 1), width)

    def make_cache(self, num_steps: int) -> DynamicCache:
        """Returns an empty cache for sampling."""
        config = self._causal.config
        return sampling_cache(config, num_steps, shows_reserved=self._takes_score_bias)

    def prompt_logits(
        self,
        tokens: Int[Tensor, "prompt width"],
        mask: Bool[Tensor, "prompt width"],
        cache: DynamicCache,
    ) -> Float[Tensor, "prompt token"]:
        """Returns the logits after each prompt and fills the cache."""
        return self.next_logits(tokens, self._attention_inputs(mask, tokens.shape[1]), cache)

    def next_logits(
        self,
        tokens: Int[Tensor, "row new"],
        attention_inputs: _AttentionInputs,
        cache: DynamicCache,
    ) -> Float[Tensor, "row token"]:
        """Returns the logits after the last token and extends the cache."""
        with torch.inference_mode():
            attention = hide_reserved(attention_inputs.attention, cache)
            attention_inputs = attention_inputs._replace(attention=attention)
            if self._head is None:
                output = self._run(
                    self.model, tokens, attention_inputs, cache=cache, logits_to_keep=1
                )
                logits = output.logits[:, -1]
            else:  # body and head separately, which skips the overhead of the model's forward
                by_layer = self.can_run_layers and tokens.shape[1] == 1
                hidden = self._next_hidden(tokens, attention_inputs, cache, by_layer=by_layer)
                logits = self._head(hidden[:, -1])
            result: Tensor = logits.float()
        return result

    def _next_hidden(
        self,
        tokens: Int[Tensor, "row new"],
        attention_inputs: _AttentionInputs,
        cache: DynamicCache,
        *,
        by_layer: bool,
    ) -> Float[Tensor, "row new hidden"]:
        """Returns hidden states and extends the cache.

        Args:
          by_layer: Whether to call the layers directly.
        """
        body = self._causal.get_decoder()
        if by_layer:
            tokens = tokens.to(self._words.weight.device)
            return run_layers(
                body, tokens, attention_inputs.attention, attention_inputs.positions, cache
            )
        hidden: Tensor = self._run(body, tokens, attention_inputs, cache=cache)[0]
        return hidden

    def sampling(self) -> AbstractContextManager[None]:
        """Returns the context manager for token-by-token sampling."""
        _ = self.can_run_layers  # probed here, so that its passes stay outside of the context
        # Not with routers, whose decisions depend on the last bits of products.
        return column_major_weights(self._causal.get_decoder()) if self.can_share else nullcontext()

    def log_prob(
        self,
        prompt: Int[Tensor, "prompt width"],
        prompt_mask: Bool[Tensor, "prompt width"],
        group: Int[Tensor, " rollout"],
        tokens: Int[Tensor, "rollout step"],
        mask: Bool[Tensor, "rollout step"],
        *,
        needed: Bool[Tensor, "rollout step"],
        temperature: float,
        may_share: bool,
        with_entropy: bool,
    ) -> Scored:
        """Returns log-probs in nats of the needed steps, and entropies `with_entropy`.

        The rollouts of a prompt share one pass over it where that saves enough.

        Args:
          may_share: False: one pass per rollout over prompt and steps.
        """
        rows, row = torch.unique(group, return_inverse=True)
        prompt, prompt_mask = prompt[rows], prompt_mask[rows]
        (num_prompts, width), (count, steps) = prompt.shape, tokens.shape
        if self._head is None:
            return self._log_prob_of_logits(
                prompt[row], prompt_mask[row], tokens, mask, needed, temperature, with_entropy
            )
        plan = partial(body_passes, rollouts=count, prompts=num_prompts, width=width, steps=steps)
        passes = plan(may_share=may_share and self.can_share)
        # All ranks must run the same passes: two only if that saves enough on every rank.
        if not all_agree(len(passes) == 2 and steps > 1) and steps > 1:
            passes = plan(may_share=False)
        if len(passes) == 2:
            hidden = self._shared_hidden(prompt, prompt_mask, row, tokens, mask)
        else:
            inputs, attention = _join(prompt[row], prompt_mask[row], tokens, mask)
            attention_inputs = self._attention_inputs(attention, inputs.shape[1])
            output = self._run(self._body, inputs, attention_inputs, cache=None)
            hidden = output.last_hidden_state[:, width - 1 :]
        scores = score_tokens(
            hidden,
            self._head,
            tokens.to(hidden.device),
            needed.to(hidden.device),
            temperature,
            with_entropy=with_entropy,
        )
        is_training, vocabulary = torch.is_grad_enabled(), len(self._head.weight)
        of_head = head_passes(int(needed.sum()), vocabulary, is_training=is_training)
        return scores, passes + of_head

    @torch.no_grad()
    def _accepts_score_bias(self) -> bool:
        """Returns whether the body accepts an additive attention bias instead of a mask.

        A body with ALiBi does not: it computes positions from a mask with two axes.
        """
        tokens = torch.arange(1, 4)[None] % len(self._words.weight)
        mask = torch.tensor([[False, True, True]])
        found: list[Tensor] = []
        for self._takes_score_bias in (False, True):
            attention_inputs = self._attention_inputs(mask, tokens.shape[1])
            try:
                output = self._run(self._causal.get_decoder(), tokens, attention_inputs, cache=None)
            except PASS_ERRORS:
                return False
            found.append(output[0][mask.to(output[0].device)])
        by_mask, by_bias = found
        # Not bitwise equal: torch may choose another kernel.
        return float((by_bias - by_mask).abs().max()) <= 0.05 * float(by_mask.abs().max())

    @property
    def has_plain_head(self) -> bool:
        """Whether logits are a product with the output layer; else the model computes them."""
        return self._head is not None

    @torch.no_grad()
    def _find_head(self) -> nn.Linear | None:
        """Returns the output layer; None if the model post-processes its logits (caps, scales)."""
        head, body = self._causal.get_output_embeddings(), self._causal.get_decoder()
        if type(head) is not nn.Linear or body is self._causal:
            return None
        tokens = torch.arange(1, 4)[None] % len(head.weight)
        attention_inputs = self._attention_inputs(
            torch.ones_like(tokens, dtype=torch.bool), tokens.shape[1]
        )
        hidden = self._run(body, tokens, attention_inputs, cache=None).last_hidden_state
        logits = self._run(self._causal, tokens, attention_inputs, cache=None).logits
        return head if torch.equal(head(hidden), logits) else None

    @cached_property
    @torch.inference_mode()
    def can_run_layers(self) -> bool:
        """Whether `run_layers` gives bitwise the output of the body's own forward method."""
        if not self._takes_score_bias or self._head is None:
            return False
        tokens = torch.arange(1, 5)[None] % len(self._words.weight)
        read = torch.ones_like(tokens, dtype=torch.bool)
        found = []
        for by_layer in (False, True):
            cache = DynamicCache(config=self._causal.config)
            self._next_hidden(
                tokens[:, :-1], self._attention_inputs(read[:, :-1], 3), cache, by_layer=False
            )
            attention_inputs = self._attention_inputs(read, 1)
            try:
                found.append(
                    self._next_hidden(tokens[:, -1:], attention_inputs, cache, by_layer=by_layer)
                )
            except (AttributeError, TypeError):  # other submodules or signatures
                return False
        return torch.equal(*found)

    def _shared_hidden(
        self,
        prompt: Int[Tensor, "prompt width"],
        prompt_mask: Bool[Tensor, "prompt width"],
        row: Int[Tensor, " rollout"],
        tokens: Int[Tensor, "rollout step"],
        mask: Bool[Tensor, "rollout step"],
    ) -> Float[Tensor, "rollout step hidden"]:
        """Returns the hidden states that predict each step; gradients flow to the shared prompt."""
        cache = DynamicCache(config=self._causal.config)
        attention_inputs = self._attention_inputs(prompt_mask, prompt.shape[1])
        read = self._run(self._body, prompt, attention_inputs, cache=cache)
        row = row.to(self.model.device)
        first: Tensor = read.last_hidden_state[:, -1:].index_select(0, row)
        if tokens.shape[1] == 1:
            return first
        select_rows(cache, row)
        attention = torch.cat([prompt_mask[row.cpu()], mask[:, :-1]], dim=1)
        attention_inputs = self._attention_inputs(attention, tokens.shape[1] - 1)
        rest = self._run(self._body, tokens[:, :-1], attention_inputs, cache=cache)
        return torch.cat([first, rest.last_hidden_state], dim=1)

    def _log_prob_of_logits(
        self,
        prompt: Int[Tensor, "rollout width"],
        prompt_mask: Bool[Tensor, "rollout width"],
        tokens: Int[Tensor, "rollout step"],
        mask: Bool[Tensor, "rollout step"],
        needed: Bool[Tensor, "rollout step"],
        temperature: float,
        with_entropy: bool,
    ) -> Scored:
        """Returns log-probs from the model's own logits, for models that post-process them."""
        inputs, attention = _join(prompt, prompt_mask, tokens, mask)
        count, (rows, width) = tokens.shape[1], inputs.shape
        attention_inputs = self._attention_inputs(attention, width)
        logits = self._run(
            self.model, inputs, attention_inputs, cache=None, logits_to_keep=count
        ).logits
        scores = score_logits(
            logits,
            tokens.to(logits.device),
            needed.to(logits.device),
            temperature,
            with_entropy=with_entropy,
        )
        return scores, logits_passes(rollouts=rows, width=prompt.shape[1], steps=count)

    def _attention_inputs(self, mask: Bool[Tensor, "row seen"], new: int) -> _AttentionInputs:
        """Returns the attention inputs of the last `new` tokens on the model's device."""
        positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0)[:, -new:]
        # For a mask without padding, transformers uses the causal kernel at half the products.
        if self._takes_score_bias and not (new == mask.shape[1] and mask.all()):
            attention = score_bias(mask, new, self._words.weight.dtype)
        else:  # without attention, the mask covers the new tokens only
            attention = (mask if self._has_attention else mask[:, -new:]).long()
        device = self._words.weight.device
        return _AttentionInputs(attention.to(device), positions.to(device))

    def _run(
        self,
        module: Any,
        tokens: Int[Tensor, "row new"],
        attention_inputs: _AttentionInputs,
        *,
        cache: DynamicCache | None,
        **settings: int,
    ) -> Any:
        """Returns the output of the model or its body for new tokens."""
        device = self._words.weight.device
        with grouped_query_attention(device.type == "cpu" and tokens.shape[1] > 1):
            return module(
                input_ids=tokens.to(device),
                attention_mask=attention_inputs.attention,
                position_ids=attention_inputs.positions,
                use_cache=cache is not None,
                **{self._cache_argument: cache},
                **settings,
            )


@contextmanager
def grouped_query_attention(is_on: bool) -> Iterator[None]:
    """Makes transformers use grouped-query attention within instead of copying keys and values.

    By default, transformers copies them per head whenever there is a mask, because GPU kernels do
    not support both.
    """
    global _groups_always
    before, _groups_always = _groups_always, is_on or _groups_always
    try:
        yield
    finally:
        _groups_always = before


def groups_queries() -> bool:
    """Returns whether the code runs within `grouped_query_attention`."""
    return _groups_always


def _use_gqa(mask: Tensor | None, key: Tensor, value: Tensor) -> bool:
    return _groups_always or bool(_USE_GQA(mask, key, value))


# Not by transformers' environment variable: threads start workers while the policy is updated, and
# these would inherit it.
_groups_always = False
_USE_GQA = sdpa_attention.use_gqa_in_sdpa
sdpa_attention.use_gqa_in_sdpa = _use_gqa


def _join(
    prompt: Int[Tensor, "rollout width"],
    prompt_mask: Bool[Tensor, "rollout width"],
    tokens: Int[Tensor, "rollout step"],
    mask: Bool[Tensor, "rollout step"],
) -> tuple[Int[Tensor, "rollout seen"], Bool[Tensor, "rollout seen"]]:
    """Returns the input tokens and their mask, without the last token, which predicts nothing."""
    return (
        torch.cat([prompt, tokens[:, :-1]], dim=1),
        torch.cat([prompt_mask, mask[:, :-1]], dim=1),
    )
