"""Forward passes of an encoder-decoder model: logits for sampling, log-probs for training."""

from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from grpo.modalities.shared.flops import count_pass
from grpo.modalities.shared.logits import TokenScores, num_recomputed, score_logits, score_tokens

Encoded = Float[Tensor, "row width hidden"]


class Counts(NamedTuple):
    """FLOPs of the parts of a model, per position or pair of positions."""

    source: int  # encoder, per position
    source_pairs: int  # encoder attention, per pair
    target: int  # decoder, per new position
    target_pairs: int  # decoder self-attention, per new position and position that it sees
    cross_pairs: int  # cross-attention, per new position and source position
    cross: int  # keys and values of the cross-attention, per source position
    head: int  # logits, per position

    def encode(self, rows: int, width: int) -> int:
        """Returns the FLOPs of the encoder for some rows."""
        return rows * (self.source * width + self.source_pairs * width**2)

    def decode(
        self, rows: int, new: int, *, seen: int, width: int, logits: int, reads_source: bool
    ) -> int:
        """Returns the FLOPs of the decoder for some rows.

        Args:
          new: New positions per row; `seen` counts all that the last of them sees.
          width: Source positions per row.
          logits: Positions per row whose logits are computed.
          reads_source: Whether the cross-attention's keys and values are not cached yet.
        """
        pairs = self.target_pairs * seen + self.cross_pairs * width
        of_source = self.cross * width if reads_source else 0
        return rows * (new * (self.target + pairs) + of_source + self.head * logits)


