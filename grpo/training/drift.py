"""How far the trainer's numbers are from the sampler's before any update, and rule U27 about it."""

import torch
from jaxtyping import Float
from torch import Tensor

from grpo.errors import UnsoundError
from grpo.objective.base import Objective, loss_terms
from grpo.objective.trust import trusted_ranges
from grpo.training.batches import Batch
from grpo.types import Credit, StepNoise

MIN_CLIP_PER_DRIFT = 3.0  # rule U27


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
