"""Links that form, correct and bound importance ratios: averages, mismatch, trust regions."""

from dataclasses import replace
from math import acosh, inf, log

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from grpo.objective.base import (
    Objective,
    chain,
    credit_link,
    exp_log_ratio,
    loss_link,
    mean_over_steps,
    noise_of,
)
from grpo.objective.link import Link
from grpo.objective.penalty import CONTRAST, NORMALIZED, kl_per_dimension
from grpo.objective.weight import weigh_by
from grpo.types import Credit, Rollouts, StepTerms

OVER = ("product", "geometric_mean")
HALVED = acosh(3)  # tau |rho - 1| at which a soft gate halves the gradient


def average_ratio_over_rollout() -> Objective:
    """s_i = exp(mean_t log rho_it), the same on all steps of a rollout. [Zheng et al., 2025, eq. 7]

    The mean is over the computed steps: steps of weight 0 are excluded (rule U9).
    """

    def loss(terms: StepTerms) -> StepTerms:
        mean = mean_over_steps(terms.log_ratio, terms.mask)
        return replace(terms, log_ratio=torch.where(terms.mask, mean, 0.0))

    return loss_link(
        Link("average_ratio_over_rollout", {}, "ratio", "rollout ratio", "rollout level"), loss
    )


def average_ratio_keeping_token_gradient() -> Objective:
    """s_it = sg[s_i] pi_it / sg[pi_it], with a gradient per token. [Zheng et al., 2025, eq. 13]"""

    def loss(terms: StepTerms) -> StepTerms:
        mean = mean_over_steps(terms.log_ratio, terms.mask).detach()
        token = terms.logp - terms.logp.detach()
        return replace(terms, log_ratio=torch.where(terms.mask, mean + token, 0.0))

    return loss_link(
        Link("average_ratio_keeping_token_gradient", {}, "ratio", "rollout ratio", "rollout level"),
        loss,
    )


def take_ratio_to_reference() -> Objective:
    """log rho_it = log pi - log pi_ref, in place of log pi - log pi_old. [Garcia-Estrada et al.]

    It comes before other ratio links. A clip then bounds the distance from the base policy in all
    rounds together, and not the size of an update (rule U28).

    Raises:
      ValueError: On loss, without a reference.
    """

    def loss(terms: StepTerms) -> StepTerms:
        if terms.reference_logp is None:
            raise ValueError(
                "take_ratio_to_reference needs reference_logp: compute it under the base policy, "
                "or drop the link"
            )
        to_reference = torch.where(terms.mask, terms.logp - terms.reference_logp, 0.0)
        return replace(terms, log_ratio=to_reference)

    return loss_link(Link("take_ratio_to_reference", {}, "ratio", "reference ratio"), loss)


def scale_log_ratio(dimensions: int) -> Objective:
    """log rho_it / D: the log ratio per dimension of a sample, as in papers on denoising.

    The range of a trust region then bounds the mean over dimensions. [Liu et al., 2025, Flow-GRPO]

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
    """(log rho + KL) s, and a weight of 1 / |dt|: ratios centered at 1 at every noise level.

    The expected log ratio of a Gaussian step whose mean has changed is -KL. A clip is therefore
    active on one side more often than on the other. s is the std of the step, |dt| the decrease of
    its time. Comes after `scale_log_ratio`. [Wang et al., 2025, GRPO-Guard, arXiv 2510.22319]

    Unlike the paper's code: weights are divided by their mean, which preserves the scale of the
    loss.
    """

    def credit(before: Credit, rollouts: Rollouts, generator: Generator) -> Credit:
        return weigh_by(before, rollouts, 1 / noise_of(rollouts, NORMALIZED).size)

    def loss(terms: StepTerms) -> StepTerms:
        kl = kl_per_dimension(terms, terms.proximal_kl, NORMALIZED)
        std = noise_of(terms, NORMALIZED).std.to(kl.device)
        return replace(terms, log_ratio=torch.where(terms.mask, (terms.log_ratio + kl) * std, 0.0))

    link = Link(NORMALIZED, {}, "ratio", "noise weight", "exact divergence")
    return chain(credit_link(link, credit), loss_link(link, loss)._replace(links=()))


def truncate_mismatch(weight_max: float = 2.0) -> Objective:
    """A_it min(pi_old / mu, weight_max), per step. [Yao et al., 2025, TIS]

    Biased, as any per-step weight of a sequence, but with low variance.

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

    Unlike TRL's sequence_mask: kept rollouts have weight 1, not pi_old / mu; there is a lower
    bound.

    Args:
      over: "product" of the steps' ratios, the weight of the sequence; or their "geometric_mean",
        whose spread does not grow with the length, so that bounds near 1 are suitable.

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
        raise ValueError(f"{name} needs behavior_logp, the log-probs that the sampler recorded")
    return terms.mismatch