class EncoderDecoderPasses:
    """Runs the encoder once per prompt, and the decoder for the rollouts of each."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        wrapped = hasattr(model, "get_base_model")  # peft changes the inner layers in place
        self.inner: Any = model.get_base_model() if wrapped else model
        self._head = self._find_head()

    def encode(
        self, prompt: Int[Tensor, "prompt width"], mask: Bool[Tensor, "prompt width"]
    ) -> Encoded:
        """Returns the encoder's states of prompts that are padded on the right."""
        device = self._device
        output = self.inner.get_encoder()(
            input_ids=prompt.to(device), attention_mask=mask.long().to(device)
        )
        states: Tensor = output[0]
        return states

    def empty_cache(self) -> EncoderDecoderCache:
        """Returns an empty cache of self-attention and cross-attention."""
        config = self.inner.config.get_text_config(decoder=True)
        return EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))

    @torch.inference_mode()
    def next_logits(
        self,
        encoded: Encoded,
        mask: Bool[Tensor, "row width"],
        tokens: Int[Tensor, "row new"],
        cache: EncoderDecoderCache,
    ) -> Float[Tensor, "row token"]:
        """Returns the logits after the last token and extends the cache."""
        output = self._decode(encoded, mask, tokens, past_key_values=cache, use_cache=True)
        logits: Tensor = output.logits[:, -1].float()
        return logits

    def log_prob(
        self,
        encoded: Encoded,
        mask: Bool[Tensor, "row width"],
        read: Int[Tensor, "row read"],
        chosen: Int[Tensor, "row step"],
        needed: Bool[Tensor, "row step"],
        *,
        temperature: float,
        with_entropy: bool,
    ) -> TokenScores:
        """Returns log-probs in nats of the needed steps, 0 elsewhere, and entropies likewise.

        Args:
          read: What the decoder reads: the forced prefix and all tokens but the last one.
        """
        steps, device = chosen.shape[1], self._device
        needed, chosen = needed.to(device), chosen.to(device)
        if self._head is not None:
            hidden = self._hidden(encoded, mask, read)[:, -steps:]
            return score_tokens(
                hidden, self._head, chosen, needed, temperature, with_entropy=with_entropy
            )
        logits = self._decode(encoded, mask, read, use_cache=False).logits[:, -steps:]
        return score_logits(logits, chosen, needed, temperature, with_entropy=with_entropy)

    def logits_of_training(self, num_needed: int) -> tuple[int, int]:
        """Returns the numbers of logit positions with a backward pass, and recomputed ones."""
        if self._head is None:
            return num_needed, 0
        return num_needed, num_recomputed(num_needed, len(self._head.weight))

    @cached_property
    def forward_counts(self) -> Counts:
        """FLOPs of forward passes."""
        return self._count(backward=False)

    @cached_property
    def training_counts(self) -> Counts:
        """FLOPs of forward and backward passes."""
        return self._count(backward=True)

    @property
    def _device(self) -> torch.device:
        device: torch.device = self.inner.get_input_embeddings().weight.device
        return device

    def _decode(self, encoded: Encoded, mask: Tensor, tokens: Tensor, **settings: Any) -> Any:
        return self.inner(
            encoder_outputs=BaseModelOutput(last_hidden_state=encoded),
            attention_mask=mask.long().to(self._device),
            decoder_input_ids=tokens.to(self._device),
            **settings,
        )

    def _hidden(
        self, encoded: Encoded, mask: Tensor, tokens: Tensor
    ) -> Float[Tensor, "row step hidden"]:
        output = self.inner.get_decoder()(
            input_ids=tokens.to(self._device),
            encoder_hidden_states=encoded,
            encoder_attention_mask=mask.long().to(self._device),
            use_cache=False,
        )
        hidden: Tensor = output[0]
        return hidden

    @torch.no_grad()
    def _find_head(self) -> nn.Linear | None:
        """Returns the output layer; None if logits are more than its product (T5, Marian)."""
        head = self.inner.get_output_embeddings()
        if type(head) is not nn.Linear:
            return None
        tokens = torch.arange(1, 4)[None] % len(head.weight)
        mask = torch.ones_like(tokens, dtype=torch.bool)
        encoded = self.encode(tokens, mask)
        logits = self._decode(encoded, mask, tokens, use_cache=False).logits
        return head if torch.equal(head(self._hidden(encoded, mask, tokens)), logits) else None

    def _count(self, *, backward: bool) -> Counts:
        """Solves for the counts from torch's counts of small passes."""
        two, four = (self._count_encoder(width, backward) for width in (2, 4))
        source_pairs = (four - 2 * two) // 8
        one_two, two_two, four_two = (self._count_decoder(new, 2, backward) for new in (1, 2, 4))
        one_four, two_four = (self._count_decoder(new, 4, backward) for new in (1, 2))
        target_pairs = (four_two - two_two - 2 * (two_two - one_two)) // 6
        # A source position more, for one new position and for two.
        for_one, for_two = (one_four - one_two) // 2, (two_four - two_two) // 2
        cross_pairs = for_two - for_one
        whole = self._count_head(backward)
        return Counts(
            source=two // 2 - 2 * source_pairs,
            source_pairs=source_pairs,
            target=two_two - one_two - 3 * target_pairs - 2 * cross_pairs - whole,
            target_pairs=target_pairs,
            cross_pairs=cross_pairs,
            cross=for_one - cross_pairs,
            head=whole,
        )

    def _count_encoder(self, width: int, backward: bool) -> int:
        tokens = torch.ones(1, width, dtype=torch.long)

        def run() -> Tensor:
            return self.encode(tokens, torch.ones_like(tokens, dtype=torch.bool))

        return count_pass(run, list(self.inner.get_encoder().parameters()), backward)

    def _count_decoder(self, new: int, width: int, backward: bool) -> int:
        """Returns the count of decoder and head, whose gradient reaches the encoder's states."""
        tokens = torch.ones(1, new, dtype=torch.long)
        mask = torch.ones(1, width, dtype=torch.bool)
        with torch.no_grad():
            encoded = self.encode(mask.long(), mask)
        encoded.requires_grad_(backward)

        def run() -> Tensor:  # torch's counter accepts no leaf as the input of a module
            logits: Tensor = self._decode(encoded.clone(), mask, tokens, use_cache=False).logits
            return logits

        return count_pass(run, [encoded, *self._decoder_parameters()], backward)

    def _count_head(self, backward: bool) -> int:
        head = self.inner.get_output_embeddings()
        hidden = head.weight.new_zeros(1, head.weight.shape[1]).requires_grad_(backward)
        return count_pass(lambda: head(hidden.clone()), [hidden, *head.parameters()], backward)

    def _decoder_parameters(self) -> list[nn.Parameter]:
        encoder = {id(each) for each in self.inner.get_encoder().parameters()}
        shared = id(self.inner.get_input_embeddings().weight)
        return [p for p in self.inner.parameters() if id(p) == shared or id(p) not in encoder]
