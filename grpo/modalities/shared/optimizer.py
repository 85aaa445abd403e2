"""AdamW that also learns where weights are too coarse, and steps that end training."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from grpo.errors import DivergedError
from grpo.runtime.ranks import full_tensor


class PreciseAdamW(AdamW):
    """AdamW in at least float32; of weights that are in float32 it is torch's own.

    bfloat16 keeps eight bits of a number, and a step of 1e-6 on a weight of 0.01 would be rounded
    away. So a weight in less than float32 has a copy in float32, to which its gradients add up and
    which is master_weight; the weight is what the copy rounds to. One such optimizer per model.
    """

    def __init__(self, weights: Iterable[Tensor], **settings: Any) -> None:
        """Args: settings: Those of torch's AdamW."""
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
        """Returns what has the gradient of a weight and is master_weight: its copy, or itself."""
        return self._copies.get(weight, weight)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Makes a step, and rounds the copies to their weights."""
        super().step(closure)
        for weight, copy in self._copies.items():
            weight.copy_(copy)

    def _take_gradient(self, weight: Tensor) -> None:
        """Adds a weight's gradient to its copy's, and leaves it none."""
        copy, gradient = self._copies[weight], weight.grad
        assert gradient is not None
        copy.grad = gradient.float() if copy.grad is None else copy.grad + gradient
        weight.grad = None


def optimized_tensors(optimizer: Optimizer) -> list[Tensor]:
    """Returns what has the gradients for an optimizer's next step."""
    return [each for group in optimizer.param_groups for each in group["params"]]


def take_step(optimizer: Optimizer, update: int) -> None:
    """Makes a step.

    Raises:
      DivergedError: If a weight is NaN then, or the norm of the weights overflows.
    """
    optimizer.step()
    norm = torch.nn.utils.get_total_norm([each.detach() for each in optimized_tensors(optimizer)])
    require_finite_numbers(update, {"norm of the weights": float(full_tensor(norm))})


def require_finite_numbers(update: int, numbers: Mapping[str, float]) -> None:
    """Raises DivergedError, which says which number of an update is not finite."""
    for name, number in numbers.items():
        if not math.isfinite(number):
            raise DivergedError(f"update {update}: {name} is {number}")
