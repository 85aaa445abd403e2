"""Per-phase metrics of a robot's task: gradient signal, and the chunks that were trained."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from scipy.stats import spearmanr
from torch import Generator, Tensor

from grpo.modalities.action_chunks.trajectories import ChunkTrajectory
from grpo.modalities.policy import Policy
from grpo.modalities.shared.recomputation import saved_bytes
from grpo.objective.advantage import (
    center_by_group_mean,
    is_uniform,
    rollout_advantage,
    scale_by_group_std,
)
from grpo.objective.base import State, assign_credit, chain
from grpo.objective.chunks import SOLVED, neyman_allocation, phase_contrast
from grpo.types import Rollouts

MEASURED_CHUNKS = 64  # chunks per phase whose gradients are computed one by one
Z_SCORE = chain(center_by_group_mean(), scale_by_group_std())


@dataclass(frozen=True, kw_only=True)
class PhaseMetrics:
    """Training statistics of one phase in a round; a row of phases.csv."""

    phase: str
    chunks: int  # in rollouts whose group has both outcomes
    trained_chunks: int
    trained_fraction_of_successes: float | None  # of the successes' chunks; None: no such chunks
    trained_fraction_of_failures: float | None
    contrast: float | None  # C_c of this round; None: the phase is not in both outcomes
    keep: float | None  # p_c at the end of the round; None: no link selects by phase


@dataclass(frozen=True, kw_only=True)
class PhaseProfile:
    """Gradient deviation of a phase's chunks and its cheap proxy, the contrast."""

    phase: str
    chunks: int  # in rollouts whose group has both outcomes
    contrast: float | None  # C_c; None: the phase is not in both outcomes
    gradient_deviation: float | None  # sqrt(V_c); None: no chunks


@dataclass(frozen=True, kw_only=True)
class _Gradients:
    """Statistics of the gradients of some chunks, computed one by one."""

    deviation: float | None  # sqrt(V) of advantage-weighted gradients; None: no chunks
    norms: list[float]  # of grad log pi, without advantages
    saved_bytes: int  # activation memory, summed over all forward passes


def phase_metrics(
    rollouts: Rollouts,
    trained: Bool[Tensor, "rollout step"],
    state: State,
    names: Sequence[str],
) -> list[PhaseMetrics]:
    """Returns one row per phase.

    Args:
      trained: The steps with weight in the round's updates.
      state: The objective's state after the round.
    """
    assert rollouts.chunks is not None
    phase = rollouts.chunks.phase
    mixed = ~is_uniform(rollouts.outcome, rollouts.group)[:, None] & rollouts.mask
    solved = (rollouts.outcome > SOLVED)[:, None]
    contrast = phase_contrast(rollouts).tolist()
    keep = next((each for each in state.values() if "keep_0" in each), {})
    rows = []
    for number, name in enumerate(names):
        here = mixed & (phase == number)
        rows.append(
            PhaseMetrics(
                phase=name,
                chunks=int(here.sum()),
                trained_chunks=int((trained & (phase == number)).sum()),
                trained_fraction_of_successes=_share(trained, here & solved),
                trained_fraction_of_failures=_share(trained, here & ~solved),
                contrast=_number(contrast[number]),
                keep=keep.get(f"keep_{number}"),
            )
        )
    return rows


