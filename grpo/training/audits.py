"""Gradient audits: comparison of an update's gradient with that of all sampled steps."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from grpo.modalities.policy import Policy
from grpo.objective.base import Objective, loss_terms, scalar_loss
from grpo.runtime.ranks import local_shard, sum_numbers
from grpo.training.batches import Batch
from grpo.training.metrics import Audit, Tally
from grpo.types import Cost, Credit, StepNoise

SAME = Audit(cosine=1.0, norm_ratio=1.0)
LARGEST_PROBE_NATS = 8.0  # largest |log ratio| at which `needs_advantage` evaluates an objective
NUM_PROBES = 65


class Auditor:
    """Compares gradients of the audited updates and keeps the cost of these audits."""

    def __init__(self, objective: Objective, updates_per_audit: int) -> None:
        """Args: updates_per_audit: 0 never audits; N audits the last of every N updates."""
        self.cost = Cost()  # not part of the policy's cost
        self._objective = objective
        self._updates_per_audit = updates_per_audit

    def is_due(self, update: int) -> bool:
        """Returns whether an update is audited; `update` is its index in the whole arm."""
        every = self._updates_per_audit
        return every > 0 and (update + 1) % every == 0

    def audit_only_weights(
        self, batches: Sequence[Batch], first_update: int, like: Float[Tensor, "round step"]
    ) -> Float[Tensor, "round step"]:
        """Returns the weights of the steps that only audits compute, and 0 elsewhere."""
        weight = torch.zeros_like(like)
        for index, batch in enumerate(batches):
            full = batch.credit.full
            if (
                self.is_due(first_update + index)
                and full
                and not self._has_same_gradient(batch.credit)
            ):
                weight[batch.rows] = full.weight * (batch.credit.weight == 0)
        return weight

    def audit(
        self,
        policy: Policy[Any],
        parameters: Sequence[Tensor],
        credit: Credit,
        add_gradient: Callable[[Credit], Tally],
    ) -> Audit:
        """Returns the comparison of the parameters' gradient with that of the full credit.

        The gradient and the policy's cost are unchanged afterwards. If the two gradients are equal
        by construction, nothing is computed.

        Args:
          parameters: The parameters whose `grad` is compared.
          add_gradient: Accumulates the gradient of a credit in the parameters' `grad`.
        """
        if credit.full is None or self._has_same_gradient(credit):
            return SAME
        used = _take_gradients(parameters)
        with self.counting_as_audit(policy):
            tally = add_gradient(credit.full)
        self.cost += Cost(trained_steps=tally.steps)
        full = _take_gradients(parameters)
        for parameter, gradient in zip(parameters, used, strict=True):
            parameter.grad = gradient
        return compare_gradients(used, full)

    @contextmanager
    def counting_as_audit(self, policy: Policy[Any]) -> Iterator[None]:
        """Counts the policy's cost in the block as a cost of audits."""
        own, policy.cost = policy.cost, Cost()
        yield
        self.cost += policy.cost
        policy.cost = own

    @cached_property
    def _needs_advantage(self) -> bool:
        return needs_advantage(self._objective)

    def _has_same_gradient(self, credit: Credit) -> bool:
        """Returns whether the full credit provably has the same gradient.

        This holds if only whole rollouts were dropped, their advantages are 0, the loss has no
        gradient at advantage 0, and the credit of kept steps is unchanged.
        """
        full = credit.full
        if full is None:
            return True
        kept = credit.weight != 0
        left_out = (full.weight != 0) & ~kept
        return (
            self._needs_advantage
            and not bool((kept.any(dim=1) & left_out.any(dim=1)).any())
            and bool((full.advantage[left_out] == 0).all())
            and torch.equal(full.weight[kept], credit.weight[kept])
            and torch.equal(full.advantage[kept], credit.advantage[kept])
        )


def needs_advantage(objective: Objective) -> bool:
    """Returns whether the gradient of the loss is 0 at advantage 0: no penalty, no bonus.

    Evaluated numerically on one step per rollout, for log ratios to the proximal and the reference
    policy from -8 to 8 nats, so that it is valid for custom links.
    """
    tries = torch.linspace(-LARGEST_PROBE_NATS, LARGEST_PROBE_NATS, NUM_PROBES, dtype=torch.float64)
    ratio, distance = torch.meshgrid(tries, tries, indexing="ij")
    logp = torch.full(
        (NUM_PROBES**2, 1), -LARGEST_PROBE_NATS, dtype=torch.float64, requires_grad=True
    )
    credit = Credit(advantage=torch.zeros_like(logp), weight=torch.ones_like(logp))
    terms = loss_terms(
        objective,
        logp=logp,
        proximal_logp=logp.detach() - ratio.reshape(-1, 1),
        reference_logp=logp.detach() - distance.reshape(-1, 1),
        behavior_logp=logp.detach() - ratio.reshape(-1, 1),
        proximal_kl=_gaussian_kl(logp, ratio),
        reference_kl=_gaussian_kl(logp, distance),
        entropy=-logp,
        noise=StepNoise(*(credit.weight,) * 3),
        credit=credit,
    )
    loss = scalar_loss(terms, credit)
    if not loss.requires_grad:
        return True
    (gradient,) = torch.autograd.grad(loss, logp, allow_unused=True)
    return gradient is None or bool((gradient == 0).all())


def _gaussian_kl(logp: Float[Tensor, "try 1"], ratio: Float[Tensor, "row column"]) -> Tensor:
    """Returns a divergence that is quadratic in the log ratio."""
    fixed = logp.detach() - ratio.reshape(-1, 1)
    return (logp - fixed).square() / 2


def compare_gradients(used: Sequence[Tensor | None], full: Sequence[Tensor | None]) -> Audit:
    """Returns cosine and norm ratio of two gradients, accumulated in float64.

    A gradient of 0 has cosine 0 with any other, and 1 with itself.
    """
    dot = _dot(used, full)
    used_norm, full_norm = _dot(used, used) ** 0.5, _dot(full, full) ** 0.5
    if full_norm == 0:
        return SAME if used_norm == 0 else Audit(cosine=0.0, norm_ratio=None)
    cosine = dot / (used_norm * full_norm) if used_norm else 0.0
    return Audit(cosine=min(max(cosine, -1.0), 1.0), norm_ratio=used_norm / full_norm)


def _dot(first: Sequence[Tensor | None], second: Sequence[Tensor | None]) -> float:
    """Returns the inner product over all tensors and the shards of all ranks; None is 0."""
    products = [
        float(local_shard(a).double().flatten() @ local_shard(b).double().flatten())
        for a, b in zip(first, second, strict=True)
        if a is not None and b is not None
    ]
    (total,) = sum_numbers([math.fsum(products)])
    return total


def _take_gradients(parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """Returns the parameters' gradients and sets them to None."""
    gradients = [each.grad for each in parameters]
    for each in parameters:
        each.grad = None
    return gradients
