"""What policies whose steps are the tokens of a text share."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor
from transformers import PreTrainedTokenizerBase

from grpo.modalities.policy import Policy, Trajectory
from grpo.modalities.shared.decoding import MAX_RESERVED_STEPS
from grpo.modalities.shared.logits import peak_logits_bytes
from grpo.modalities.shared.texts import (
    decode_texts,
    find_steps,
    has_ended,
    num_positions,
    require_text,
)
from grpo.runtime.artifacts.tensors import ragged_mask, unpack_ragged
from grpo.runtime.dry_run import DryRun

REHEARSED_STEPS = 2  # of sampling; enough for one step with a cache
WORD, COUNTED_WORDS = " a", 100


class TextTrajectory(Trajectory, Protocol):
    """Prompts, and sampled tokens padded on the right."""

    @property
    def group(self) -> Int[Tensor, " rollout"]:
        """The row of each rollout's prompt."""
        ...

    @property
    def prompt_mask(self) -> Bool[Tensor, "prompt width"]: ...

    @property
    def tokens(self) -> Int[Tensor, "rollout step"]: ...


TextTrajectoryT = TypeVar("TextTrajectoryT", bound=TextTrajectory)


class TextPolicy(Policy[TextTrajectoryT]):
    """A policy whose steps are the tokens of a text."""

    tokenizer: PreTrainedTokenizerBase
    end_tokens: Int[Tensor, " token"]

    def decode(self, trajectory: TextTrajectoryT) -> list[str]:
        """Returns each rollout's text without special tokens."""
        return decode_texts(self.tokenizer, trajectory.tokens, trajectory.mask)

    def find_steps(
        self, trajectory: TextTrajectoryT, ends: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        """Returns the step that completes the first `end` characters of a text, per end."""
        return find_steps(self.tokenizer, trajectory.tokens, trajectory.mask, ends)

    def is_finished(self, trajectory: TextTrajectoryT) -> Bool[Tensor, " rollout"]:
        """Returns which rollouts ended with an end token instead of at the step limit."""
        return has_ended(trajectory.tokens, trajectory.mask, self.end_tokens)

    def widths(
        self,
        trajectory: TextTrajectoryT,
        rows: Int[Tensor, " kept"],
        needed: Bool[Tensor, "kept step"],
    ) -> Int[Tensor, " kept"]:
        """Returns prompt length plus number of steps; a needed step also reads all earlier ones."""
        prompt = trajectory.prompt_mask.sum(dim=1)[trajectory.group]
        return (prompt + trajectory.mask.sum(dim=1))[rows]

    def sampling_peaks(
        self, run: DryRun, prompts: list[str], *, group_sizes: list[int]
    ) -> dict[str, int]:
        """Returns the largest bytes of the first steps of sampling and of the last ones.

        The last steps read, instead of a prompt and the steps before them, one prompt that is as
        long, so that the caches are as large.
        """
        encode: Any = self.encode  # type: ignore[attr-defined]
        width, steps = encode(prompts)[0].shape[1], self.decoding.max_steps
        reserved = MAX_RESERVED_STEPS if steps > MAX_RESERVED_STEPS else 0
        longest = self._lengthen(max(prompts, key=len), width, width + steps + reserved)
        return {
            "prompts": run.peak_of(lambda: self._draw_few(prompts, group_sizes)),
            "caches": run.peak_of(lambda: self._draw_few([longest], [sum(group_sizes)])),
        }

    def longest_rollouts(self, prompts: list[str], *, rollouts: int) -> TextTrajectoryT:
        """Returns rollouts of `max_steps` steps after the longest prompt, which share no pass."""
        widths = self._draw_few(prompts, [1] * len(prompts)).prompt_mask.sum(dim=1)
        drawn: Any = self._draw_few([prompts[int(widths.argmax())]] * rollouts, [1] * rollouts)
        shape = rollouts, self.decoding.max_steps
        longest: TextTrajectoryT = replace(
            drawn,
            tokens=torch.zeros(shape, dtype=torch.long),
            mask=torch.ones(shape, dtype=torch.bool),
        )
        return longest

    def logits_bytes(self, num_steps: int) -> int:
        """Returns the largest bytes of the logits of an update's steps."""
        model: Any = self.model
        weight = model.get_output_embeddings().weight
        return peak_logits_bytes(num_steps, len(weight), weight.itemsize)

    def _draw_few(self, prompts: list[str], group_sizes: list[int]) -> TextTrajectoryT:
        """Returns rollouts of REHEARSED_STEPS steps."""
        decoding = self.decoding
        self.decoding = replace(decoding, max_steps=min(decoding.max_steps, REHEARSED_STEPS))
        trajectory, _ = self.sample(prompts, group_sizes=group_sizes, generator=Generator())
        self.decoding = decoding
        return trajectory

    def _lengthen(self, prompt: str, own: int, width: int) -> str:
        """Returns a prompt of `own` tokens with words added up to `width` tokens or the context."""
        model: Any = self.model
        limit = num_positions(model.config)
        width -= REHEARSED_STEPS
        if limit is not None:
            width = min(width, limit - REHEARSED_STEPS)
        tokens = len(self.tokenizer(WORD * COUNTED_WORDS, add_special_tokens=False)["input_ids"])
        return prompt + WORD * max(0, (width - own) * COUNTED_WORDS // tokens)

    def require_density(self) -> None:
        """Raises ValueError if decoding is greedy."""
        if self.decoding.temperature == 0:
            raise ValueError("log_prob needs temperature > 0: greedy decoding has no density")


def pad_rows(
    rows: Sequence[Sequence[int]], *, left: bool
) -> tuple[Int[Tensor, "row width"], Bool[Tensor, "row width"]]:
    """Returns rows of tokens padded with 0 on one side, and which entries are tokens."""
    flat = torch.tensor([token for row in rows for token in row], dtype=torch.long)
    lengths = torch.tensor([len(row) for row in rows])
    return unpack_ragged(flat, lengths, left=left), ragged_mask(lengths, left=left)


class StoredTexts(NamedTuple):
    """Prompts and rollouts as they were before they were packed."""

    prompt: Int[Tensor, "prompt width"]
    prompt_mask: Bool[Tensor, "prompt width"]
    tokens: Int[Tensor, "rollout step"]
    mask: Bool[Tensor, "rollout step"]
    logp: Float[Tensor, "rollout step"]


def unpack_texts(tensors: dict[str, Tensor], vocabulary: int, *, left: bool) -> StoredTexts:
    """Returns stored texts; `left`: their prompts are padded on the left.

    Raises:
      ArtifactError: If a token is not in the vocabulary, or a log-prob is above 0.
    """
    require_text(tensors, vocabulary)
    steps, lengths = tensors["steps"], tensors["prompt_lengths"]
    return StoredTexts(
        prompt=unpack_ragged(tensors["prompt_tokens"].long(), lengths, left=left),
        prompt_mask=ragged_mask(lengths, left=left),
        tokens=unpack_ragged(tensors["tokens"].long(), steps),
        mask=ragged_mask(steps),
        logp=unpack_ragged(tensors["behavior_logp"], steps),
    )
