"""One round of policy updates: credit once per batch, then gradients by microbatch."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Generator
from torch.optim import Optimizer

from grpo.errors import DivergedError
from grpo.modalities.policy import Policy, Trajectory, cost_of_all_ranks
from grpo.modalities.shared.directories import gather_trained, read_trainable, write_trained
from grpo.modalities.shared.optimizer import (
    PreciseAdamW,
    optimized_tensors,
    require_finite_numbers,
    take_step,
)
from grpo.objective.base import Objective, State, loss_terms, scalar_loss
from grpo.objective.penalty import needs_divergence, needs_entropy
from grpo.runtime.artifacts.files import Scratch, read_json, write_json
from grpo.runtime.rank_files import latest_checkpoint
from grpo.runtime.ranks import all_reduce_max, full_tensor, this_rank
from grpo.training.audits import Auditor
from grpo.training.batches import Batch, last_step, local_microbatches, plan_batches
from grpo.training.frozen import (
    FrozenLogProbs,
    compute_log_probs,
    divergence,
    drift_of,
    measure_drift,
    merge_log_probs,
    require_range_above,
)
from grpo.training.metrics import Tally, UpdateMetrics, update_metrics, update_rows
from grpo.training.schedule import LearningRate
from grpo.types import Cost, Credit, Rollouts

# Largest mean change of a sampled step's log-prob over a round, in nats per dimension: beyond it a
# probability ratio overflows float32.
LARGEST_CHANGE = 88.0


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    updates_per_iteration: int  # in each pass
    max_grad_norm: float
    tokens_per_microbatch: int  # rows times width of one forward pass
    updates_per_checkpoint: int
    updates_per_audit: int  # 0: never
    passes_per_iteration: int = 1  # over the iteration's rollouts


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """The inputs of the updates of one iteration."""

    policy: Policy[Any]
    optimizer: PreciseAdamW
    objective: Objective
    objective_state: State
    reference: Policy[Any] | None = None  # the reference policy, if a link needs it
    settings: TrainingSettings
    trajectory: Trajectory
    rollouts: Rollouts  # the same rows as the trajectory
    first_update: int  # number of updates of the arm before these
    generator: Generator
    learning_rate: LearningRate | None = None  # None: that of the optimizer
    is_last: bool = True  # no iteration of the round follows, whose sampling tests the policy


@dataclass(frozen=True, kw_only=True)
class TrainedIteration:
    """The results of a round, besides the policy's weights and its optimizer state."""

    metrics: list[UpdateMetrics]
    batches: list[Batch]  # of a pass; every pass has the same
    objective_state: State
    drift_max: float  # nats, between sampler and trainer before any update
    audit_cost: Cost  # not part of the policy's cost


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The inputs of the loss that are shared by a round's batches."""

    policy: Policy[Any]
    objective: Objective
    trajectory: Trajectory  # with the routing to replay, if any
    proximal: FrozenLogProbs | None  # None: the current policy
    reference: FrozenLogProbs | None  # None: no link needs one
    tokens_per_microbatch: int


def run_updates(
    given: Iteration,
    *,
    scratch: Scratch,
    progress: Callable[[int, int], None],
    note: Callable[[UpdateMetrics], None] = lambda metrics: None,
) -> TrainedIteration:
    """Updates the policy on one round's rollouts; resumes from `scratch` bit-identically.

    Args:
      progress: Called with the number of finished updates and the total.
      note: Called with the metrics of each update.

    Raises:
      DivergedError: If an advantage, loss, gradient, weight or log-prob is not finite.
    """
    plan = _prepare(given)
    metrics = _resume(given, plan.auditor, scratch)
    with _attach_metrics(metrics):
        for index in range(len(metrics), len(plan.updates)):
            progress(index, len(plan.updates))
            metrics.append(
                run_update(
                    plan.loss,
                    plan.updates[index],
                    optimizer=given.optimizer,
                    max_grad_norm=given.settings.max_grad_norm,
                    update=given.first_update + index,
                    schedule=given.learning_rate,
                    auditor=plan.auditor,
                    drifts=plan.drifts,
                )
            )
            note(metrics[-1])
            is_due = (index + 1) % given.settings.updates_per_checkpoint == 0
            # Not after an update that is its own proximal policy: the drift could not be resumed.
            if is_due and plan.loss.proximal is not None:
                _checkpoint(scratch, given, plan.auditor, metrics)
        if given.is_last:
            _require_usable(plan.loss, plan.updates[-1], update=metrics[-1].update)
    progress(len(plan.updates), len(plan.updates))
    return TrainedIteration(
        metrics=metrics,
        batches=plan.batches,
        objective_state=plan.objective_state,
        drift_max=max(plan.drifts),
        audit_cost=plan.auditor.cost,
    )


