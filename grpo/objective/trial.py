"""A trial of a link on a small batch, which finds a link that returns the wrong thing."""

import torch
from torch import Tensor

from grpo.objective.base import Objective, loss_terms, scalar_loss
from grpo.types import ActionChunks, Credit, PartScores, Rollouts, StepNoise, StepTerms

LENGTHS = 5, 3, 4, 1  # steps of the rollouts of a group, as far as it has as many


def try_link(link: Objective, group_size: int) -> str | None:
    """Returns what is wrong with a link's results, or None.

    The batch has a group of different rewards and a uniform one, and every field that some policy
    has. A ValueError of the link is no mistake: a link may refuse a batch.

    Args:
      group_size: Rollouts of each group, at least 2.
    """
    rollouts = _rollouts(group_size)
    mask = rollouts.mask
    start = Credit(advantage=rollouts.reward[:, None] * mask, weight=mask.float())
    generator = torch.Generator().manual_seed(0)
    try:
        credit, _ = link.credit(start, rollouts, link.init(), generator)
        if not isinstance(credit, Credit):
            return f"must return a Credit, returns {type(credit).__name__}"
        for name, value in (("advantage", credit.advantage), ("weight", credit.weight)):
            if wrong := _fault(value, mask):
                return f"must return a Credit whose {name} {wrong}"
        terms = _terms(link, rollouts)
        if not isinstance(terms, StepTerms):
            return f"must return StepTerms, returns {type(terms).__name__}"
        if wrong := _fault(terms.loss, mask):
            return f"must return StepTerms whose loss {wrong}"
        scalar_loss(terms, start)
    except ValueError:
        return None
    return None


def _fault(value: object, mask: Tensor) -> str | None:
    """Returns what a result per step must be, if it is not."""
    if not isinstance(value, Tensor):
        return f"is a tensor, returns {type(value).__name__}"
    if value.shape != mask.shape:
        return f"has the shape [rollout, step], {[*mask.shape]} here, returns {[*value.shape]}"
    return None if value[mask].isfinite().all() else "is finite, returns NaN or infinity"


def _rollouts(group_size: int) -> Rollouts:
    """Returns two groups with a value in every field."""
    count, steps = 2 * group_size, max(LENGTHS)
    rows = torch.arange(count)
    lengths = torch.tensor([LENGTHS[row % group_size % len(LENGTHS)] for row in rows.tolist()])
    mask = torch.arange(steps) < lengths[:, None]
    reward = ((rows % 2 == 0) | (rows >= group_size)).float()
    ones = torch.ones(mask.shape)
    return Rollouts(
        group=rows // group_size,
        reward=reward,
        outcome=reward,
        mask=mask,
        behavior_logp=-ones,
        reference_logp=-1.1 * ones,
        noise=StepNoise(scale=ones, std=ones, size=0.1 * ones),
        variant=rows % 2,
        chunks=ActionChunks(
            phase=torch.where(mask, rows[:, None] % 2, -1),
            action=torch.rand((*mask.shape, 2), generator=torch.Generator().manual_seed(0)),
            is_executed=mask[:, :, None].expand(*mask.shape, 2),
        ),
        improvement=0.1 * reward,
        prompt_weight=torch.ones(count),
        parts=PartScores(end=(lengths - 1)[:, None], score=reward[:, None]),
    )


def _terms(link: Objective, rollouts: Rollouts) -> StepTerms:
    """Returns the terms of a link after credit of 1 and -1."""
    mask = rollouts.mask
    sign = torch.where(rollouts.reward > 0, 1.0, -1.0)[:, None]
    logp = (-1.05 * torch.ones(mask.shape)).requires_grad_()
    divergence = 0.01 * logp**2
    return loss_terms(
        link,
        logp=logp,
        proximal_logp=rollouts.behavior_logp,
        credit=Credit(advantage=sign * mask, weight=mask.float()),
        reference_logp=rollouts.reference_logp,
        behavior_logp=rollouts.behavior_logp,
        proximal_kl=divergence,
        reference_kl=divergence,
        entropy=-logp,
        noise=rollouts.noise,
    )
