"""Exact divergences of Gaussian steps: which links read them."""

from jaxtyping import Float
from torch import Tensor

from grpo.objective.base import Objective
from grpo.types import StepTerms

CONTRAST = "contrast_implicit_policies"
NORMALIZED = "normalize_log_ratio"
EXACT = "exact"  # an estimator of penalize_kl


def needs_divergence(objective: Objective) -> bool:
    """Returns whether a link of the objective needs the means of steps, not log-probs alone."""
    return any("exact divergence" in link.kinds for link in objective.links)


def kl_per_dimension(
    terms: StepTerms, kl: Float[Tensor, "rollout step"] | None, link: str
) -> Float[Tensor, "rollout step"]:
    """Returns a divergence per dimension of a step, in nats.

    Raises:
      ValueError: If there is none.
    """
    if kl is None:
        raise ValueError(f"{link} needs exact divergences: Gaussian steps, of a denoising policy")
    return kl / terms.dimensions