@contextmanager
def _attach_metrics(metrics: list[UpdateMetrics]) -> Iterator[None]:
    """Adds the metrics of finished updates to a DivergedError raised in the block."""
    try:
        yield
    except DivergedError as error:
        raise DivergedError(str(error), update_rows(metrics)) from None


@torch.no_grad()
def _require_usable(loss: Loss, batch: Batch, *, update: int) -> None:
    """Raises DivergedError if log-probs after the last update are not finite or changed too much.

    One microbatch of that update is checked. Its FLOPs are not counted: it does not train.
    """
    kept = batch.credit.weighted_rows
    if len(kept) == 0:
        return
    policy, trajectory = loss.policy, loss.trajectory
    widths = policy.widths(trajectory, batch.rows[kept], batch.credit.weight[kept] != 0)
    rows = kept[local_microbatches(widths, loss.tokens_per_microbatch)[0].rows]
    num_steps = last_step(batch.credit.weight[rows])
    needed = batch.credit.weight[rows, :num_steps] != 0
    cost = policy.cost
    log_probs = policy.step_log_probs(trajectory.select(batch.rows[rows], num_steps), needed)
    policy.cost = cost
    dimensions = 1 if log_probs.mean is None else log_probs.mean[0].numel()
    before = batch.rollouts.behavior_logp[rows, :num_steps]
    moved = float((log_probs.logp.cpu() - before)[needed].abs().mean()) / dimensions
    (furthest,) = all_reduce_max([moved if math.isfinite(moved) else math.inf])
    require_finite_numbers(update, {"change of the log-probs of sampled steps": furthest})
    if furthest > LARGEST_CHANGE:
        raise DivergedError(
            f"update {update}: log-probs of sampled steps change by {furthest:.3g} nats, more than "
            f"{LARGEST_CHANGE:g}"
        )


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """A round's batches with their credit, and its loss."""

    loss: Loss
    batches: list[Batch]
    updates: list[Batch]  # the batch of each update: `batches`, once per pass
    objective_state: State
    auditor: Auditor
    drifts: list[float]


def _prepare(given: Iteration) -> _Plan:
    """Returns the plan of a round; with a single update, the current policy is the proximal one."""
    batches, state = plan_batches(
        given.objective,
        given.rollouts,
        given.objective_state,
        num_batches=given.settings.updates_per_iteration,
        generator=given.generator,
    )
    replayed = given.policy.replayed(given.trajectory)
    auditor = Auditor(given.objective, given.settings.updates_per_audit)
    updates = batches * given.settings.passes_per_iteration
    frozen = partial(_round_log_probs, given, replayed, updates, auditor)
    is_own_proximal = len(updates) == 1 and replayed is given.trajectory
    proximal = None if is_own_proximal else frozen(given.policy)
    return _Plan(
        loss=Loss(
            policy=given.policy,
            objective=given.objective,
            trajectory=replayed,
            proximal=proximal,
            reference=frozen(given.reference) if given.reference else None,
            tokens_per_microbatch=given.settings.tokens_per_microbatch,
        ),
        batches=batches,
        updates=updates,
        objective_state=state,
        auditor=auditor,
        drifts=[] if proximal is None else [measure_drift(given.objective, batches, proximal.logp)],
    )


def _checkpoint(
    scratch: Scratch, given: Iteration, auditor: Auditor, metrics: list[UpdateMetrics]
) -> None:
    """Stores the state that the finished updates have changed."""
    trained = gather_trained(given.policy.model, given.optimizer)

    def write(directory: Path) -> None:
        write_trained(directory, trained)
        write_json(directory / "metrics.json", [asdict(each) for each in metrics])
        write_json(directory / "cost.json", asdict(given.policy.cost))
        write_json(directory / "audit_cost.json", asdict(auditor.cost))

    if this_rank() == 0:
        scratch.save(len(metrics), write)


def _resume(given: Iteration, auditor: Auditor, scratch: Scratch) -> list[UpdateMetrics]:
    """Loads the newest checkpoint, if there is one, and returns the metrics of its updates."""
    latest = latest_checkpoint(scratch)
    if latest is None:
        return []
    _, directory = latest
    read_trainable(directory, given.policy.model, given.optimizer)
    given.policy.cost = Cost(**read_json(directory / "cost.json"))
    auditor.cost = Cost(**read_json(directory / "audit_cost.json"))
    return [UpdateMetrics(**each) for each in read_json(directory / "metrics.json")]


