"""Policies whose step is a token of an answer about an image: vision-language models."""

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor, nn
from transformers import AutoModelForImageTextToText, PreTrainedModel

from grpo.errors import ParameterError
from grpo.modalities.modality import RunParams
from grpo.modalities.shared.decoding import column_major_weights, sampling_cache
from grpo.modalities.shared.directories import load_base
from grpo.modalities.shared.packed import Layout, Rows, require_entries
from grpo.modalities.shared.restoring import restore_round
from grpo.modalities.shared.text_modality import Decoding
from grpo.modalities.shared.text_policy import TextPolicy, pad_rows, unpack_texts
from grpo.modalities.shared.texts import draw_texts, end_tokens, num_positions
from grpo.modalities.vision_language.forward import Prompts, VisionLanguagePasses
from grpo.modalities.vision_language.modality import VisionLanguagePolicyParams
from grpo.modalities.vision_language.reading import (
    PromptReader,
    load_image_processor,
    require_image_template,
)
from grpo.runtime.machine import DTYPES
from grpo.schema import PARAMS
from grpo.types import Cost, StepLogProbs

LAYOUT = {
    "prompt_lengths": Rows("prompt", each="integer"),
    "prompt_tokens": Rows("prompt", "prompt_lengths", each="integer"),
    "image_lengths": Rows("prompt", each="integer"),
    "image_bytes": Rows("prompt", "image_lengths", each="integer"),
    "steps": Rows("rollout", each="integer"),
    "tokens": Rows("rollout", "steps", each="integer"),
    "behavior_logp": Rows("rollout", "steps", each="real"),
}


@dataclass(frozen=True, kw_only=True)
class VisionLanguageTrajectory:
    """Prompts padded on the left with their images, sampled tokens padded on the right."""

    group: Int[Tensor, " rollout"]  # row of `prompt`
    prompt: Int[Tensor, "prompt width"]  # with one image token per feature of the image
    prompt_mask: Bool[Tensor, "prompt width"]
    images: tuple[bytes, ...]  # encoded, as PNG, one per prompt
    tokens: Int[Tensor, "rollout step"]
    mask: Bool[Tensor, "rollout step"]

    noise = None  # the steps are not Gaussian
    variant = None  # no prompt variants
    chunks = None  # the steps are not action chunks

    def select(self, rows: Int[Tensor, " kept"], num_steps: int) -> "VisionLanguageTrajectory":
        """Returns some rollouts, truncated to `num_steps` steps, without common padding."""
        group = self.group[rows]
        blank = int((~self.prompt_mask[group]).sum(dim=1).min())
        return VisionLanguageTrajectory(
            group=group,
            prompt=self.prompt[:, blank:],
            prompt_mask=self.prompt_mask[:, blank:],
            images=self.images,
            tokens=self.tokens[rows, :num_steps],
            mask=self.mask[rows, :num_steps],
        )

    def pack(self, logp: Float[Tensor, "rollout step"]) -> dict[str, Tensor]:
        """Returns flat ragged tensors that can be concatenated."""
        return {
            "prompt_tokens": self.prompt[self.prompt_mask].int(),
            "prompt_lengths": self.prompt_mask.sum(dim=1),
            "image_bytes": torch.frombuffer(bytearray(b"".join(self.images)), dtype=torch.uint8),
            "image_lengths": torch.tensor([len(each) for each in self.images]),
            "tokens": self.tokens[self.mask].int(),
            "steps": self.mask.sum(dim=1),
            "behavior_logp": logp[self.mask],
        }


