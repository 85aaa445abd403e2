"""Passes of a causal LM and their FLOPs, for cost accounting and for `grpo/advice/`."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from grpo.modalities.shared.flops import Coefficients
from grpo.modalities.shared.logits import num_recomputed

if TYPE_CHECKING:
    from grpo.modalities.tokens.policy import Decoding

MIN_SAVED_FRACTION = 0.25  # of the positions; below it, a separate pass over prompts costs more


class Pass(NamedTuple):
    """A forward pass and, with gradients, its backward pass; 0 for a part that does not run."""

    rows: int
    query: int  # new positions per row
    context: int  # positions per row to which they attend
    logits: int  # positions per row that reach the head
    is_training: bool = True  # False: forward pass only, even with gradients enabled


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


def head_passes(num_positions: int, vocabulary: int, *, is_training: bool) -> list[Pass]:
    """Returns the passes of the head over scored positions, including recomputation."""
    passes = [Pass(rows=1, query=0, context=0, logits=num_positions)]
    if is_training:
        again = num_recomputed(num_positions, vocabulary)
        passes.append(Pass(rows=1, query=0, context=0, logits=again, is_training=False))
    return passes


def total_flops(
    passes: Iterable[Pass], *, forward: Coefficients, training: Coefficients | None
) -> int:
    """Returns the total FLOPs of some passes.

    Args:
      training: Coefficients of forward plus backward pass; None: forward passes only.
    """
    total = 0
    for each in passes:
        count = forward if training is None or not each.is_training else training
        total += count(rows=each.rows, query=each.query, context=each.context, logits=each.logits)
    return total


@dataclass(frozen=True, kw_only=True)
class TokenPassFlops:
    """FLOPs of sampling and training passes of one model: a `PassFlops`."""

    forward: Coefficients
    training: Coefficients  # forward plus backward
    shares_prompts: bool  # whether the rollouts of a microbatch share one pass over their prompt
    vocabulary: int  # decides whether the backward pass recomputes logits

    def group_flops(
        self,
        width: Float[np.ndarray, " prompt"],
        sizes: Int[np.ndarray, " prompt"],
        *,
        mean_later_steps: Float[np.ndarray, " prompt"],
        mean_step_pairs: Float[np.ndarray, " prompt"],
    ) -> Float[np.ndarray, " prompt"]:
        """Returns the expected FLOPs of sampling the group of each prompt; see `PassFlops`.

        One pass reads the prompt for the whole group. A rollout of T steps then takes T - 1 passes
        over one position, which attends to the prompt and the rollout's earlier steps.
        """
        count = self.forward
        prompt = count.body * width + count.attention * width**2 + count.head
        attended = mean_later_steps * width + mean_step_pairs
        rollout = mean_later_steps * (count.body + count.head) + count.attention * attended
        flops: Float[np.ndarray, " prompt"] = prompt + sizes * rollout
        return flops

    def microbatch_flops(self, rollouts: Int[np.ndarray, "rollout 3"], *, is_training: bool) -> int:
        """Returns the FLOPs of `ForwardPasses.log_prob` for a microbatch; see `PassFlops`."""
        passes = body_passes(
            rollouts=len(rollouts),
            prompts=len(np.unique(rollouts[:, 0])),
            width=int(rollouts[:, 1].max()),
            steps=int(rollouts[:, 2].max()),
            may_share=self.shares_prompts,
        )
        positions = int(rollouts[:, 2].sum())
        passes += head_passes(positions, self.vocabulary, is_training=is_training)
        training = self.training if is_training else None
        return total_flops(passes, forward=self.forward, training=training)

    def rollout_flops(
        self,
        prompt_tokens: Int[np.ndarray, " rollout"],
        steps: Int[np.ndarray, " rollout"],
        *,
        is_training: bool,
    ) -> Float[np.ndarray, " rollout"]:
        """Returns the FLOPs of one pass per rollout; see `PassFlops`."""
        count = self.training if is_training else self.forward
        width = (prompt_tokens + steps - 1).astype(np.float64)
        flops: Float[np.ndarray, " rollout"] = (
            count.body * width + count.attention * width**2 + count.head * steps
        )
        return flops


@dataclass(frozen=True, kw_only=True)
class TokenCostModel(TokenPassFlops):
    """The `CostModel` of a causal LM."""

    always_scores_proximal: bool  # True if the proximal pass records the routing to replay
    count_tokens: Callable[[list[str]], list[int]]

    def find_decoding_mismatch(self, draws: "Decoding", profile_draws: "Decoding") -> str | None:
        """Returns how the temperatures differ; None if they are equal."""
        if draws.temperature == profile_draws.temperature:
            return None
        return (
            f"samples at temperature {draws.temperature:g}, the profile at "
            f"{profile_draws.temperature:g}"
        )
