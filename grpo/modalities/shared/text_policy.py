"""What policies whose steps are the tokens of a text share."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from grpo.modalities.policy import Policy, Trajectory
from grpo.modalities.shared.texts import decode_texts, find_steps, has_ended, require_text
from grpo.runtime.artifacts.tensors import ragged_mask, unpack_ragged


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
