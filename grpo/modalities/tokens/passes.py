"""Which passes of a causal LM score rollouts, and their FLOPs: for policies, and for advice."""

from collections.abc import Iterable
from typing import NamedTuple

from grpo.modalities.shared.flops import Coefficients
from grpo.modalities.shared.logits import num_recomputed

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
