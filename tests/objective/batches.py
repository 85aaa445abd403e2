"""Ragged batches of rollouts for the laws of the objective, and a way to evaluate one."""

from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from grpo.objective.algorithms import (
    awm,
    cispo,
    dapo,
    dr_grpo,
    flow_grpo,
    gmpo,
    grpo,
    gspo,
    gspo_token,
    luspo,
    rloo,
    sapo,
    translation_grpo,
    two_grpo,
)
from grpo.objective.base import Objective, assign_credit, chain, loss_terms, scalar_loss
from grpo.objective.penalty import add_entropy_bonus, penalize_kl
from grpo.objective.trust import mask_mismatched_rollouts, truncate_mismatch
from grpo.objective.weight import keep_extreme_rollouts
from grpo.types import Credit, PartScores, Rollouts, StepTerms

OBJECTIVES: dict[str, Objective] = {
    "grpo": grpo(beta=0.05),
    "dr_grpo": dr_grpo(horizon=8),
    "dapo": dapo(),
    "rloo": rloo(),
    "gspo": gspo(),
    "gspo_token": gspo_token(),
    "two_grpo": two_grpo(),
    "rloo_k2": chain(rloo(), penalize_kl(0.1, "k2")),
    "rloo_entropy": chain(rloo(), add_entropy_bonus(0.05)),
    "cispo": cispo(),
    "sapo": sapo(),
    "gmpo": gmpo(),
    "luspo": luspo(),
    "translation_grpo": translation_grpo(),
    "flow_grpo": flow_grpo(dimensions=3),
    "awm": awm(dimensions=3),
    "pods": chain(dapo(), keep_extreme_rollouts(3)),
    "corrected": chain(truncate_mismatch(1.1), mask_mismatched_rollouts(0.8, 1.2), rloo()),
}


@st.composite
def ragged_rollouts(draw: Any, *, binary: bool = False) -> Rollouts:
    """Draws groups of 2 to 6 rollouts of 1 to 7 steps, in shuffled order."""
    sizes = draw(st.lists(st.integers(2, 6), min_size=1, max_size=4))
    group = torch.repeat_interleave(torch.arange(len(sizes)) * 7 + 3, torch.tensor(sizes))
    count = len(group)
    group = group[torch.tensor(draw(st.permutations(range(count))))]
    lengths = torch.tensor(draw(st.lists(st.integers(1, 7), min_size=count, max_size=count)))
    values = st.sampled_from([0.0, 1.0]) if binary else st.floats(-2, 2, width=32)
    reward = torch.tensor(draw(st.lists(values, min_size=count, max_size=count)))
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    logp = -torch.rand(mask.shape, generator=generator) - 0.1
    return Rollouts(
        group=group, reward=reward, outcome=reward.clone(), mask=mask, behavior_logp=logp * mask
    )


def with_parts(rollouts: Rollouts, seed: int) -> Rollouts:
    """Returns rollouts with 0 to 3 parts each, of which several may end at one step."""
    generator = torch.Generator().manual_seed(seed)
    share = torch.rand(len(rollouts.mask), 3, generator=generator)
    last = (share * rollouts.mask.sum(dim=1, keepdim=True)).long()
    is_part = torch.rand(share.shape, generator=generator) < 0.7
    score = torch.randint(3, share.shape, generator=generator) / 2
    return replace(rollouts, parts=PartScores(torch.where(is_part, last, -1), score))


def nearby(rollouts: Rollouts, seed: int, spread: float = 0.2) -> Tensor:
    """Returns log-probs near the behavior's, as after some updates."""
    generator = torch.Generator().manual_seed(seed)
    noise = spread * torch.randn(rollouts.mask.shape, generator=generator)
    return (rollouts.behavior_logp + noise).double()


def credit_of(objective: Objective, rollouts: Rollouts) -> Credit:
    """Returns the credit of a whole batch."""
    generator = torch.Generator().manual_seed(0)
    return assign_credit(objective, rollouts, objective.init(), generator)[0]


def loss_of(
    objective: Objective,
    rollouts: Rollouts,
    logp: Tensor,
    *,
    credit: Credit | None = None,
    rows: Tensor | None = None,
    mismatch: float = 0.0,
) -> Tensor:
    """Returns the scalar loss of some rows, reference = proximal - 0.1.

    Args:
      mismatch: The sampler's log-prob is the proximal one times 1 - mismatch.
    """
    credit = credit or credit_of(objective, rollouts)
    kept = torch.arange(len(logp)) if rows is None else rows
    part = Credit(advantage=credit.advantage[kept].double(), weight=credit.weight[kept].double())
    proximal_logp = rollouts.behavior_logp[kept].double()
    terms = loss_terms(
        objective,
        logp=logp[kept],
        proximal_logp=proximal_logp,
        reference_logp=proximal_logp - 0.1,
        behavior_logp=proximal_logp * (1 - mismatch),
        entropy=-logp[kept],
        credit=part,
    )
    return scalar_loss(terms, part)


def gradient_of(
    objective: Objective, rollouts: Rollouts, logp: Tensor, *, mismatch: float = 0.0
) -> Tensor:
    """Returns d loss / d logp."""
    leaf = logp.clone().requires_grad_()
    loss_of(objective, rollouts, leaf, mismatch=mismatch).backward()
    assert leaf.grad is not None
    return leaf.grad


def bare_terms() -> StepTerms:
    """Returns terms of one step without what only some links need, such as a reference."""
    zeros = torch.zeros(1, 1)
    mask = torch.ones(1, 1, dtype=torch.bool)
    return StepTerms(logp=zeros, log_ratio=zeros, advantage=zeros, mask=mask, loss=zeros)
