"""Log-probs of a round's steps under a frozen policy, and their drift from the sampler's."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo.errors import UnsoundError
from grpo.modalities.policy import Policy, Trajectory, cost_of_all_ranks
from grpo.modalities.shared.packed import numbered
from grpo.objective.base import Objective, loss_terms
from grpo.objective.trust import trusted_ranges
from grpo.runtime.ranks import all_reduce_sum
from grpo.training.batches import Batch, last_step, local_microbatches
from grpo.types import Credit, StepLogProbs, StepNoise

MIN_CLIP_PER_DRIFT = 3.0  # rule U27


@dataclass(frozen=True, kw_only=True)
class FrozenLogProbs:
    """Log-probs of a round's steps under a frozen policy, for the steps that were computed."""

    logp: Float[Tensor, "rollout step"]  # nats; NaN where not computed
    computed: Bool[Tensor, "rollout step"]
    mean: Float[Tensor, " computed *sample"] | None = None  # as in `StepLogProbs`; None: not stored

    def part(
        self, rows: Int[Tensor, " kept"], needed: Bool[Tensor, "kept step"], device: torch.device
    ) -> StepLogProbs:
        """Returns the log-probs of some rollouts' first steps, and the means where `needed`."""
        num_steps = needed.shape[1]
        logp = self.logp[rows, :num_steps].to(device)
        if self.mean is None:
            return StepLogProbs(logp=logp)
        index = self._index[rows, :num_steps][needed.to(self.computed.device)]
        return StepLogProbs(logp=logp, mean=self.mean[index].to(device))

    @cached_property
    def _index(self) -> Int[Tensor, "rollout step"]:
        """The row of each computed step in `mean`."""
        return numbered(self.computed)


@torch.no_grad()
def compute_log_probs(
    policy: Policy[Any],
    trajectory: Trajectory,
    needed: Float[Tensor, "rollout step"],
    tokens_per_microbatch: int,
    *,
    keeps_means: bool = False,
) -> FrozenLogProbs:
    """Returns the log-probs of the steps where `needed` is not 0.

    Args:
      keeps_means: Stores the means of Gaussian steps, too; they are as large as the samples.
    """
    computed = needed != 0
    logp = torch.zeros(needed.shape)
    index, mean = numbered(computed), None
    rows = computed.any(dim=1).nonzero()[:, 0]
    if len(rows) == 0:
        return FrozenLogProbs(logp=torch.full_like(logp, torch.nan), computed=computed)
    widths = policy.widths(trajectory, rows, computed[rows])
    with cost_of_all_ranks(policy):
        for share in local_microbatches(widths, tokens_per_microbatch):
            kept = rows[share.rows]
            num_steps = last_step(needed[kept])
            part = computed[kept, :num_steps]
            log_probs = policy.step_log_probs(trajectory.select(kept, num_steps), part)
            if not share.counts:
                continue
            logp[kept[:, None], torch.arange(num_steps)] = log_probs.logp.cpu()
            if keeps_means and log_probs.mean is not None:
                if mean is None:
                    mean = torch.empty(int(computed.sum()), *log_probs.mean.shape[1:])
                mean[index[kept, :num_steps][part]] = log_probs.mean.cpu()
    logp = torch.where(computed, all_reduce_sum(logp), torch.nan)
    return FrozenLogProbs(logp=logp, computed=computed, mean=mean)


def merge_log_probs(first: FrozenLogProbs, second: FrozenLogProbs) -> FrozenLogProbs:
    """Returns the union of both; where both have a step, the second one's."""
    computed = first.computed | second.computed
    present = [each.mean for each in (first, second) if each.mean is not None]
    mean = None
    if present:
        mean, index = torch.empty(int(computed.sum()), *present[0].shape[1:]), numbered(computed)
        for each in (first, second):
            if each.mean is not None:
                mean[index[each.computed]] = each.mean
    logp = torch.where(second.computed, second.logp, first.logp)
    return FrozenLogProbs(logp=logp, computed=computed, mean=mean)


def divergence(
    now: StepLogProbs, fixed: StepLogProbs, needed: Bool[Tensor, "rollout step"]
) -> Float[Tensor, "rollout step"] | None:
    """Returns KL(fixed || now) = KL(now || fixed) of every needed step, and 0 elsewhere.

    For two Gaussians of equal std, this is half the squared distance of their means in units of the
    std, summed in float64. None if the steps are not Gaussian or means were not stored.
    """
    if now.mean is None or fixed.mean is None:
        return None
    distance = (now.mean - fixed.mean).flatten(1).double()
    kl = (distance.square().sum(dim=1) / 2).to(now.logp.dtype)
    return kl.new_zeros(needed.shape).masked_scatter(needed.to(kl.device), kl)


def measure_drift(
    objective: Objective,
    batches: list[Batch],
    proximal_logp: Float[Tensor, "rollout step"],
) -> float:
    """Returns max |log ratio| between trainer and sampler before any update.

    Raises:
      UnsoundError: If a trust region is too narrow; see `require_range_above`.
    """
    drift = 0.0
    for batch in batches:
        logp, behavior_logp = proximal_logp[batch.rows], batch.rollouts.behavior_logp
        noise = batch.rollouts.noise
        drift = max(drift, drift_of(objective, logp, behavior_logp, batch.credit, noise))
    return require_range_above(drift, objective)


def require_range_above(drift: float, objective: Objective) -> float:
    """Returns the drift.

    Raises:
      UnsoundError: If the range of a trust region is at most three times the drift (rule U27): it
        would clip noise. Not raised if a link corrects the mismatch of the sampler.
    """
    is_corrected = any("correction" in link.kinds for link in objective.links)
    for name, trusted in trusted_ranges(objective).items():
        if trusted <= MIN_CLIP_PER_DRIFT * drift and not is_corrected:
            raise UnsoundError(
                f"U27: {name} needs a range above {MIN_CLIP_PER_DRIFT:g} times the drift "
                f"between sampler and trainer, got {trusted:g} at a drift of {drift:.2g}; "
                f"widen it, compute in float32, put truncate_mismatch in front, or find out if the "
                f"sampler holds other weights"
            )
    return drift


def drift_of(
    objective: Objective,
    logp: Tensor,
    behavior_logp: Tensor,
    credit: Credit,
    noise: StepNoise | None,
) -> float:
    """Returns max |log ratio| between a policy and the behavior policy."""
    none = torch.zeros_like(logp)
    terms = loss_terms(
        objective,
        logp=logp,
        proximal_logp=behavior_logp,
        reference_logp=logp,
        proximal_kl=none,
        reference_kl=none,
        entropy=none,
        noise=noise,
        credit=credit,
        behavior_logp=behavior_logp,
    )
    return float(terms.log_ratio.abs().max())