def _round_log_probs(
    given: Iteration,
    trajectory: Trajectory,
    updates: list[Batch],
    auditor: Auditor,
    policy: Policy[Any],
) -> FrozenLogProbs:
    """Returns a policy's log-probs of the trained steps and of the steps that only audits need."""
    needed = torch.zeros(trajectory.mask.shape)
    for batch in updates:
        needed[batch.rows] = batch.credit.weight
    compute = partial(
        compute_log_probs,
        policy,
        trajectory,
        tokens_per_microbatch=given.settings.tokens_per_microbatch,
        keeps_means=needs_divergence(given.objective),
    )
    log_probs = compute(needed)
    audited = auditor.audit_only_weights(updates, given.first_update, needed)
    # Computed separately: in shared microbatches, rows of an audit would change the others' bits.
    with auditor.counting_as_audit(policy):
        audit_log_probs = compute(audited)
    return merge_log_probs(log_probs, audit_log_probs)


def run_update(
    loss: Loss,
    batch: Batch,
    *,
    optimizer: Optimizer,
    max_grad_norm: float,
    update: int,
    schedule: LearningRate | None = None,
    auditor: Auditor | None = None,
    drifts: list[float] | None = None,
) -> UpdateMetrics:
    """Takes one optimizer step on the steps of nonzero weight; no step if there are none.

    Args:
      schedule: Sets the learning rate of the update; None: the optimizer's stays.
      auditor: Compares the gradient with that of the full credit if an audit is due.
      drifts: If `loss.proximal` is None, the drift measured before the step is appended.

    Raises:
      DivergedError: If a number of the update is not finite.
    """
    policy, objective = loss.policy, loss.objective
    _require_finite_credit(batch.credit, update)
    optimizer.zero_grad(set_to_none=True)
    gradient = partial(add_gradient, loss, batch)
    tally = gradient(batch.credit)
    due = auditor if auditor and auditor.is_due(update) else None
    audit = due.audit(policy, optimized_tensors(optimizer), batch.credit, gradient) if due else None
    if loss.proximal is None and drifts is not None:
        drifts.append(require_range_above(tally.drift, objective))
    rate = None if schedule is None else schedule(update)
    measured = partial(update_metrics, batch, tally, update=update, audit=audit, learning_rate=rate)
    if tally.rollouts == 0:
        return measured(grad_norm=0.0)
    weights = optimized_tensors(optimizer)
    norm = torch.nn.utils.get_total_norm([w.grad for w in weights if w.grad is not None])
    length = full_tensor(norm)
    require_finite_numbers(update, {"loss": tally.loss, "gradient norm": float(length)})
    if length > max_grad_norm:  # otherwise `clip_grad_norm_` would multiply by 1
        torch.nn.utils.clip_grads_with_norm_(weights, max_grad_norm, norm)
    if rate is not None:
        for group in optimizer.param_groups:
            group["lr"] = rate
    take_step(optimizer, update)
    policy.cost += Cost(trained_steps=tally.steps)
    metrics = measured(grad_norm=float(length))
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


def add_gradient(loss: Loss, batch: Batch, credit: Credit) -> Tally:
    """Accumulates the gradient of a batch; computes only steps of nonzero weight.

    Args:
      credit: The credit of the batch, or its full credit for an audit.
    """
    tally = Tally()
    kept = credit.weighted_rows
    if len(kept) == 0:
        return tally
    policy, trajectory, objective = loss.policy, loss.trajectory, loss.objective
    widths = policy.widths(trajectory, batch.rows[kept], credit.weight[kept] != 0)
    with_entropy = needs_entropy(objective)
    with cost_of_all_ranks(policy):
        for share in local_microbatches(widths, loss.tokens_per_microbatch):
            rows = kept[share.rows]
            num_steps = last_step(credit.weight[rows])
            needed = credit.weight[rows, :num_steps] != 0
            of_round = batch.rows[rows]
            selected = trajectory.select(of_round, num_steps)
            log_probs = policy.step_log_probs(selected, needed, with_entropy=with_entropy)
            if not share.counts:
                (0.0 * log_probs.logp).sum().backward()  # collectives need a call from every rank
                continue
            device = log_probs.logp.device
            cut = credit.select(rows, num_steps)
            part = Credit(advantage=cut.advantage.to(device), weight=cut.weight.to(device))
            behavior = batch.rollouts.behavior_logp[rows, :num_steps].to(device)
            start = log_probs.detach()
            if loss.proximal:
                start = loss.proximal.part(of_round, needed, device)
            base = loss.reference.part(of_round, needed, device) if loss.reference else None
            terms = loss_terms(
                objective,
                logp=log_probs.logp,
                proximal_logp=start.logp,
                reference_logp=base.logp if base else None,
                proximal_kl=divergence(log_probs, start, needed),
                reference_kl=divergence(log_probs, base, needed) if base else None,
                entropy=log_probs.entropy,
                noise=selected.noise,
                behavior_logp=behavior,
                credit=part,
            )
            value = scalar_loss(terms, part)
            value.backward()
            tally.add(terms, value, log_probs.logp.detach(), start.logp)
            if loss.proximal is None:
                tally.add_drift(drift_of(objective, start.logp, behavior, part, selected.noise))
    tally.add_ranks()
    return tally
