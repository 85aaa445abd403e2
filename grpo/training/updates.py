"""One round of policy updates: credit once per batch, then microbatches of what has weight."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor
from torch.optim import Optimizer

from grpo.errors import DivergedError
from grpo.modalities.base import Policy, Trajectory, counted_together
from grpo.modalities.shared.directories import gather_trained, read_trainable, write_trained
from grpo.modalities.shared.optimizer import (
    PreciseAdamW,
    require_finite_numbers,
    stepped_by,
    take_step,
)
from grpo.objective.base import Objective, State, loss_terms, scalar_loss
from grpo.objective.penalty import needs_divergence
from grpo.runtime.artifacts.files import Scratch, read_json, write_json
from grpo.runtime.ranks import all_reduce_max, full_tensor, this_rank
from grpo.training.audits import Auditor
from grpo.training.batches import Batch, last_step, own_microbatches, plan_batches
from grpo.training.frozen import (
    FixedScores,
    divergence,
    drift_of,
    measure_drift,
    merge_scores,
    require_range_above,
    score_steps,
)
from grpo.training.metrics import Tally, UpdateMetrics, update_metrics
from grpo.types import Cost, Credit, Rollouts

# Nats per dimension by which sampled steps may have moved on average when a round ends: beyond it
# a probability ratio overflows float32.
LARGEST_MOVE = 88.0


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    updates_per_round: int
    max_grad_norm: float
    tokens_per_microbatch: int  # rows times width of one forward pass
    updates_per_checkpoint: int
    updates_per_audit: int  # 0: never


@dataclass(frozen=True, kw_only=True)
class TrainedRound:
    """What a round leaves besides the policy's weights and its optimizer."""

    metrics: list[UpdateMetrics]
    batches: list[Batch]
    objective_state: State
    drift_max: float  # nats, between sampler and trainer before any update
    audit_cost: Cost  # beside the policy's own


def train_round(
    policy: Policy[Any],
    trajectory: Trajectory,
    rollouts: Rollouts,
    *,
    objective: Objective,
    objective_state: State,
    optimizer: PreciseAdamW,
    reference: Policy[Any] | None,
    settings: TrainingSettings,
    first_update: int,
    generator: Generator,
    scratch: Scratch,
    progress: Callable[[int, int], None],
) -> TrainedRound:
    """Updates the policy on one round's rollouts; continues from `scratch` bit-identically.

    Args:
      reference: The base policy, if a link of the objective compares with it.
      first_update: The number of updates that the arm has behind it.
      progress: Called with the updates done and their number.

    Raises:
      DivergedError: If an advantage, loss, gradient, weight or log-prob is not finite.
    """
    plan = _prepare(
        policy,
        trajectory,
        rollouts,
        objective=objective,
        objective_state=objective_state,
        reference=reference,
        settings=settings,
        first_update=first_update,
        generator=generator,
    )
    metrics = _resume(policy, optimizer, plan.auditor, scratch)
    with _rows_so_far(metrics):
        for index in range(len(metrics), len(plan.batches)):
            progress(index, len(plan.batches))
            metrics.append(
                run_update(
                    policy,
                    plan.trajectory,
                    plan.batches[index],
                    objective=objective,
                    optimizer=optimizer,
                    proximal=plan.proximal,
                    reference=plan.reference,
                    settings=settings,
                    update=first_update + index,
                    auditor=plan.auditor,
                    drifts=plan.drifts,
                )
            )
            # Not after an update that scores itself: a resume could not tell its drift any more.
            if plan.proximal is not None and (index + 1) % settings.updates_per_checkpoint == 0:
                _checkpoint(scratch, policy, optimizer, plan.auditor, metrics)
        _require_usable(
            policy, plan.trajectory, plan.batches[-1], settings, update=metrics[-1].update
        )
    progress(len(plan.batches), len(plan.batches))
    return TrainedRound(
        metrics=metrics,
        batches=plan.batches,
        objective_state=plan.objective_state,
        drift_max=max(plan.drifts),
        audit_cost=plan.auditor.cost,
    )


@contextmanager
def _rows_so_far(metrics: list[UpdateMetrics]) -> Iterator[None]:
    """Adds the updates so far to a DivergedError of the block."""
    try:
        yield
    except DivergedError as error:
        raise DivergedError(str(error), [asdict(each) for each in metrics]) from None