def _weigh(terms: StepTerms, weight: Float[Tensor, "rollout step"]) -> StepTerms:
    """Returns the terms with advantages times `weight`, and the product of weights so far."""
    before = terms.mismatch_weight
    return replace(
        terms,
        advantage=terms.advantage * weight.to(terms.advantage.dtype),
        mismatch_weight=weight if before is None else before * weight,
    )


def clip_surrogate(low: float = 0.2, high: float = 0.2) -> Objective:
    """-min(rho A, clip(rho, 1 - low, 1 + high) A). [Schulman et al., 2017, eq. 7]

    Raises:
      ValueError: If `low` is not in (0, 1) or `high` is not positive.
    """
    if not 0 < low < 1 or high <= 0:
        raise ValueError(f"clip_surrogate needs 0 < low < 1 and high > 0, got {low} and {high}")

    def loss(terms: StepTerms) -> StepTerms:
        ratio = exp_log_ratio(terms.log_ratio)
        bounded = ratio.clamp(1 - low, 1 + high)
        surrogate = torch.minimum(ratio * terms.advantage, bounded * terms.advantage)
        above = (ratio > 1 + high) & (terms.advantage > 0)
        below = (ratio < 1 - low) & (terms.advantage < 0)
        return replace(terms.with_loss(-surrogate), clipped=above | below)

    return loss_link(
        Link("clip_surrogate", {"low": low, "high": high}, trust_range=min(low, high)), loss
    )


def truncate_ratio(ratio_max: float, ratio_min: float = 0.0) -> Objective:
    """-sg[clip(rho, ratio_min, ratio_max)] A log pi: clipped steps keep a gradient. [CISPO]

    The bounds are values of the ratio, not distances from 1: with `ratio_max` 0.2 all weights would
    be 0.2 even on-policy (rule U13).

    Args:
      ratio_min: 0 bounds the ratio from above only.

    Raises:
      ValueError: Unless 0 <= ratio_min < 1 < ratio_max.
    """
    if ratio_max <= 1:
        raise ValueError(
            "U13: truncate_ratio needs ratio_max > 1, the largest ratio and not a distance from 1, "
            f"got {ratio_max}; take 5.0"
        )
    if not 0 <= ratio_min < 1:
        raise ValueError(f"truncate_ratio needs 0 <= ratio_min < 1, got {ratio_min}")

    def loss(terms: StepTerms) -> StepTerms:
        ratio = exp_log_ratio(terms.log_ratio.detach())
        weight = ratio.clamp(ratio_min, ratio_max)
        after = terms.with_loss(-weight * terms.advantage * terms.logp)
        return replace(after, clipped=(ratio > ratio_max) | (ratio < ratio_min))

    settings = {"ratio_max": ratio_max, "ratio_min": ratio_min}
    narrower = min([log(ratio_max), *([-log(ratio_min)] if ratio_min else [])])
    link = Link("truncate_ratio", settings, trust_range=narrower)
    return loss_link(link, loss)


def gate_ratio_softly(tau_positive: float = 1.0, tau_negative: float = 1.05) -> Objective:
    """-(4 / tau) sigmoid(tau (rho - 1)) A: the gradient decays with the distance from 1. [SAPO]

    Its slope in rho is 1 at rho = 1. A step is reported as clipped where the slope is below 1/2.

    Args:
      tau_positive: For steps with a positive advantage; a larger tau decays faster.
      tau_negative: For the other steps.

    Raises:
      ValueError: If a tau is not positive.
    """
    if tau_positive <= 0 or tau_negative <= 0:
        raise ValueError(
            f"gate_ratio_softly needs positive taus, got {tau_positive} and {tau_negative}"
        )

    def loss(terms: StepTerms) -> StepTerms:
        tau = torch.full_like(terms.log_ratio, tau_negative)
        tau = tau.masked_fill(terms.advantage > 0, tau_positive)
        distance = tau * (exp_log_ratio(terms.log_ratio) - 1)
        gated = 4 / tau * distance.sigmoid()
        return replace(
            terms.with_loss(-gated * terms.advantage), clipped=distance.detach().abs() > HALVED
        )

    settings = {"tau_positive": tau_positive, "tau_negative": tau_negative}
    half_gate = log(1 + HALVED / max(tau_positive, tau_negative))
    link = Link("gate_ratio_softly", settings, trust_range=half_gate)
    return loss_link(link, loss)


