"""KL estimators, links that penalize divergence from a reference policy, an entropy bonus."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor

from grpo.objective.base import (
    LARGEST_LOG_RATIO,
    Objective,
    credit_link,
    exp_log_ratio,
    loss_link,
    mean_over_steps,
)
from grpo.objective.link import Kind, Link, Setting
from grpo.types import Credit, Rollouts, StepTerms

PerStep = Float[Tensor, "rollout step"]
CONTRAST = "contrast_implicit_policies"
NORMALIZED = "normalize_log_ratio"
EXACT = "exact"  # an estimator of penalize_kl
OVER = ("steps", "rollout")  # what penalize_kl takes one difference of log-probs of


def k1(logp: PerStep, reference_logp: PerStep, mask: Bool[Tensor, "rollout step"]) -> PerStep:
    """Returns -d, d = reference_logp - logp; E = KL(pi || ref). For rewards, not for losses."""
    return -_difference(logp, reference_logp, mask)


def k2(logp: PerStep, reference_logp: PerStep, mask: Bool[Tensor, "rollout step"]) -> PerStep:
    """Returns d^2 / 2: a biased estimate whose gradient as a loss is that of KL(pi || ref)."""
    return _difference(logp, reference_logp, mask) ** 2 / 2


def k3(logp: PerStep, reference_logp: PerStep, mask: Bool[Tensor, "rollout step"]) -> PerStep:
    """Returns exp(d) - d - 1; E = KL(pi || ref); gradient as a loss: of KL(ref || pi).

    [Schulman, 2020]
    """
    # d is clamped in both terms: with exp clamped alone, -d would push logp away from reference.
    d = _difference(logp, reference_logp, mask).clamp(max=LARGEST_LOG_RATIO)
    return exp_log_ratio(d) - d - 1


def k3_mirrored(
    logp: PerStep, reference_logp: PerStep, mask: Bool[Tensor, "rollout step"]
) -> PerStep:
    """Returns exp(-d) + d - 1: `k3` with both policies exchanged. [Garcia-Estrada et al., 2026]

    E = chi^2(pi || ref) - KL(pi || ref); gradient as a loss: of chi^2(pi || ref) / 2.
    """
    return k3(reference_logp, logp, mask)


LOSS_ESTIMATORS: dict[str, Callable[[PerStep, PerStep, Tensor], PerStep]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k3_mirrored": k3_mirrored,
}


def penalize_kl(beta: float, estimator: str = "k3", over: str = "steps") -> Objective:
    """Adds beta * k(logp, reference_logp) to every computed step's loss. [Shao et al., 2024, eq. 4]

    The gradient of k2 is that of KL(pi || ref), and of k3 that of KL(ref || pi). The gradient of k1
    is zero in expectation, so that rule U35 refuses it; see docs/methods/kl.md. "exact" is the
    closed-form KL of Gaussian steps, per dimension. [Liu et al., 2025, Flow-GRPO, eq. 13]

    Args:
      over: "steps" estimates at every step; "rollout" puts the mean log-prob of a rollout's steps
        in the place of each, so that k is no estimate of a KL. [Garcia-Estrada et al., 2026]

    Raises:
      ValueError: If `beta` is negative, `estimator` or `over` is unknown or they do not go
        together; on loss, without a reference.
    """
    if beta < 0 or estimator not in {*LOSS_ESTIMATORS, EXACT}:
        raise ValueError(
            f"penalize_kl needs beta >= 0 and estimator in {sorted({*LOSS_ESTIMATORS, EXACT})}, "
            f"got {beta} and {estimator!r}"
        )
    if over not in OVER or (estimator == EXACT and over != "steps"):
        raise ValueError(
            f"penalize_kl needs over in {OVER}, and steps with estimator exact, got {over!r}"
        )

    def loss(terms: StepTerms) -> StepTerms:
        if beta == 0:
            return terms
        if terms.reference_logp is None:
            raise ValueError(
                "penalize_kl needs reference_logp: compute it under the reference policy, or set "
                "beta to 0"
            )
        if estimator == EXACT:
            exact = kl_per_dimension(terms, terms.reference_kl, "penalize_kl")
            return terms.with_loss(beta * exact)
        logp, reference_logp = terms.logp, terms.reference_logp
        if over == "rollout":
            logp = mean_over_steps(logp, terms.mask).expand(terms.mask.shape)
            reference_logp = mean_over_steps(reference_logp, terms.mask).expand(terms.mask.shape)
        kl = LOSS_ESTIMATORS[estimator](logp, reference_logp, terms.mask)
        return terms.with_loss(beta * kl)

    kinds: tuple[Kind, ...] = (
        ("penalty", "exact divergence") if estimator == EXACT else ("penalty",)
    )
    settings: dict[str, Setting] = {"beta": beta, "estimator": estimator, "over": over}
    return loss_link(Link("penalize_kl", settings, *kinds), loss)


def subtract_kl_from_reward(beta: float) -> Objective:
    """A_i = r_i - beta * sum_t k1_it under the sampling policy; comes before the baseline.

    Raises:
      ValueError: If `beta` is negative; on credit, without a reference.
    """
    if beta < 0:
        raise ValueError(f"subtract_kl_from_reward needs beta >= 0, got {beta}")

    def credit(before: Credit, rollouts: Rollouts, generator: Generator) -> Credit:
        if rollouts.reference_logp is None:
            raise ValueError("subtract_kl_from_reward needs reference_logp of the rollouts")
        kl = k1(rollouts.behavior_logp, rollouts.reference_logp, rollouts.mask)
        charge = beta * kl.double().sum(dim=1, keepdim=True).to(before.advantage.dtype)
        return replace(before, advantage=(before.advantage - charge) * rollouts.mask)

    return credit_link(
        Link("subtract_kl_from_reward", {"beta": beta}, "penalty", "reward penalty"), credit
    )


def add_entropy_bonus(weight: float) -> Objective:
    """Adds -weight * H to every computed step's loss. [Mnih et al., 2016]

    H = -sum_k p_k log p_k in nats is exact, from all logits of a step at the temperature of
    sampling. verl's `entropy_coeff` is `weight`.

    Raises:
      ValueError: If `weight` is negative or infinite; on loss, without entropies.
    """
    if not 0 <= weight < math.inf:
        raise ValueError(f"add_entropy_bonus needs a finite weight >= 0, got {weight}")

    def loss(terms: StepTerms) -> StepTerms:
        if weight == 0:
            return terms
        if terms.entropy is None:
            raise ValueError(
                "add_entropy_bonus needs the entropy of steps: compute it from their logits, or "
                "set weight to 0"
            )
        return terms.with_loss(-weight * terms.entropy)

    return loss_link(Link("add_entropy_bonus", {"weight": weight}, "entropy bonus"), loss)


def _difference(
    logp: PerStep, reference_logp: PerStep, mask: Bool[Tensor, "rollout step"]
) -> PerStep:
    """Returns d = reference_logp - logp, and 0 off the mask."""
    # The inputs are masked, not the result: 0 * nan would flow back through exp.
    return torch.where(mask, reference_logp, 0.0) - torch.where(mask, logp, 0.0)


def needs_reference(objective: Objective) -> bool:
    """Returns whether a link of the objective needs log-probs under the reference policy."""
    links = objective.links
    return scores_reference_of_kept(links) or scores_reference_of_all(links)


def scores_reference_of_kept(links: Sequence[Link]) -> bool:
    """Returns whether the loss of trained rollouts needs log-probs under the reference policy."""
    return any(
        "reference ratio" in link.kinds or ("penalty" in link.kinds and link.settings.get("beta"))
        for link in links
        if "reward penalty" not in link.kinds
    )


def scores_reference_of_all(links: Sequence[Link]) -> bool:
    """Returns whether the rewards of all rollouts need log-probs under the reference policy."""
    return any("reward penalty" in link.kinds and link.settings.get("beta") for link in links)


def needs_entropy(objective: Objective) -> bool:
    """Returns whether a link of the objective needs the entropies of steps."""
    return any(
        "entropy bonus" in link.kinds and bool(link.settings["weight"]) for link in objective.links
    )


def penalizes_reward(objective: Objective) -> bool:
    """Returns whether a link of the objective subtracts a penalty from the reward."""
    return any(
        "reward penalty" in link.kinds and bool(link.settings.get("beta"))
        for link in objective.links
    )


def needs_divergence(objective: Objective) -> bool:
    """Returns whether a link of the objective needs the means of Gaussian steps."""
    return any("exact divergence" in link.kinds for link in objective.links)


def kl_per_dimension(
    terms: StepTerms, kl: Float[Tensor, "rollout step"] | None, link: str
) -> Float[Tensor, "rollout step"]:
    """Returns a divergence per dimension of a step, in nats.

    Raises:
      ValueError: If `kl` is None.
    """
    if kl is None:
        raise ValueError(f"{link} needs exact divergences: Gaussian steps, of a denoising policy")
    return kl / terms.dimensions