@torch.no_grad()
def _require_usable(
    policy: Policy[Any],
    trajectory: Trajectory,
    batch: Batch,
    settings: TrainingSettings,
    *,
    update: int,
) -> None:
    """Raises DivergedError if the last update left a policy without usable log-probs.

    Looked at on one microbatch of that update. Its FLOPs count for no cost: it trains nothing.
    """
    kept = (batch.credit.weight != 0).any(dim=1).nonzero()[:, 0]
    if len(kept) == 0:
        return
    widths = policy.widths(trajectory, batch.rows[kept], batch.credit.weight[kept] != 0)
    rows = kept[own_microbatches(widths, settings.tokens_per_microbatch)[0].rows]
    num_steps = last_step(batch.credit.weight[rows])
    needed = batch.credit.weight[rows, :num_steps] != 0
    cost = policy.cost
    scores = policy.score(trajectory.select(batch.rows[rows], num_steps), needed)
    policy.cost = cost
    dimensions = 1 if scores.mean is None else scores.mean[0].numel()
    before = batch.rollouts.behavior_logp[rows, :num_steps]
    moved = float((scores.logp.cpu() - before)[needed].abs().mean()) / dimensions
    (furthest,) = all_reduce_max([moved if math.isfinite(moved) else math.inf])
    require_finite_numbers(update, {"change of the log-probs of sampled steps": furthest})
    if furthest > LARGEST_MOVE:
        raise DivergedError(
            f"update {update}: log-probs of sampled steps change by {furthest:.3g} nats, more than "
            f"{LARGEST_MOVE:g}"
        )


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """A round's batches with their credit and what was scored before any update."""

    batches: list[Batch]
    objective_state: State
    auditor: Auditor
    trajectory: Trajectory  # as updates score it
    proximal: FixedScores | None  # None: the only update scores itself
    reference: FixedScores | None
    drifts: list[float]


def _prepare(
    policy: Policy[Any],
    trajectory: Trajectory,
    rollouts: Rollouts,
    *,
    objective: Objective,
    objective_state: State,
    reference: Policy[Any] | None,
    settings: TrainingSettings,
    first_update: int,
    generator: Generator,
) -> _Plan:
    """Returns the plan of a round; a single update is its own proximal policy."""
    batches, state = plan_batches(
        objective,
        rollouts,
        objective_state,
        num_batches=settings.updates_per_round,
        generator=generator,
    )
    replayed = policy.replayed(trajectory)
    auditor = Auditor(objective, settings.updates_per_audit)
    score = partial(
        _score_round,
        trajectory=replayed,
        batches=batches,
        settings=settings,
        first_update=first_update,
        auditor=auditor,
        keeps_means=needs_divergence(objective),
    )
    scores_itself = len(batches) == 1 and replayed is trajectory
    proximal = None if scores_itself else score(policy)
    return _Plan(
        batches=batches,
        objective_state=state,
        auditor=auditor,
        trajectory=replayed,
        proximal=proximal,
        reference=score(reference) if reference else None,
        drifts=[] if proximal is None else [measure_drift(objective, batches, proximal.logp)],
    )


def _checkpoint(
    scratch: Scratch,
    policy: Policy[Any],
    optimizer: PreciseAdamW,
    auditor: Auditor,
    metrics: list[UpdateMetrics],
) -> None:
    """Stores everything that the updates so far have changed."""
    trained = gather_trained(policy.model, optimizer)

    def write(directory: Path) -> None:
        write_trained(directory, trained)
        write_json(directory / "metrics.json", [asdict(each) for each in metrics])
        write_json(directory / "cost.json", asdict(policy.cost))
        write_json(directory / "audit_cost.json", asdict(auditor.cost))

    if this_rank() == 0:
        scratch.save(len(metrics), write)


def _resume(
    policy: Policy[Any], optimizer: PreciseAdamW, auditor: Auditor, scratch: Scratch
) -> list[UpdateMetrics]:
    """Loads the newest checkpoint, if there is one; returns the metrics of its updates."""
    latest = scratch.latest()
    if latest is None:
        return []
    _, directory = latest
    read_trainable(directory, policy.model, optimizer)
    policy.cost = Cost(**read_json(directory / "cost.json"))
    auditor.cost = Cost(**read_json(directory / "audit_cost.json"))
    return [UpdateMetrics(**each) for each in read_json(directory / "metrics.json")]


def _score_round(
    policy: Policy[Any],
    *,
    trajectory: Trajectory,
    batches: list[Batch],
    settings: TrainingSettings,
    first_update: int,
    auditor: Auditor,
    keeps_means: bool,
) -> FixedScores:
    """Returns the scores of what is trained on and of what only audits look at."""
    needed = torch.zeros(trajectory.mask.shape)
    for batch in batches:
        needed[batch.rows] = batch.credit.weight
    score = partial(
        score_steps,
        policy,
        trajectory,
        tokens_per_microbatch=settings.tokens_per_microbatch,
        keeps_means=keeps_means,
    )
    scores = score(needed)
    audited = auditor.unscored(batches, first_update, needed)
    # Apart: in the same microbatches, the rows of an audit would change the bits of the others.
    with auditor.counted_apart(policy):
        beside = score(audited)
    return merge_scores(scores, beside)


