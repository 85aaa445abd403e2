"""Passes of a causal LM and their FLOPs: counted by policies, and predicted for `grpo/advice/`."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from grpo.modalities.shared.flops import Coefficients
from grpo.modalities.shared.logits import num_recomputed

if TYPE_CHECKING:
    from grpo.modalities.tokens.policy import Decoding

MIN_SAVED_FRACTION = 0.25  # of the positions: below it, a pass of its own for prompts costs more


class Pass(NamedTuple):
    """A forward pass, and its backward pass if there was one; a part of it may be missing (0)."""

    rows: int
    query: int  # new positions of a row
    context: int  # positions that they may look at
    logits: int  # positions of a row that reach the head
    is_training: bool = True  # False: forward only, whether or not gradients are on


def body_passes(
    *, rollouts: int, prompts: int, width: int, steps: int, may_share: bool
) -> list[Pass]:
    """Returns the passes that score a microbatch, without their logits.

    Two, over the prompts and then over the rollouts behind them, where reading each prompt once
    saves enough; else one over both.

    Args:
      width: Tokens of the longest prompt.
      steps: Of the longest rollout; its last step is read by nobody.
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
    """Returns the passes that give the logits of scored positions, computed again or not."""
    passes = [Pass(rows=1, query=0, context=0, logits=num_positions)]
    if is_training:
        again = num_recomputed(num_positions, vocabulary)
        passes.append(Pass(rows=1, query=0, context=0, logits=again, is_training=False))
    return passes


def total_flops(
    passes: Iterable[Pass], *, forward: Coefficients, training: Coefficients | None
) -> int:
    """Returns the FLOPs of passes.

    Args:
      training: Of a forward and a backward pass; None: no pass has a backward pass.
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
    training: Coefficients  # forward and backward
    shares_prompts: bool  # a prompt is read once for its rollouts in a microbatch
    vocabulary: int  # if it is large, a backward pass computes logits again

    def group_flops(
        self,
        width: Float[np.ndarray, " prompt"],
        sizes: Int[np.ndarray, " prompt"],
        *,
        mean_later_steps: Float[np.ndarray, " prompt"],
        mean_step_pairs: Float[np.ndarray, " prompt"],
    ) -> Float[np.ndarray, " prompt"]:
        """Returns the expected FLOPs of sampling each prompt's group; see `PassFlops`.

        One pass reads the prompt for the whole group. Then a rollout of T steps takes T - 1 passes
        over one position, which attend to the prompt and to the rollout's own earlier steps.
        """
        count = self.forward
        prompt = count.body * width + count.attention * width**2 + count.head
        attended = mean_later_steps * width + mean_step_pairs
        rollout = mean_later_steps * (count.body + count.head) + count.attention * attended
        flops: Float[np.ndarray, " prompt"] = prompt + sizes * rollout
        return flops

    def microbatch_flops(self, rollouts: Int[np.ndarray, "rollout 3"], *, is_training: bool) -> int:
        """Returns the FLOPs of the passes that `ForwardPasses.log_prob` runs; see `PassFlops`."""
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
        """Returns the FLOPs of each rollout in a pass of its own; see `PassFlops`."""
        count = self.training if is_training else self.forward
        width = (prompt_tokens + steps - 1).astype(np.float64)
        flops: Float[np.ndarray, " rollout"] = (
            count.body * width + count.attention * width**2 + count.head * steps
        )
        return flops


@dataclass(frozen=True, kw_only=True)
class TokenCostModel(TokenPassFlops):
    """What advice asks of a causal LM: a `CostModel`."""

    always_scores_proximal: bool  # updates replay the experts that this pass records
    count_tokens: Callable[[list[str]], list[int]]

    def find_unlike_draws(self, draws: "Decoding", profile_draws: "Decoding") -> str | None:
        """Returns how temperatures differ; None if they do not."""
        if draws.temperature == profile_draws.temperature:
            return None
        return (
            f"samples at temperature {draws.temperature:g}, the profile at "
            f"{profile_draws.temperature:g}"
        )
