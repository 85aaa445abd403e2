"""Forward passes of a vision-language model: the prompt once per group, then the answers."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from grpo.errors import ArtifactError
from grpo.modalities.shared.decoding import score_bias, select_rows
from grpo.modalities.shared.flops import Coefficients, count_pass
from grpo.modalities.shared.logits import TokenScores, num_recomputed, score_tokens
from grpo.modalities.vision_language.families import find_family, find_positions
from grpo.modalities.vision_language.reading import ImageInputs


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Prompts padded on the left, and the inputs of the vision tower for their images."""

    tokens: Int[Tensor, "prompt width"]
    mask: Bool[Tensor, "prompt width"]
    images: ImageInputs
    single_images: tuple[ImageInputs, ...]  # the inputs of each image alone


class VisionLanguagePasses:
    """Runs the vision tower and the prompt once per group, and the answers on the prompt's cache.

    Raises:
      ArtifactError: If the logits are not those of a linear layer.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        whole: Any = model
        self._core: Any = whole.model
        self._decoder: Any = whole.get_decoder()
        self._words: Any = whole.get_input_embeddings()
        self._family = find_family(whole.config)
        self._image_token: int = whole.config.image_token_id
        head = whole.get_output_embeddings()
        if type(head) is not nn.Linear:
            raise ArtifactError(
                f"{type(model).__name__}: must have a linear output layer, got "
                f"{type(head).__name__}; choose another model"
            )
        self.head = head
        self._vision_flops: dict[tuple[object, ...], int] = {}
        self._text_flops: dict[tuple[bool, bool], Coefficients] = {}

    @property
    def decoder(self) -> nn.Module:
        """The language model without its head."""
        decoder: nn.Module = self._decoder
        return decoder

    def read_prompts(
        self, prompts: Prompts, cache: DynamicCache
    ) -> tuple[Float[Tensor, "prompt hidden"], Int[Tensor, "prompt one"]]:
        """Returns the states after each prompt and the positions of answers; fills the cache.

        The vision tower reads each image once; gradients flow to it through state and cache.
        """
        device = self._words.weight.device
        tokens, mask = prompts.tokens.to(device), prompts.mask.to(device)
        images = {name: each.to(device) for name, each in prompts.images.items()}
        read = self._words(torch.where(self._is_image(tokens, mask), 0, tokens))
        features = self._encode(images).to(read.dtype)
        read = read.masked_scatter(self._is_image(tokens, mask)[:, :, None], features)
        positions, start = find_positions(self._core, self._family, tokens, mask, images)
        hidden = self._run(read, self._prompt_bias(mask, read.dtype), positions, cache)
        return hidden[:, -1], start

    def read_answers(
        self,
        tokens: Int[Tensor, "rollout new"],
        seen: Bool[Tensor, "rollout seen"],
        start: Int[Tensor, "rollout one"],
        cache: DynamicCache,
    ) -> Float[Tensor, "rollout new hidden"]:
        """Returns the states after some tokens of answers, and extends the cache.

        Args:
          seen: False on padding, for the prompt and all tokens so far.
          start: Positions of the first of these tokens.
        """
        device = self._words.weight.device
        read = self._words(tokens.to(device))
        bias = score_bias(seen, tokens.shape[1], read.dtype).to(device)
        positions = start.to(device) + torch.arange(tokens.shape[1], device=device)
        if hasattr(self._core, "get_rope_index"):
            positions = positions.expand(3, *positions.shape)
        return self._run(read, bias, positions, cache)

    def log_prob(
        self,
        prompts: Prompts,
        row: Int[Tensor, " rollout"],
        tokens: Int[Tensor, "rollout step"],
        mask: Bool[Tensor, "rollout step"],
        needed: Bool[Tensor, "rollout step"],
        *,
        temperature: float,
        with_entropy: bool,
    ) -> TokenScores:
        """Returns log-probs in nats of the needed steps, 0 elsewhere, and entropies likewise.

        Args:
          row: Each rollout's prompt.
        """
        cache = DynamicCache(config=self._decoder.config)
        state, start = self.read_prompts(prompts, cache)
        rows = row.to(state.device)
        hidden = state.index_select(0, rows)[:, None]
        if tokens.shape[1] > 1:
            # One rollout per prompt, in order: the cache already has these rows.
            if not torch.equal(row, torch.arange(len(prompts.tokens))):
                select_rows(cache, rows)
            seen = torch.cat([prompts.mask[row], mask[:, :-1]], dim=1)
            rest = self.read_answers(tokens[:, :-1], seen, start.index_select(0, rows), cache)
            hidden = torch.cat([hidden, rest], dim=1)
        needed, tokens = needed.to(hidden.device), tokens.to(hidden.device)
        return score_tokens(
            hidden, self.head, tokens, needed, temperature, with_entropy=with_entropy
        )

    def prompt_flops(self, prompts: Prompts, *, backward: bool) -> int:
        """Returns the FLOPs of `read_prompts`, with the backward pass if wanted."""
        rows, width = prompts.tokens.shape
        of_images = sum(self._count_image(each, backward) for each in prompts.single_images)
        needs_input = bool(self._vision_weights) or self._words.weight.requires_grad
        count = self._coefficients(backward=backward, needs_input=needs_input)
        return of_images + count(rows=rows, query=width, context=width, logits=0)

    def answer_flops(self, rows: int, new: int, seen: int, *, backward: bool) -> int:
        """Returns the FLOPs of `read_answers`."""
        needs_input = self._words.weight.requires_grad
        count = self._coefficients(backward=backward, needs_input=needs_input)
        return count(rows=rows, query=new, context=seen, logits=0)

    def head_flops(self, positions: int, *, backward: bool) -> int:
        """Returns the FLOPs of the logits of some positions, recomputation included."""
        one = 2 * self.head.weight.numel()
        if not backward:
            return one * positions
        passes = 2 + self.head.weight.requires_grad
        return one * (passes * positions + num_recomputed(positions, len(self.head.weight)))

    def _is_image(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return (tokens == self._image_token) & mask

    def _encode(self, images: ImageInputs) -> Float[Tensor, "feature hidden"]:
        """Returns the projected features of images, in order."""
        found = self._core.get_image_features(**images, return_dict=True).pooler_output
        features: Tensor = found.flatten(0, 1) if isinstance(found, Tensor) else torch.cat([*found])
        return features

    def _run(
        self, read: Tensor, bias: Tensor, positions: Tensor, cache: DynamicCache | None
    ) -> Float[Tensor, "row new hidden"]:
        output = self._decoder(
            inputs_embeds=read,
            attention_mask=bias,
            position_ids=positions,
            past_key_values=cache,
            use_cache=cache is not None,
        )
        hidden: Tensor = output.last_hidden_state
        return hidden

    def _prompt_bias(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the additive attention bias of prompts.

        PaliGemma's prompts are a prefix in which all tokens see each other; answers are causal.
        """
        width = mask.shape[1]
        if not self._family.sees_whole_prompt:
            return score_bias(mask, width, dtype)
        return score_bias(mask, 1, dtype).expand(-1, -1, width, -1)

    @cached_property
    def _vision_weights(self) -> list[nn.Parameter]:
        of_text = {id(each) for each in self._decoder.parameters()}
        return [
            each
            for each in self._core.parameters()
            if each.requires_grad and id(each) not in of_text
        ]

    def _count_image(self, inputs: ImageInputs, backward: bool) -> int:
        """Returns the FLOPs of one image, which depend on its shape only."""
        grid = inputs.get("image_grid_thw")
        cells = None if grid is None else tuple(grid.flatten().tolist())
        key = (backward, cells, *(tuple(each.shape) for each in inputs.values()))
        if key not in self._vision_flops:
            device = self._words.weight.device
            held = {name: each.to(device) for name, each in inputs.items()}
            weights: list[Tensor] = [*self._vision_weights] if backward else []
            self._vision_flops[key] = count_pass(
                lambda: self._encode(held), weights, backward and bool(weights)
            )
        return self._vision_flops[key]

    def _coefficients(self, *, backward: bool, needs_input: bool) -> Coefficients:
        """Returns the FLOPs of the language model's layers, from counts of two small passes.

        Args:
          needs_input: Whether the backward pass computes the gradient of the embeddings.
        """
        key = (backward, needs_input)
        if key not in self._text_flops:
            two, four = (self._count(width, *key) for width in (2, 4))
            attention = (four - 2 * two) // 8
            body = two // 2 - 2 * attention
            self._text_flops[key] = Coefficients(body=body, attention=attention, head=0)
        return self._text_flops[key]

    def _count(self, width: int, backward: bool, needs_input: bool) -> int:
        """Returns torch's count for one row of embeddings."""
        weight = self._words.weight
        read = weight.new_zeros(1, width, weight.shape[1]).requires_grad_(backward and needs_input)
        seen = torch.ones(1, width, dtype=torch.bool, device=weight.device)
        positions = torch.arange(width, device=weight.device)[None]
        weights = [each for each in self._decoder.parameters() if each is not weight]
        return count_pass(
            lambda: self._run(read.clone(), score_bias(seen, width, read.dtype), positions, None),
            [read, *weights],
            backward,
        )
