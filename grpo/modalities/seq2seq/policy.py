"""Policies whose step is a target token: encoder-decoder models of `transformers`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor, nn
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel, PreTrainedTokenizerBase

from grpo.errors import ArtifactError, ParameterError, brief
from grpo.modalities.modality import RunParams
from grpo.modalities.seq2seq.forward import EncoderDecoderPasses
from grpo.modalities.seq2seq.modality import BeamSearch, Seq2SeqPolicyParams
from grpo.modalities.shared.directories import load_base
from grpo.modalities.shared.packed import Layout, Rows
from grpo.modalities.shared.restoring import restore_round
from grpo.modalities.shared.text_modality import Decoding
from grpo.modalities.shared.text_policy import TextPolicy, pad_rows, unpack_texts
from grpo.modalities.shared.texts import draw_texts
from grpo.runtime.language_tokens import find_language_token
from grpo.runtime.machine import DTYPES
from grpo.schema import LANGUAGE_TAG, PARAMS
from grpo.types import Cost, StepLogProbs

NO_TAG = -1  # forced token of a prompt without one
LAYOUT = {
    "prompt_lengths": Rows("prompt", each="integer"),
    "prompt_tokens": Rows("prompt", "prompt_lengths", each="integer"),
    "forced": Rows("prompt", each="integer"),
    "steps": Rows("rollout", each="integer"),
    "tokens": Rows("rollout", "steps", each="integer"),
    "behavior_logp": Rows("rollout", "steps", each="real"),
}


@dataclass(frozen=True, kw_only=True)
class Seq2SeqTrajectory:
    """Prompts and sampled tokens, both padded on the right."""

    group: Int[Tensor, " rollout"]  # row of `prompt`
    prompt: Int[Tensor, "prompt width"]
    prompt_mask: Bool[Tensor, "prompt width"]
    forced: Int[Tensor, " prompt"]  # token that the decoder is forced to begin with, or NO_TAG
    tokens: Int[Tensor, "rollout step"]
    mask: Bool[Tensor, "rollout step"]

    noise = None  # the steps are not Gaussian
    variant = None  # no prompt variants
    chunks = None  # the steps are not action chunks

    def select(self, rows: Int[Tensor, " kept"], num_steps: int) -> "Seq2SeqTrajectory":
        """Returns some rollouts, truncated to `num_steps` steps, without common padding."""
        group = self.group[rows]
        width = int(self.prompt_mask[group].sum(dim=1).max())
        return Seq2SeqTrajectory(
            group=group,
            prompt=self.prompt[:, :width],
            prompt_mask=self.prompt_mask[:, :width],
            forced=self.forced,
            tokens=self.tokens[rows, :num_steps],
            mask=self.mask[rows, :num_steps],
        )

    def pack(self, logp: Float[Tensor, "rollout step"]) -> dict[str, Tensor]:
        """Returns flat ragged tensors that can be concatenated."""
        return {
            "prompt_tokens": self.prompt[self.prompt_mask].int(),
            "prompt_lengths": self.prompt_mask.sum(dim=1),
            "forced": self.forced,
            "tokens": self.tokens[self.mask].int(),
            "steps": self.mask.sum(dim=1),
            "behavior_logp": logp[self.mask],
        }


class Seq2SeqPolicy(TextPolicy[Seq2SeqTrajectory]):
    """An encoder-decoder model with its tokenizer and sampling settings."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        decoding: Decoding,
        forces_tag: bool,
    ) -> None:
        """Args:
        forces_tag: Whether the tag of a prompt, ">>de<< text", is the token that the decoder is
          forced to begin with (M2M100, NLLB). False: it is part of the source text (Marian).
        """
        self._model = model
        self.tokenizer = tokenizer
        self.decoding = decoding
        self.forces_tag = forces_tag
        self.cost = Cost()
        self.passes = EncoderDecoderPasses(model)
        self._start = start_token(model)
        # A padding token would shift the positions of what follows it: it ends a rollout, too.
        marks = (tokenizer.eos_token_id, tokenizer.pad_token_id)
        self.end_tokens = torch.tensor(sorted({each for each in marks if each is not None}))

    @property
    def model(self) -> PreTrainedModel:
        """The encoder-decoder model, or its wrapper with adapters."""
        return self._model

    @property
    def layout(self) -> Layout:
        """The layout of stored rollouts."""
        return LAYOUT

    def encode(
        self, prompts: list[str]
    ) -> tuple[Int[Tensor, "prompt width"], Tensor, Int[Tensor, " prompt"]]:
        """Returns source tokens padded on the right, their mask, and the forced tokens.

        Raises:
          ParameterError: If a prompt has no tag of a language that the tokenizer knows, but needs
            one.
        """
        forced, texts = zip(*map(self._split, prompts))
        rows = self.tokenizer(list(texts))["input_ids"]
        return *pad_rows(rows, left=False), torch.tensor(forced)

    def restore(
        self, tensors: dict[str, Tensor], row: Int[Tensor, " rollout"]
    ) -> tuple[Seq2SeqTrajectory, Float[Tensor, "rollout step"]]:
        """Returns a stored trajectory and its behavior log-probs.

        Raises:
          ArtifactError: If tokens do not fit the model.
        """
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        stored = unpack_texts(tensors, vocabulary, left=False)
        trajectory = Seq2SeqTrajectory(
            group=row,
            prompt=stored.prompt,
            prompt_mask=stored.prompt_mask,
            forced=tensors["forced"].long(),
            tokens=stored.tokens,
            mask=stored.mask,
        )
        return trajectory, stored.logp

    @torch.no_grad()
    def sample(
        self, prompts: list[str], *, group_sizes: list[int], generator: Generator
    ) -> tuple[Seq2SeqTrajectory, Float[Tensor, "rollout step"]]:
        """Returns rollouts and their log-probs in nats at the decoding temperature.

        The encoder reads each prompt once for its group. With BeamSearch as decoding, the rollout
        of a prompt is the best one found.
        """
        prompt, prompt_mask, forced = self.encode(prompts)
        self._require_positions(prompt.shape[1])
        if isinstance(self.decoding, BeamSearch):
            return self._search(prompt, prompt_mask, forced, self.decoding)
        group = torch.repeat_interleave(torch.arange(len(prompts)), torch.tensor(group_sizes))
        steps = self.decoding.max_steps
        uniform = torch.rand(len(group), steps, dtype=torch.float64, generator=generator)
        counts, width = self.passes.forward_counts, prompt.shape[1]
        flops = counts.encode(len(prompts), width)

        encoded, cache = self.passes.encode(prompt, prompt_mask), self.passes.empty_cache()
        read = self._prefix(forced)
        seen = read.shape[1]
        logits = self.passes.next_logits(encoded, prompt_mask, read, cache)[group]
        flops += counts.decode(
            len(prompts), seen, seen=seen, width=width, logits=seen, reads_source=True
        )
        cache.reorder_cache(group.to(encoded.device))
        encoded, source_mask = encoded[group.to(encoded.device)], prompt_mask[group]

        def advance(step: int, chosen: Tensor, going: Tensor | None) -> Tensor:
            nonlocal encoded, source_mask, flops
            if going is not None:
                source_mask = source_mask[going]
                cache.reorder_cache(going.to(encoded.device))
                encoded = encoded[going.to(encoded.device)]
            flops += counts.decode(
                len(chosen), 1, seen=seen + step + 1, width=width, logits=1, reads_source=False
            )
            return self.passes.next_logits(encoded, source_mask, chosen[:, None], cache)

        drawn = draw_texts(
            logits,
            advance,
            uniform=uniform,
            end_tokens=self.end_tokens,
            temperature=self.decoding.temperature,
        )
        self.cost += Cost(flops=flops, sampled_steps=int(drawn.mask.sum()))
        trajectory = Seq2SeqTrajectory(
            group=group,
            prompt=prompt,
            prompt_mask=prompt_mask,
            forced=forced,
            tokens=drawn.tokens,
            mask=drawn.mask,
        )
        return trajectory, drawn.logp

    def _search(
        self,
        prompt: Int[Tensor, "prompt width"],
        prompt_mask: Bool[Tensor, "prompt width"],
        forced: Int[Tensor, " prompt"],
        settings: BeamSearch,
    ) -> tuple[Seq2SeqTrajectory, Float[Tensor, "prompt step"]]:
        """Returns the best rollout of each prompt by transformers' beam search, and zeros.

        The search compares sums of log-probs over numbers of tokens. The model's generation
        config may hold further settings, such as forbidden tokens.
        """
        prefix, ends = self._prefix(forced), self.end_tokens
        model: Any = self.passes.inner
        found = model.generate(
            input_ids=prompt.to(model.device),
            attention_mask=prompt_mask.long().to(model.device),
            decoder_input_ids=prefix.to(model.device),
            num_beams=settings.beams,
            do_sample=False,
            max_length=None,
            max_new_tokens=settings.max_steps,
            eos_token_id=ends.tolist(),
            pad_token_id=int(ends[0]),
        )
        seen = prefix.shape[1]
        tokens = found[:, seen:].cpu()
        is_end = torch.isin(tokens, ends)
        mask = is_end.cumsum(dim=1) - is_end.long() == 0
        rows, steps, width = settings.beams * len(prompt), tokens.shape[1], prompt.shape[1]
        counts = self.passes.forward_counts
        flops = counts.encode(len(prompt), width) + sum(
            counts.decode(
                rows,
                seen if step == 0 else 1,
                seen=seen + step,
                width=width,
                logits=1,
                reads_source=step == 0,
            )
            for step in range(steps)
        )
        self.cost += Cost(flops=flops, sampled_steps=int(mask.sum()))
        trajectory = Seq2SeqTrajectory(
            group=torch.arange(len(prompt)),
            prompt=prompt,
            prompt_mask=prompt_mask,
            forced=forced,
            tokens=torch.where(mask, tokens, 0),
            mask=mask,
        )
        return trajectory, torch.zeros(tokens.shape)

    def step_log_probs(
        self,
        trajectory: Seq2SeqTrajectory,
        needed: Bool[Tensor, "rollout step"] | None = None,
        *,
        with_entropy: bool = False,
    ) -> StepLogProbs:
        """Returns log-probs in nats at the decoding temperature, 0 on padding.

        The encoder reads each prompt once, and its gradient is that of the whole group.

        Args:
          needed: The steps to compute; the others are 0. None: all steps.

        Raises:
          ValueError: If decoding is greedy and so has no density.
        """
        self.require_density()
        rows, row = torch.unique(trajectory.group, return_inverse=True)
        prompt, prompt_mask = trajectory.prompt[rows], trajectory.prompt_mask[rows]
        needed = trajectory.mask if needed is None else trajectory.mask & needed
        read = torch.cat([self._prefix(trajectory.forced[rows])[row], trajectory.tokens[:, :-1]], 1)
        encoded = self.passes.encode(prompt, prompt_mask)
        scores = self.passes.log_prob(
            encoded.index_select(0, row.to(encoded.device)),
            prompt_mask[row],
            read,
            trajectory.tokens,
            needed,
            temperature=self.decoding.temperature,
            with_entropy=with_entropy,
        )
        self._count(len(rows), *read.shape, width=prompt.shape[1], num_needed=int(needed.sum()))
        return StepLogProbs(logp=scores.logp, entropy=scores.entropy)

    def _count(
        self, prompts: int, rollouts: int, read: int, *, width: int, num_needed: int
    ) -> None:
        """Adds the FLOPs of a scoring pass, with its backward pass if gradients are enabled."""
        is_training = torch.is_grad_enabled()
        counts = self.passes.training_counts if is_training else self.passes.forward_counts
        kept, again = self.passes.logits_of_training(num_needed)
        flops = counts.encode(prompts, width) + counts.head * kept
        flops += counts.decode(rollouts, read, seen=read, width=width, logits=0, reads_source=True)
        if is_training:
            flops += self.passes.forward_counts.head * again
        self.cost += Cost(flops=flops)

    def _require_positions(self, source_tokens: int) -> None:
        """Raises ParameterError if a source or a rollout exceeds the model's positions."""
        limit = getattr(self.model.config, "max_position_embeddings", None)
        if limit is None:  # relative positions (T5)
            return
        read = self.decoding.max_steps + (1 if self.forces_tag else 0)
        if max(source_tokens, read) > limit:
            what, wanted = "policy.max_steps", read
            if source_tokens > limit:
                what, wanted = "prompts", source_tokens
            raise ParameterError(
                f"{PARAMS}: {what} must need at most {limit} positions, those of the model "
                f"(max_position_embeddings), got {wanted}; lower max_steps or shorten the prompts"
            )

    def _prefix(self, forced: Int[Tensor, " prompt"]) -> Int[Tensor, "prompt prefix"]:
        """Returns the tokens with which the decoder begins: the start, and forced ones."""
        start = torch.full((len(forced), 1), self._start)
        return torch.cat([start, forced[:, None]], dim=1) if self.forces_tag else start

    def _split(self, prompt: str) -> tuple[int, str]:
        """Returns the forced token of a prompt and its source text."""
        if not self.forces_tag:
            return NO_TAG, prompt
        found = LANGUAGE_TAG.match(prompt)
        token = find_language_token(self.tokenizer, found[1]) if found else None
        if not found or token is None:
            raise ParameterError(
                f"{PARAMS}: policy.forces_tag needs prompts that begin with a token of the target "
                f"language, as >>fra_Latn<< of NLLB, got {brief(repr(prompt))}"
            )
        return token, prompt[found.end() :]


