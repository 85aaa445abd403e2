"""AdamW with float32 master weights, and optimizer steps that detect divergence."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from grpo.errors import DivergedError
from grpo.runtime.ranks import full_tensor


class PreciseAdamW(AdamW):
    """AdamW with float32 master weights; for float32 weights it equals torch's AdamW.

    bfloat16 has eight significant bits, so it rounds away a step of 1e-6 on a weight of 0.01. Each
    weight of lower precision than float32 therefore has a float32 copy, which accumulates its
    gradients and takes its steps; the weight is the rounded copy. Use one optimizer per model.
    """

    def __init__(self, weights: Iterable[Tensor], **settings: Any) -> None:
        """Args:
        settings: Keyword arguments of torch's AdamW.
        """
        weights = list(weights)
        self._copies = {
            each: each.detach().float().requires_grad_()
            for each in weights
            if each.requires_grad and torch.promote_types(each.dtype, torch.float32) != each.dtype
        }
        for each in self._copies:
            each.register_post_accumulate_grad_hook(self._take_gradient)
        super().__init__([self.master_weight(each) for each in weights], **settings)

    def master_weight(self, weight: Tensor) -> Tensor:
        """Returns the tensor that the optimizer updates: the weight's copy, or the weight."""
        return self._copies.get(weight, weight)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Makes a step and rounds the copies into their weights."""
        super().step(closure)
        for weight, copy in self._copies.items():
            weight.copy_(copy)

    def _take_gradient(self, weight: Tensor) -> None:
        """Moves a weight's gradient to its copy."""
        copy, gradient = self._copies[weight], weight.grad
        assert gradient is not None
        copy.grad = gradient.float() if copy.grad is None else copy.grad + gradient
        weight.grad = None


def optimized_tensors(optimizer: Optimizer) -> list[Tensor]:
    """Returns all tensors that an optimizer updates."""
    return [each for group in optimizer.param_groups for each in group["params"]]


def take_step(optimizer: Optimizer, update: int) -> None:
    """Makes an optimizer step.

    Raises:
      DivergedError: If the norm of the weights is not finite after the step.
    """
    optimizer.step()
    norm = torch.nn.utils.get_total_norm([each.detach() for each in optimized_tensors(optimizer)])
    require_finite_numbers(update, {"norm of the weights": float(full_tensor(norm))})


def require_finite_numbers(update: int, numbers: Mapping[str, float]) -> None:
    """Raises DivergedError for the first number of an update that is not finite."""
    for name, number in numbers.items():
        if not math.isfinite(number):
            raise DivergedError(f"update {update}: {name} is {number}")
