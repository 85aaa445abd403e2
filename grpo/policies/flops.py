"""FLOPs of a causal LM by torch's own flop counter, measured on three small passes.

The count is exact for every shape: a transformer's FLOPs are
rows * (body * query + attention * query * context + head * logits), so three measurements give
the three coefficients; a test compares with the counter on other shapes. A mixture of experts is no
exception: every token goes to the same number of experts, whichever they are. What a kernel pads
its groups with is not counted; padding tokens are, as in a dense model.
"""

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop, sdpa_flop
from transformers import PreTrainedModel

from grpo.policies.logits import num_recomputed

MIN_SAVED_FRACTION = 0.25  # of the positions: below it, a pass of its own for prompts costs more


class Coefficients(NamedTuple):
    """FLOPs per row: body per position, attention per position pair, head per logit position."""

    body: int
    attention: int
    head: int

    def __call__(self, *, rows: int, query: int, context: int, logits: int) -> int:
        return rows * (self.body * query + self.attention * query * context + self.head * logits)


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


class TokenFlops:
    """Counts the forward pass, and forward plus backward, of one model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    @cached_property
    def forward(self) -> Coefficients:
        """FLOPs of a forward pass without gradients."""
        return _solve(lambda query, logits: count_flops(self.model, query, logits, backward=False))

    @cached_property
    def training(self) -> Coefficients:
        """FLOPs of a forward and a backward pass through the trainable parameters."""
        return _solve(lambda query, logits: count_flops(self.model, query, logits, backward=True))


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


def count_flops(model: PreTrainedModel, query: int, logits: int, *, backward: bool) -> int:
    """Returns torch's count for one row of `query` tokens; leaves gradients as they were."""
    tokens = torch.zeros(1, query, dtype=torch.long, device=model.device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    counter = FlopCounterMode(display=False, custom_mapping=left_out_by_torch())
    with counter, torch.set_grad_enabled(backward):
        output = model(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            position_ids=torch.arange(query, device=model.device)[None],
            use_cache=False,
            logits_to_keep=logits,
        )
        if backward:
            torch.autograd.grad(output.logits.sum(), parameters)
    return int(counter.get_total_flops())


def _solve(count: Callable[[int, int], int]) -> Coefficients:
    """Returns the coefficients that reproduce three counts exactly."""
    base, longer, wider = count(2, 1), count(4, 1), count(2, 2)
    head = wider - base
    attention = (longer - 2 * base + head) // 8
    body = (base - head - 4 * attention) // 2
    return Coefficients(body=body, attention=attention, head=head)


def left_out_by_torch() -> dict[Any, Any]:
    """Returns formulas for the CPU's attention kernels and for the products of experts."""

    def forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_flop(query, key, value))

    def backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_backward_flop(grad, query, key, value))

    ops = torch.ops.aten
    return {
        ops._scaled_dot_product_flash_attention_for_cpu: forward,
        ops._scaled_dot_product_flash_attention_for_cpu_backward: backward,
        ops._grouped_mm: _grouped_product,
    }


def _grouped_product(left: Any, right: Any, *_: Any, **__: Any) -> int:
    """Returns the FLOPs of rows times the matrix of their expert, or of that product's gradient.

    Args:
      left: Shape [rows, inner]; for the gradient of the matrices [inner, rows].
      right: Shape [expert, inner, columns]; for the gradient of the matrices [rows, columns].
    """
    return 2 * int(left[0]) * int(left[1]) * int(right[-1])