def start_token(model: PreTrainedModel) -> int:
    """Returns the token with which the decoder begins.

    Raises:
      ArtifactError: If the configuration names none.
    """
    for config in (model.generation_config, model.config):
        start = getattr(config, "decoder_start_token_id", None)
        if type(start) is int:
            return start
    raise ArtifactError(
        f"{model.name_or_path}: generation_config.json must have decoder_start_token_id, a number"
    )


def load_seq2seq_policy(
    params: RunParams[Seq2SeqPolicyParams], *, base: Path, directory: Path, decoding: Decoding
) -> Seq2SeqPolicy:
    """Returns the policy of a directory on the machine's device, without dropout.

    Args:
      base: The base policy's directory. A different `directory` holds the trained weights.

    Raises:
      ArtifactError: If a file is missing or broken.
    """
    settings = params.policy
    dtype = DTYPES[params.machine.dtype]
    model, tokenizer = load_base(base, dtype, auto_class=AutoModelForSeq2SeqLM)
    restore_round(params, model, base=base, directory=directory)
    nn.Module.to(model, params.machine.device)
    if settings.source_language is not None:
        tokenizer.src_lang = settings.source_language
    return Seq2SeqPolicy(model, tokenizer, decoding=decoding, forces_tag=settings.forces_tag)