def profile_phases(
    policy: Policy[Any],
    trajectory: ChunkTrajectory,
    rollouts: Rollouts,
    names: Sequence[str],
    generator: Generator,
) -> dict[str, object]:
    """Returns the `PhaseProfile` and Neyman share of every phase, and summary statistics.

    The statistics are the rank correlation of contrast and gradient deviation, the activation
    memory per chunk, and `variance_by_gradient` = mean(norm)^2 / mean(norm^2) over the norms of
    grad log pi. The latter is the variance of sampling chunks by gradient norm relative to uniform
    masking, a lower bound for every selection by phase or state.

    V_c is the trace of the covariance of A_i grad log pi(a_ik | s_ik) over chunks k of phase c, on
    MEASURED_CHUNKS of them. [PCM, theorem 1; its proxy C_c: lemma 2]
    """
    credit, _ = assign_credit(Z_SCORE, rollouts, Z_SCORE.init(), generator)
    advantage = rollout_advantage(credit, rollouts)
    contrast = phase_contrast(rollouts).tolist()
    rows, total, norms = [], 0, list[float]()
    for number, name in enumerate(names):
        here = (trajectory.chunks.phase == number) & (advantage != 0)[:, None]
        found = here.nonzero()
        chosen = found[torch.randperm(len(found), generator=generator)[:MEASURED_CHUNKS]]
        gradients = _measure_gradients(policy, trajectory, chosen, advantage)
        total, norms = total + gradients.saved_bytes, norms + gradients.norms
        rows.append(
            PhaseProfile(
                phase=name,
                chunks=len(found),
                contrast=_number(contrast[number]),
                gradient_deviation=gradients.deviation,
            )
        )
    return {
        "phases": [
            {**vars(row), "neyman_share": share}
            for row, share in zip(rows, _neyman_shares(rows), strict=True)
        ],
        "contrast_rank_correlation": _rank_correlation(rows),
        "variance_by_gradient": evenness(norms),
        "activation_bytes_per_chunk": total // max(len(norms), 1),
    }


def evenness(sizes: Sequence[float]) -> float | None:
    """Returns mean^2 / mean of squares: 1 if all sizes are equal; None without sizes."""
    known = torch.tensor(sizes, dtype=torch.float64)
    return float(known.mean() ** 2 / known.square().mean()) if len(known) else None


def _measure_gradients(
    policy: Policy[Any],
    trajectory: ChunkTrajectory,
    chosen: Int[Tensor, "chunk 2"],
    advantage: Float[Tensor, " rollout"],
) -> _Gradients:
    parameters = [each for each in policy.model.parameters() if each.requires_grad]
    mean = [torch.zeros_like(each, dtype=torch.float64) for each in parameters]
    norms, squares, total = list[float](), 0.0, 0
    for row, step in chosen.tolist():
        part = trajectory.select(torch.tensor([row]), step + 1)
        needed = (torch.arange(step + 1) == step)[None]
        with saved_bytes(policy.model) as saved:
            logp = policy.log_prob(part, needed).sum()
        total += saved.total
        gradients = torch.autograd.grad(logp, parameters, allow_unused=True)
        known = [None if each is None else each.double() for each in gradients]
        square = sum(float(each.square().sum()) for each in known if each is not None)
        weight = float(advantage[row])
        for average, gradient in zip(mean, known, strict=True):
            if gradient is not None:
                average += weight * gradient / len(chosen)
        norms.append(square**0.5)
        squares += weight**2 * square / len(chosen)
    variance = squares - sum(float(each.square().sum()) for each in mean)
    deviation = max(variance, 0.0) ** 0.5 if norms else None
    return _Gradients(deviation=deviation, norms=norms, saved_bytes=total)


def _neyman_shares(rows: Sequence[PhaseProfile]) -> list[float]:
    """Returns each phase's share of a budget under Neyman allocation, which minimizes variance."""
    counts = torch.tensor([each.chunks for each in rows])
    deviations = torch.tensor([each.gradient_deviation or 0.0 for each in rows]).double()
    if not (counts * deviations).any():
        return [0.0] * len(rows)
    shares: list[float] = neyman_allocation(1.0, counts, deviations).tolist()
    return shares


def _rank_correlation(rows: Sequence[PhaseProfile]) -> float | None:
    """Returns Spearman's rank correlation; None with fewer than three phases that have both."""
    pairs = [
        (each.contrast, each.gradient_deviation)
        for each in rows
        if each.contrast is not None and each.gradient_deviation is not None
    ]
    if len(pairs) < 3 or any(len(set(side)) == 1 for side in zip(*pairs)):
        return None
    return float(spearmanr(*zip(*pairs)).statistic)


def _share(trained: Bool[Tensor, "rollout step"], of: Tensor) -> float | None:
    return float(trained[of].double().mean()) if of.any() else None


def _number(value: float) -> float | None:
    return None if value != value else value  # NaN: not measured
