"""Corrections for a sampler whose numerics differ from the trainer's: pi_old / mu, no gradient.

The ratio of a trust region compares with pi_old, the trainer's own policy at the start of the
round, so a weight for pi_old / mu counts nothing twice (rule U14). It multiplies the advantage and
stands before the trust region (rule H4); a penalty keeps its weight.
"""

from dataclasses import replace

from jaxtyping import Float
from torch import Tensor

from grpo.objective.base import Objective, exp_log_ratio, loss_link
from grpo.objective.link import Link
from grpo.objective.ratio import mean_over_steps
from grpo.types import StepTerms

OVER = ("product", "geometric_mean")


def truncate_mismatch(weight_max: float = 2.0) -> Objective:
    """A_it min(pi_old / mu, weight_max), step by step. [Yao et al., 2025, TIS]

    Biased as any weight per step of a sequence is, with little variance.

    Raises:
      ValueError: If `weight_max` is below 1; on loss, without the sampler's log-probs.
    """
    if weight_max < 1:
        raise ValueError(f"truncate_mismatch needs weight_max >= 1, got {weight_max}")

    def loss(terms: StepTerms) -> StepTerms:
        mismatch = _mismatch(terms, "truncate_mismatch")
        return _weigh(terms, exp_log_ratio(mismatch).clamp(max=weight_max))

    return loss_link(
        Link("truncate_mismatch", {"weight_max": weight_max}, "ratio", "correction"), loss
    )


def mask_mismatched_rollouts(
    low: float = 0.5, high: float = 2.0, over: str = "product"
) -> Objective:
    """A_it, or 0 if pi_old / mu of the whole rollout is not in [low, high]. [MIS]

    Unlike TRL's sequence_mask: what is within keeps weight 1, not pi_old / mu, and a bound below.

    Args:
      over: "product" of the steps' ratios, the weight of the sequence; or their "geometric_mean",
        which does not widen with the length and takes bounds near 1.

    Raises:
      ValueError: Unless 0 < low < 1 < high and `over` is known; on loss, without the sampler's
        log-probs.
    """
    if not 0 < low < 1 < high or over not in OVER:
        raise ValueError(
            f"mask_mismatched_rollouts needs 0 < low < 1 < high and over in {OVER}, "
            f"got {low}, {high} and {over!r}"
        )

    def loss(terms: StepTerms) -> StepTerms:
        mismatch = _mismatch(terms, "mask_mismatched_rollouts").double()
        whole = mismatch.sum(dim=1, keepdim=True)
        if over == "geometric_mean":
            whole = mean_over_steps(mismatch, terms.mask)
        ratio = exp_log_ratio(whole)
        kept = (ratio >= low) & (ratio <= high)
        return _weigh(terms, kept.to(terms.advantage.dtype).expand(terms.mask.shape))

    link = Link(
        "mask_mismatched_rollouts", {"low": low, "high": high, "over": over}, "ratio", "correction"
    )
    return loss_link(link, loss)


def _mismatch(terms: StepTerms, name: str) -> Float[Tensor, "rollout step"]:
    """Returns log(pi_old / mu); raises if the sampler's log-probs were not given."""
    if terms.mismatch is None:
        raise ValueError(f"{name} needs behavior_logp: what the sampler recorded")
    return terms.mismatch


def _weigh(terms: StepTerms, weight: Float[Tensor, "rollout step"]) -> StepTerms:
    """Returns the terms with their advantages weighed, and what has been weighed so far."""
    before = terms.mismatch_weight
    return replace(
        terms,
        advantage=terms.advantage * weight.to(terms.advantage.dtype),
        mismatch_weight=weight if before is None else before * weight,
    )