def run_update(
    policy: Policy[Any],
    trajectory: Trajectory,
    batch: Batch,
    *,
    objective: Objective,
    optimizer: Optimizer,
    proximal: FixedScores | None,
    reference: FixedScores | None,
    settings: TrainingSettings,
    update: int,
    auditor: Auditor | None = None,
    drifts: list[float] | None = None,
) -> UpdateMetrics:
    """Takes one optimizer step on what has weight in the batch; none if nothing has.

    Args:
      proximal: None: the policy as it is now; its drift is measured before the step.
      drifts: Gets that drift.
      auditor: Compares the gradient with that of the full credit where it is due.

    Raises:
      DivergedError: If a number of the update is not finite.
    """
    _require_finite_credit(batch.credit, update)
    optimizer.zero_grad(set_to_none=True)
    gradient = partial(
        add_gradient,
        policy,
        trajectory,
        batch.rows,
        objective=objective,
        proximal=proximal,
        reference=reference,
        behavior_logp=batch.rollouts.behavior_logp,
        tokens_per_microbatch=settings.tokens_per_microbatch,
    )
    tally = gradient(batch.credit)
    due = auditor if auditor and auditor.is_due(update) else None
    audit = due.audit(policy, stepped_by(optimizer), batch.credit, gradient) if due else None
    if proximal is None and drifts is not None:
        drifts.append(require_range_above(tally.drift, objective))
    if tally.rollouts == 0:
        return update_metrics(batch, tally, update=update, grad_norm=0.0, audit=audit)
    weights = stepped_by(optimizer)
    norm = torch.nn.utils.get_total_norm([w.grad for w in weights if w.grad is not None])
    length = full_tensor(norm)
    require_finite_numbers(update, {"loss": tally.loss, "gradient norm": float(length)})
    if length > settings.max_grad_norm:  # `clip_grad_norm_` multiplies by 1 as well
        torch.nn.utils.clip_grads_with_norm_(weights, settings.max_grad_norm, norm)
    take_step(optimizer, update)
    policy.cost += Cost(trained_steps=tally.steps)
    metrics = update_metrics(batch, tally, update=update, grad_norm=float(length), audit=audit)
    floats = {name: each for name, each in vars(metrics).items() if isinstance(each, float)}
    require_finite_numbers(update, floats)
    return metrics


def _require_finite_credit(credit: Credit, update: int) -> None:
    kept = credit.weight != 0
    require_finite_numbers(
        update,
        {
            "weight of a step": float(credit.weight.abs().max()),
            "advantage": float(torch.where(kept, credit.advantage, 0.0).abs().max()),
        },
    )


def add_gradient(
    policy: Policy[Any],
    trajectory: Trajectory,
    of_round: Int[Tensor, " rollout"],
    credit: Credit,
    *,
    objective: Objective,
    proximal: FixedScores | None,
    reference: FixedScores | None,
    behavior_logp: Float[Tensor, "rollout step"],
    tokens_per_microbatch: int,
) -> Tally:
    """Adds the gradient of a batch to the parameters' own; forwards only what has weight.

    Args:
      of_round: The round's row of each rollout of the batch.
      proximal: None: the policy as it is now.
    """
    tally = Tally()
    kept = (credit.weight != 0).any(dim=1).nonzero()[:, 0]
    if len(kept) == 0:
        return tally
    widths = policy.widths(trajectory, of_round[kept], credit.weight[kept] != 0)
    with counted_together(policy):
        for share in own_microbatches(widths, tokens_per_microbatch):
            rows = kept[share.rows]
            num_steps = last_step(credit.weight[rows])
            needed = credit.weight[rows, :num_steps] != 0
            selected = trajectory.select(of_round[rows], num_steps)
            scores, noise = policy.score(selected, needed), selected.noise
            if not share.counts:
                (0.0 * scores.logp).sum().backward()  # what other ranks compute needs this one
                continue
            device = scores.logp.device
            part = _cut(credit, rows, num_steps, device)
            behavior = behavior_logp[rows, :num_steps].to(device)
            start = proximal.part(of_round[rows], needed, device) if proximal else scores.detach()
            base = reference.part(of_round[rows], needed, device) if reference else None
            terms = loss_terms(
                objective,
                logp=scores.logp,
                proximal_logp=start.logp,
                reference_logp=base.logp if base else None,
                proximal_kl=divergence(scores, start, needed),
                reference_kl=divergence(scores, base, needed) if base else None,
                noise=noise,
                behavior_logp=behavior,
                credit=part,
            )
            loss = scalar_loss(terms, part)
            loss.backward()
            tally.add(terms, loss, scores.logp.detach(), start.logp)
            if proximal is None:
                tally.add_drift(drift_of(objective, start.logp, behavior, part, noise))
    tally.add_ranks()
    return tally


def _cut(
    credit: Credit, rows: Int[Tensor, " kept"], num_steps: int, device: torch.device
) -> Credit:
    """Returns the credit of some rollouts' first steps."""
    return Credit(
        advantage=credit.advantage[rows, :num_steps].to(device),
        weight=credit.weight[rows, :num_steps].to(device),
    )
