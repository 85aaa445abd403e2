"""The importance ratio: of a whole rollout in place of its steps' own, or per dimension."""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor

from grpo.objective.base import Objective, chain, credit_link, loss_link, noise_of
from grpo.objective.divergence import NORMALIZED, kl_per_dimension
from grpo.objective.link import Link
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
