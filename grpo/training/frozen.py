"""Log-probs of a round's steps under a frozen policy, and how far the sampler's are from them."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo.errors import UnsoundError
from grpo.modalities.base import Policy, Trajectory, cost_of_all_ranks
from grpo.modalities.shared.packed import numbered
from grpo.objective.base import Objective, loss_terms
from grpo.objective.trust import trusted_ranges
from grpo.runtime.ranks import all_reduce_sum
from grpo.training.batches import Batch, last_step, own_microbatches
from grpo.types import Credit, Scores, StepNoise

MIN_CLIP_PER_DRIFT = 3.0  # rule U27


@dataclass(frozen=True, kw_only=True)
class FixedScores:
    """Scores of some steps of a round."""

    logp: Float[Tensor, "rollout step"]  # nats; NaN where not scored
    scored: Bool[Tensor, "rollout step"]
    mean: Float[Tensor, " scored *sample"] | None = None  # as in `Scores`; None: not kept

    def part(
        self, rows: Int[Tensor, " kept"], needed: Bool[Tensor, "kept step"], device: torch.device
    ) -> Scores:
        """Returns the scores of some rollouts' first steps, and means of the needed ones."""
        num_steps = needed.shape[1]
        logp = self.logp[rows, :num_steps].to(device)
        if self.mean is None:
            return Scores(logp=logp)
        index = self._index[rows, :num_steps][needed.to(self.scored.device)]
        return Scores(logp=logp, mean=self.mean[index].to(device))

    @cached_property
    def _index(self) -> Int[Tensor, "rollout step"]:
        """The row of each scored step in `mean`."""
        return numbered(self.scored)


@torch.no_grad()
def score_steps(
    policy: Policy[Any],
    trajectory: Trajectory,
    needed: Float[Tensor, "rollout step"],
    tokens_per_microbatch: int,
    *,
    keeps_means: bool = False,
) -> FixedScores:
    """Returns the scores where `needed` is not 0.

    Args:
      keeps_means: Of Gaussian steps; they are as large as what was sampled.
    """
    scored = needed != 0
    logp = torch.zeros(needed.shape)
    index, mean = numbered(scored), None
    rows = scored.any(dim=1).nonzero()[:, 0]
    if len(rows) == 0:
        return FixedScores(logp=torch.full_like(logp, torch.nan), scored=scored)
    widths = policy.widths(trajectory, rows, scored[rows])
    with cost_of_all_ranks(policy):
        for share in own_microbatches(widths, tokens_per_microbatch):
            kept = rows[share.rows]
            num_steps = last_step(needed[kept])
            part = scored[kept, :num_steps]
            scores = policy.score(trajectory.select(kept, num_steps), part)
            if not share.counts:
                continue
            logp[kept[:, None], torch.arange(num_steps)] = scores.logp.cpu()
            if keeps_means and scores.mean is not None:
                if mean is None:
                    mean = torch.empty(int(scored.sum()), *scores.mean.shape[1:])
                mean[index[kept, :num_steps][part]] = scores.mean.cpu()
    logp = torch.where(scored, all_reduce_sum(logp), torch.nan)
    return FixedScores(logp=logp, scored=scored, mean=mean)


def merge_scores(first: FixedScores, second: FixedScores) -> FixedScores:
    """Returns both; where both scored a step, the second."""
    scored = first.scored | second.scored
    present = [each.mean for each in (first, second) if each.mean is not None]
    mean = None
    if present:
        mean, index = torch.empty(int(scored.sum()), *present[0].shape[1:]), numbered(scored)
        for each in (first, second):
            if each.mean is not None:
                mean[index[each.scored]] = each.mean
    logp = torch.where(second.scored, second.logp, first.logp)
    return FixedScores(logp=logp, scored=scored, mean=mean)


def divergence(
    now: Scores, fixed: Scores, needed: Bool[Tensor, "rollout step"]
) -> Float[Tensor, "rollout step"] | None:
    """Returns KL(fixed || now) = KL(now || fixed) of every needed step, and 0 elsewhere.

    Two Gaussians of one deviation: half the squared distance of their means in units of it, added
    in float64. None if the steps are no Gaussians, or means were not kept.
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
      UnsoundError: As `require_range_above`.
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
      UnsoundError: If a trust region is within three times the drift (rule U27): it would clip
        noise. Not if a link corrects that very mismatch.
    """
    is_corrected = any("correction" in link.kinds for link in objective.links)
    for name, trusted in trusted_ranges(objective).items():
        if trusted <= MIN_CLIP_PER_DRIFT * drift and not is_corrected:
            raise UnsoundError(
                f"U27: {name} needs a range above {MIN_CLIP_PER_DRIFT:g} times the drift "
                f"between sampler and trainer, got {trusted:g} at a drift of {drift:.2g}; "
                f"widen it, compute in float32, or put truncate_mismatch in front"
            )
    return drift


def drift_of(
    objective: Objective,
    logp: Tensor,
    behavior_logp: Tensor,
    credit: Credit,
    noise: StepNoise | None,
) -> float:
    """Returns max |log ratio| between a policy and the one that sampled."""
    none = torch.zeros_like(logp)
    terms = loss_terms(
        objective,
        logp=logp,
        proximal_logp=behavior_logp,
        reference_logp=logp,
        proximal_kl=none,
        reference_kl=none,
        noise=noise,
        credit=credit,
        behavior_logp=behavior_logp,
    )
    return float(terms.log_ratio.abs().max())