def average_clipped_log_ratio(low: float = 0.4, high: float = 0.4) -> Objective:
    """-A exp(mean_t l_it), l the log ratio, one-sidedly clipped by step before the mean. [GMPO]

    l_it = min(log rho_it, high) where A > 0, and max(log rho_it, -low) elsewhere: the pessimistic
    side, as in `clip_surrogate`. The link forms the rollout's ratio itself and cannot be combined
    with another rollout ratio.

    Args:
      low: In nats, as is `high`.

    Raises:
      ValueError: If a bound is not positive.
    """
    if low <= 0 or high <= 0:
        raise ValueError(
            f"average_clipped_log_ratio needs low > 0 and high > 0 nats, got {low} and {high}"
        )

    def loss(terms: StepTerms) -> StepTerms:
        gains, value = terms.advantage > 0, terms.log_ratio
        bounded = torch.where(gains, value.clamp(max=high), value.clamp(min=-low))
        ratio = exp_log_ratio(mean_over_steps(bounded, terms.mask))
        return replace(
            terms.with_loss(-ratio * terms.advantage),
            clipped=(bounded != value) & (terms.advantage != 0),
        )

    settings, narrower = {"low": low, "high": high}, min(low, high)
    link = Link("average_clipped_log_ratio", settings, "rollout level", trust_range=narrower)
    return loss_link(link, loss)


def weigh_log_prob() -> Objective:
    """-A log pi per dimension, without a ratio or a trust region. [Xue et al., 2025, AWM]

    On matched velocities this is A / 2 times their mean squared error. Updates after the first of a
    round are off-policy and not corrected.
    """

    def loss(terms: StepTerms) -> StepTerms:
        return terms.with_loss(-terms.advantage * terms.logp / terms.dimensions)

    return loss_link(Link("weigh_log_prob", {}, trust_range=inf), loss)


def contrast_implicit_policies(beta: float = 1.0, clip: float = 5.0) -> Objective:
    """r |v+ - u|^2 + (1 - r) |v- - u|^2 per dimension, v+- = (1 -+ beta) v_old +- beta v. [NFT]

    r = (1 + a) / 2, a = A / clip within [-1, 1], is the weight of the positive policy v+; 1 - r is
    that of the negative policy v-, the reflection of v+ at the old one. The arm's sampling must set
    `density: matched`: then a log-prob is minus half a squared error and a divergence is half a
    squared distance. Up to a constant the loss is

        beta a |v - u|^2 + beta (beta - a) |v - v_old|^2,

    and it is computed in this form: a weighted error plus a penalty on the divergence from the old
    policy.

    Unlike the paper: times are weighted equally, where its code divides by the error of the clean
    estimate; the old policy is the first of the round, where its code keeps a moving average.

    Raises:
      ValueError: If `beta` or `clip` is not positive; on loss, without exact divergences.
    """
    if beta <= 0 or clip <= 0:
        raise ValueError(f"{CONTRAST} needs beta > 0 and clip > 0, got {beta} and {clip}")

    def loss(terms: StepTerms) -> StepTerms:
        distance = 2 * kl_per_dimension(terms, terms.proximal_kl, CONTRAST)
        error = -2 * terms.logp / terms.dimensions
        followed = (terms.advantage / clip).clamp(-1, 1)
        contrast = beta * followed * error + beta * (beta - followed) * distance
        return replace(terms.with_loss(contrast), clipped=terms.advantage.abs() > clip)

    settings = {"beta": beta, "clip": clip}
    return loss_link(Link(CONTRAST, settings, "exact divergence", trust_range=inf), loss)


def trusted_ranges(objective: Objective) -> dict[str, float]:
    """Returns the smallest |log ratio| in nats that each trust region changes (rule U27)."""
    return {link.name: link.trust_range for link in objective.links if link.trust_range is not None}
