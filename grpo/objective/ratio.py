"""Links that build and correct importance ratios: averages over a rollout, engine mismatch."""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor

from grpo.objective.base import Objective, chain, credit_link, exp_log_ratio, loss_link, noise_of
from grpo.objective.link import Link
from grpo.objective.penalty import NORMALIZED, kl_per_dimension
from grpo.objective.weight import weigh_by
from grpo.types import Credit, Rollouts, StepTerms


def average_ratio_over_rollout() -> Objective:
    """s_i = exp(mean_t log rho_it), the same on all steps of a rollout. [Zheng et al., 2025, eq. 7]

    The mean runs over the steps that are computed: steps of weight 0 do not enter it (rule U9).
    """

    def loss(terms: StepTerms) -> StepTerms:
        mean = mean_over_steps(terms.log_ratio, terms.mask)
        return replace(terms, log_ratio=torch.where(terms.mask, mean, 0.0))

    return loss_link(
        Link("average_ratio_over_rollout", {}, "ratio", "rollout ratio", "rollout level"), loss
    )


def average_ratio_keeping_token_gradient() -> Objective:
    """s_it = sg[s_i] pi_it / sg[pi_it]: a token's own gradient. [Zheng et al., 2025, eq. 13]"""

    def loss(terms: StepTerms) -> StepTerms:
        mean = mean_over_steps(terms.log_ratio, terms.mask).detach()
        token = terms.logp - terms.logp.detach()
        return replace(terms, log_ratio=torch.where(terms.mask, mean + token, 0.0))

    return loss_link(
        Link("average_ratio_keeping_token_gradient", {}, "ratio", "rollout ratio", "rollout level"),
        loss,
    )


def scale_log_ratio(dimensions: int) -> Objective:
    """log rho_it / D: the log-density per dimension of a sample, as denoising papers print it.

    A trust region's range is then one of the mean over dimensions. [Liu et al., 2025, Flow-GRPO]

    Raises:
      ValueError: If `dimensions` is not positive.
    """
    if dimensions <= 0:
        raise ValueError(f"scale_log_ratio needs dimensions > 0, got {dimensions}")
    return loss_link(
        Link("scale_log_ratio", {"dimensions": dimensions}, "ratio"),
        lambda terms: replace(terms, log_ratio=terms.log_ratio / dimensions, dimensions=dimensions),
    )


def normalize_log_ratio() -> Objective:
    """(log rho + KL) s, and a weight of 1 / |dt|: ratios around 1, alike at every noise level.

    The log ratio of a Gaussian step whose mean has moved is -KL in expectation, so that a clip
    answers on one side more than on the other; s is the step's deviation, |dt| by how much its time
    falls. Stands behind `scale_log_ratio`. Unlike its code: weights are over their mean, so that
    the loss keeps its size. [Wang et al., 2025, GRPO-Guard, arXiv 2510.22319]
    """

    def credit(before: Credit, rollouts: Rollouts, generator: Generator) -> Credit:
        return weigh_by(before, rollouts, 1 / noise_of(rollouts, NORMALIZED).size)

    def loss(terms: StepTerms) -> StepTerms:
        kl = kl_per_dimension(terms, terms.proximal_kl, NORMALIZED)
        std = noise_of(terms, NORMALIZED).std.to(kl.device)
        return replace(terms, log_ratio=torch.where(terms.mask, (terms.log_ratio + kl) * std, 0.0))

    link = Link(NORMALIZED, {}, "ratio", "noise weight", "exact divergence")
    return chain(credit_link(link, credit), loss_link(link, loss)._replace(links=()))


def mean_over_steps(
    value: Float[Tensor, "rollout step"], mask: Bool[Tensor, "rollout step"]
) -> Float[Tensor, "rollout 1"]:
    """Returns the mean over a rollout's steps, accumulated in float64."""
    total = torch.where(mask, value, 0.0).double().sum(dim=1, keepdim=True)
    return (total / mask.sum(dim=1, keepdim=True).clamp(min=1)).to(value.dtype)


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
