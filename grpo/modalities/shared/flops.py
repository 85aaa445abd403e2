"""FLOPs of a causal LM, measured by torch's FLOP counter on three small passes.

A transformer's FLOPs are rows * (body * query + attention * query * context + head * logits).
Three measurements give the three coefficients exactly; a test compares other shapes with the
counter. The formula holds for mixtures of experts, in which every token uses the same number of
experts. The count includes padding tokens, but not the padding inside a kernel's expert groups.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop, sdpa_flop
from transformers import PreTrainedModel

from grpo.runtime.ranks import sum_counts, this_rank


class Coefficients(NamedTuple):
    """FLOPs per row: body per position, attention per position pair, head per logit position."""

    body: int
    attention: int
    head: int

    def __call__(self, *, rows: int, query: int, context: int, logits: int) -> int:
        return rows * (self.body * query + self.attention * query * context + self.head * logits)


class Pass(NamedTuple):
    """A forward pass and, with gradients, its backward pass; 0 for a part that does not run."""

    rows: int
    query: int  # new positions per row
    context: int  # positions per row to which they attend
    logits: int  # positions per row that reach the head
    is_training: bool = True  # False: forward pass only, even with gradients enabled


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


class TokenFlops:
    """FLOPs of a model's forward pass and of forward plus backward pass."""

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

    def measure(self) -> None:
        """Measures on the first rank for all ranks; call it before the model is sharded."""
        for name in ("forward", "training"):
            own = getattr(self, name) if this_rank() == 0 else Coefficients(0, 0, 0)
            vars(self)[name] = Coefficients(*sum_counts(own))


@contextmanager
def uncounted() -> Iterator[None]:
    """Makes the counts within 0, without their passes: for runs whose cost nobody reads."""
    global _counts
    before, _counts = _counts, False
    try:
        yield
    finally:
        _counts = before


_counts = True


def count_flops(model: PreTrainedModel, query: int, logits: int, *, backward: bool) -> int:
    """Returns torch's count for one row of `query` tokens; does not change gradients."""
    tokens = torch.zeros(1, query, dtype=torch.long, device=model.device)

    def run() -> Tensor:
        output = model(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            position_ids=torch.arange(query, device=model.device)[None],
            use_cache=False,
            logits_to_keep=logits,
        )
        found: Tensor = output.logits
        return found

    return count_pass(run, list(model.parameters()), backward)


def count_pass(run: Callable[[], Tensor], inputs: Sequence[Tensor], backward: bool) -> int:
    """Returns torch's FLOP count of a pass; does not change gradients."""
    if not _counts:
        return 0
    wanted = [each for each in inputs if each.requires_grad]
    counter = FlopCounterMode(display=False, custom_mapping=missing_flop_formulas())
    with counter, torch.set_grad_enabled(backward):
        output = run()
        if backward:
            torch.autograd.grad(output.sum(), wanted, allow_unused=True)
    return int(counter.get_total_flops())


def _solve(count: Callable[[int, int], int]) -> Coefficients:
    """Solves for the coefficients from three counts."""
    base, longer, wider = count(2, 1), count(4, 1), count(2, 2)
    head = wider - base
    attention = (longer - 2 * base + head) // 8
    body = (base - head - 4 * attention) // 2
    return Coefficients(body=body, attention=attention, head=head)


def missing_flop_formulas() -> dict[Any, Any]:
    """Returns FLOP formulas that torch lacks: CPU attention and grouped matrix products."""
    ops = torch.ops.aten
    return {
        ops._scaled_dot_product_flash_attention_for_cpu: _attention,
        ops._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
        ops._grouped_mm: _grouped_product,
    }


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop(query, key, value))


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop(grad, query, key, value))


def _grouped_product(left: Any, right: Any, *_: Any, **__: Any) -> int:
    """Returns the FLOPs of multiplying rows by their expert's matrix, or of its gradient.

    Args:
      left: Shape [rows, inner]; [inner, rows] for the gradient of the matrices.
      right: Shape [expert, inner, columns]; [rows, columns] for the gradient of the matrices.
    """
    return 2 * int(left[0]) * int(left[1]) * int(right[-1])