class VisionLanguagePolicy(TextPolicy[VisionLanguageTrajectory]):
    """A vision-language model with its tokenizer, image processor and sampling settings."""

    def __init__(self, model: PreTrainedModel, reader: PromptReader, *, decoding: Decoding) -> None:
        self._model = model
        self.reader = reader
        self.tokenizer = reader.tokenizer
        self.decoding = decoding
        self.cost = Cost()
        self.passes = VisionLanguagePasses(model)
        self.end_tokens = end_tokens(model, reader.tokenizer)

    @property
    def model(self) -> PreTrainedModel:
        """The vision-language model, with its adapters if any."""
        return self._model

    @property
    def layout(self) -> Layout:
        """The layout of stored rollouts."""
        return LAYOUT

    def encode(
        self, prompts: list[str]
    ) -> tuple[Int[Tensor, "prompt width"], Tensor, tuple[bytes, ...]]:
        """Returns tokens padded on the left, their mask and the images."""
        rows, images = zip(*map(self.reader.read_prompt, prompts))
        return *pad_rows(rows, left=True), images

    def restore(
        self, tensors: dict[str, Tensor], row: Int[Tensor, " rollout"]
    ) -> tuple[VisionLanguageTrajectory, Float[Tensor, "rollout step"]]:
        """Returns a stored trajectory and its behavior log-probs.

        Raises:
          ArtifactError: If tokens or images do not fit the model.
        """
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        stored = unpack_texts(tensors, vocabulary, left=True)
        pixels = tensors["image_bytes"].long()
        is_byte = (pixels >= 0) & (pixels < 256)
        require_entries(tensors, "image_bytes", is_byte, "a byte", lengths="image_lengths")
        images = pixels.to(torch.uint8).split(tensors["image_lengths"].tolist())
        trajectory = VisionLanguageTrajectory(
            group=row,
            prompt=stored.prompt,
            prompt_mask=stored.prompt_mask,
            images=tuple(each.numpy().tobytes() for each in images),
            tokens=stored.tokens,
            mask=stored.mask,
        )
        return trajectory, stored.logp

    @torch.no_grad()
    def sample(
        self, prompts: list[str], *, group_sizes: list[int], generator: Generator
    ) -> tuple[VisionLanguageTrajectory, Float[Tensor, "rollout step"]]:
        """Returns rollouts and their log-probs in nats at the decoding temperature.

        The group shares one pass over its image and question.
        """
        prompt, prompt_mask, images = self.encode(prompts)
        self._require_positions(int(prompt_mask.sum(dim=1).max()))
        group = torch.repeat_interleave(torch.arange(len(prompts)), torch.tensor(group_sizes))
        steps = self.decoding.max_steps
        uniform = torch.rand(len(group), steps, dtype=torch.float64, generator=generator)
        asked = self._prompts(prompt, prompt_mask, images)
        flops = self.passes.prompt_flops(asked, backward=False)

        with column_major_weights(self.passes.decoder):
            cache = sampling_cache(self.model.config.get_text_config(), steps)
            state, start = self.passes.read_prompts(asked, cache)
            rows = group.to(state.device)
            logits = self._logits(state)[group]
            flops += self.passes.head_flops(len(prompts), backward=False)
            cache.reorder_cache(group)
            start, seen = start[rows], prompt_mask[group]

            def advance(step: int, chosen: Tensor, going: Tensor | None) -> Tensor:
                nonlocal start, seen, flops
                if going is not None:
                    seen = seen[going]
                    cache.reorder_cache(going)
                    start = start[going.to(state.device)]
                seen = torch.cat([seen, seen.new_ones(len(seen), 1)], dim=1)
                hidden = self.passes.read_answers(chosen[:, None], seen, start + step, cache)
                flops += self.passes.answer_flops(len(chosen), 1, seen.shape[1], backward=False)
                flops += self.passes.head_flops(len(chosen), backward=False)
                return self._logits(hidden[:, 0])

            drawn = draw_texts(
                logits,
                advance,
                uniform=uniform,
                end_tokens=self.end_tokens,
                temperature=self.decoding.temperature,
            )
        self.cost += Cost(flops=flops, sampled_steps=int(drawn.mask.sum()))
        trajectory = VisionLanguageTrajectory(
            group=group,
            prompt=prompt,
            prompt_mask=prompt_mask,
            images=images,
            tokens=drawn.tokens,
            mask=drawn.mask,
        )
        return trajectory, drawn.logp

    def step_log_probs(
        self,
        trajectory: VisionLanguageTrajectory,
        needed: Bool[Tensor, "rollout step"] | None = None,
        *,
        with_entropy: bool = False,
    ) -> StepLogProbs:
        """Returns log-probs in nats at the decoding temperature, 0 on padding.

        The model reads image and question once, and their gradient is that of the whole group.

        Args:
          needed: The steps to compute; the others are 0. None: all steps.

        Raises:
          ValueError: If decoding is greedy and so has no density.
        """
        self.require_density()
        rows, row = torch.unique(trajectory.group, return_inverse=True)
        needed = trajectory.mask if needed is None else trajectory.mask & needed
        asked = self._prompts(
            trajectory.prompt[rows],
            trajectory.prompt_mask[rows],
            tuple(trajectory.images[each] for each in rows.tolist()),
        )
        scores = self.passes.log_prob(
            asked,
            row,
            trajectory.tokens,
            trajectory.mask,
            needed,
            temperature=self.decoding.temperature,
            with_entropy=with_entropy,
        )
        backward = torch.is_grad_enabled()
        self.cost += self._scoring_cost(asked, trajectory, int(needed.sum()), backward=backward)
        return StepLogProbs(logp=scores.logp, entropy=scores.entropy)

    def training_cost(self, trajectory: VisionLanguageTrajectory) -> Cost:
        """Returns the cost of a training pass over rollouts of one prompt each, all steps."""
        asked = self._prompts(trajectory.prompt, trajectory.prompt_mask, trajectory.images)
        steps = int(trajectory.mask.sum())
        cost = self._scoring_cost(asked, trajectory, steps, backward=True)
        return cost + Cost(trained_steps=steps)

    def _prompts(self, tokens: Tensor, mask: Tensor, images: tuple[bytes, ...]) -> Prompts:
        return Prompts(
            tokens=tokens,
            mask=mask,
            images=self.reader.read_images(images),
            single_images=tuple(self.reader.read_images([each]) for each in images),
        )

    def _logits(self, state: Float[Tensor, "row hidden"]) -> Float[Tensor, "row token"]:
        logits: Tensor = self.passes.head(state).float()
        return logits

    def _scoring_cost(
        self,
        asked: Prompts,
        trajectory: VisionLanguageTrajectory,
        num_needed: int,
        *,
        backward: bool,
    ) -> Cost:
        """Returns the FLOPs of a scoring pass, with its backward pass if wanted."""
        rollouts, steps = trajectory.tokens.shape
        seen = asked.tokens.shape[1] + steps - 1
        flops = self.passes.prompt_flops(asked, backward=backward)
        flops += self.passes.answer_flops(rollouts, steps - 1, seen, backward=backward)
        flops += self.passes.head_flops(num_needed, backward=backward)
        return Cost(flops=flops)

    def _require_positions(self, prompt_tokens: int) -> None:
        """Raises ParameterError if the longest rollout of a prompt exceeds the model's context."""
        text, steps = self.model.config.get_text_config(), self.decoding.max_steps
        found = (num_positions(text), getattr(text, "sliding_window", None))
        limit = min((each for each in found if each is not None), default=None)
        if limit is not None and prompt_tokens + steps > limit:
            raise ParameterError(
                f"{PARAMS}: policy.max_steps: a prompt of {prompt_tokens} tokens and {steps} "
                f"steps need {prompt_tokens + steps} positions, the model has {limit} "
                "(max_position_embeddings or sliding_window); lower max_steps, shorten the "
                "questions or take smaller images"
            )


def load_vision_language_policy(
    params: RunParams[VisionLanguagePolicyParams],
    *,
    base: Path,
    directory: Path,
    decoding: Decoding,
) -> VisionLanguagePolicy:
    """Returns the policy of a directory on the machine's device, without dropout.

    Args:
      base: The base policy's directory. A different `directory` holds the trained weights.

    Raises:
      ArtifactError: If a file is missing or broken.
    """
    settings = params.policy
    dtype = DTYPES[params.machine.dtype]
    model, tokenizer = load_base(base, dtype, auto_class=AutoModelForImageTextToText)
    reader = PromptReader(
        tokenizer,
        load_image_processor(base),
        model.config,
        uses_chat_template=settings.prompt_format == "chat",
    )
    if reader.uses_chat_template:
        require_image_template(reader)
    restore_round(params, model, base=base, directory=directory)
    nn.Module.to(model, params.machine.device)
    return VisionLanguagePolicy(model, reader, decoding=decoding)
