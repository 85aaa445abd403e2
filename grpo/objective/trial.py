"""A trial of links on a small batch, which finds one that returns the wrong thing."""

import torch
from torch import Tensor

from grpo.errors import ShapeError
from grpo.objective.base import Objective, first_credit, loss_terms
from grpo.types import ActionChunks, Credit, PartScores, Rollouts, StepNoise, StepTerms

LENGTHS = 5, 3, 4, 1  # steps of the rollouts of a group, as far as it has as many


def try_objective(objective: Objective, group_size: int) -> str | None:
    """Returns what is wrong with the results of an objective's last link, or None.

    The batch has a group of different rewards and a uniform one, and every field that some policy
    has. An exception that depends on values or sizes is no mistake: a link may refuse a batch.

    Args:
      objective: An arm's links up to one that may be wrong.
      group_size: Rollouts of each group, at least 2.
    """
    rollouts = _rollouts(group_size)
    mask = rollouts.mask
    start, generator = first_credit(rollouts), torch.Generator().manual_seed(0)
    try:
        credit, _ = objective.credit(start, rollouts, objective.init(), generator)
        if not isinstance(credit, Credit):
            return f"must return a Credit, returns {type(credit).__name__}"
        if wrong := _fault(credit.weight, mask):
            return f"must return a Credit whose weight {wrong}"
        if wrong := _fault(credit.advantage, mask & (credit.weight != 0)):
            return f"must return a Credit whose advantage {wrong}"
        terms = _terms(objective, rollouts, credit)
        if not isinstance(terms, StepTerms):
            return f"must return StepTerms, returns {type(terms).__name__}"
        if wrong := _fault(terms.loss, terms.mask):
            return f"must return StepTerms whose loss {wrong}"
    except ShapeError as error:
        return str(error)
    except (ValueError, IndexError, RuntimeError):
        return None
    return None


def _fault(value: object, where: Tensor) -> str | None:
    """Returns what a result per step must be, if it is not.

    Args:
      where: Of shape [rollout, step]; other values are not used.
    """
    if not isinstance(value, Tensor):
        return f"is a tensor, returns {type(value).__name__}"
    if value.shape != where.shape:
        return f"has the shape [rollout, step], {[*where.shape]} here, returns {[*value.shape]}"
    if not value.is_floating_point():
        return f"is floats, returns {value.dtype}"
    return None if value[where].isfinite().all() else "is finite, returns NaN or infinity"


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


def _terms(objective: Objective, rollouts: Rollouts, credit: Credit) -> StepTerms:
    logp = (-1.05 * torch.ones(rollouts.mask.shape)).requires_grad_()
    divergence = 0.01 * logp**2
    return loss_terms(
        objective,
        logp=logp,
        proximal_logp=rollouts.behavior_logp,
        credit=credit,
        reference_logp=rollouts.reference_logp,
        behavior_logp=rollouts.behavior_logp,
        proximal_kl=divergence,
        reference_kl=divergence,
        entropy=-logp,
        noise=rollouts.noise,
    )
