"""One round of policy updates: credit once per batch, then microbatches of what has weight."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor
from torch.optim import AdamW, Optimizer

from grpo.artifacts.checkpoints import Scratch
from grpo.artifacts.files import read_json, write_json
from grpo.batches import Batch, last_step, pack_microbatches, plan_batches
from grpo.errors import UnsoundError
from grpo.metrics import Tally, UpdateMetrics, update_metrics
from grpo.objective.base import Objective, State, loss_terms, scalar_loss
from grpo.policies.base import Policy, Trajectory
from grpo.policies.storage import read_trainable, write_trainable
from grpo.types import Cost, Credit, Rollouts

MIN_CLIP_PER_DRIFT = 3.0  # rule U27


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    updates_per_round: int
    max_grad_norm: float
    tokens_per_microbatch: int  # rows times width of one forward pass
    updates_per_checkpoint: int


@dataclass(frozen=True, kw_only=True)
class TrainedRound:
    """What a round leaves besides the policy's weights and its optimizer."""

    metrics: list[UpdateMetrics]
    batches: list[Batch]
    objective_state: State
    drift_max: float  # nats, between sampler and trainer before any update


def train_round(
    policy: Policy[Any],
    trajectory: Trajectory,
    rollouts: Rollouts,
    *,
    objective: Objective,
    objective_state: State,
    optimizer: AdamW,
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
    """
    batches, state = plan_batches(
        objective,
        rollouts,
        objective_state,
        num_batches=settings.updates_per_round,
        generator=generator,
    )
    weight = torch.zeros(rollouts.mask.shape)
    for batch in batches:
        weight[batch.rows] = batch.credit.weight
    tokens = settings.tokens_per_microbatch
    proximal_logp = score_steps(policy, trajectory, weight, tokens)
    reference_logp = score_steps(reference, trajectory, weight, tokens) if reference else None
    drift = measure_drift(objective, batches, proximal_logp)
    metrics = _resume(policy, optimizer, scratch)
    for index in range(len(metrics), len(batches)):
        progress(index, len(batches))
        metrics.append(
            run_update(
                policy,
                trajectory,
                batches[index],
                objective=objective,
                optimizer=optimizer,
                proximal_logp=proximal_logp,
                reference_logp=reference_logp,
                settings=settings,
                update=first_update + index,
            )
        )
        if (index + 1) % settings.updates_per_checkpoint == 0:
            scratch.save(index + 1, lambda path: _checkpoint(path, policy, optimizer, metrics))
    progress(len(batches), len(batches))
    return TrainedRound(metrics=metrics, batches=batches, objective_state=state, drift_max=drift)


def _checkpoint(
    directory: Path, policy: Policy[Any], optimizer: AdamW, metrics: list[UpdateMetrics]
) -> None:
    """Writes everything that the updates so far have changed."""
    write_trainable(directory, policy.model, optimizer)
    write_json(directory / "metrics.json", [asdict(each) for each in metrics])
    write_json(directory / "cost.json", asdict(policy.cost))


def _resume(policy: Policy[Any], optimizer: AdamW, scratch: Scratch) -> list[UpdateMetrics]:
    """Loads the newest checkpoint, if there is one; returns the metrics of its updates."""
    latest = scratch.latest()
    if latest is None:
        return []
    _, directory = latest
    read_trainable(directory, policy.model, optimizer)
    policy.cost = Cost(**read_json(directory / "cost.json"))
    return [UpdateMetrics(**each) for each in read_json(directory / "metrics.json")]


@torch.no_grad()
def score_steps(
    policy: Policy[Any],
    trajectory: Trajectory,
    needed: Float[Tensor, "rollout step"],
    tokens_per_microbatch: int,
) -> Float[Tensor, "rollout step"]:
    """Returns log-probs in nats where `needed` is not 0, and NaN elsewhere: not computed."""
    logp = torch.full(needed.shape, torch.nan)
    rows = (needed != 0).any(dim=1).nonzero()[:, 0]
    if len(rows) == 0:
        return logp
    widths = policy.widths(trajectory)[rows]
    for packed in pack_microbatches(widths, tokens_per_microbatch):
        kept = rows[packed]
        num_steps = last_step(needed[kept])
        part = policy.log_prob(trajectory.select(kept, num_steps)).cpu()
        logp[kept[:, None], torch.arange(num_steps)] = part
    return torch.where(needed != 0, logp, torch.nan)


def measure_drift(
    objective: Objective,
    batches: list[Batch],
    proximal_logp: Float[Tensor, "rollout step"],
) -> float:
    """Returns max |log ratio| between trainer and sampler before any update.

    Raises:
      UnsoundError: If a clip is within three times the drift (rule U27): it would clip noise.
    """
    drift = 0.0
    for batch in batches:
        terms = loss_terms(
            objective,
            logp=proximal_logp[batch.rows],
            proximal_logp=batch.rollouts.behavior_logp,
            reference_logp=proximal_logp[batch.rows],
            credit=batch.credit,
        )
        drift = max(drift, float(terms.log_ratio.abs().max()))
    for low, high in _clips(objective):
        if min(low, high) <= MIN_CLIP_PER_DRIFT * drift:
            raise UnsoundError(
                f"U27: clip_surrogate needs a range above {MIN_CLIP_PER_DRIFT:g} times the drift "
                f"between sampler and trainer, got {min(low, high):g} at a drift of {drift:.2g}; "
                "widen the clip or compute in float32"
            )
    return drift


def run_update(
    policy: Policy[Any],
    trajectory: Trajectory,
    batch: Batch,
    *,
    objective: Objective,
    optimizer: Optimizer,
    proximal_logp: Float[Tensor, "rollout step"],
    reference_logp: Float[Tensor, "rollout step"] | None,
    settings: TrainingSettings,
    update: int,
) -> UpdateMetrics:
    """Takes one optimizer step on what has weight in the batch; none if nothing has."""
    optimizer.zero_grad(set_to_none=True)
    tally = add_gradient(
        policy,
        trajectory,
        batch.rows,
        batch.credit,
        objective=objective,
        proximal_logp=proximal_logp,
        reference_logp=reference_logp,
        tokens_per_microbatch=settings.tokens_per_microbatch,
    )
    if tally.rollouts == 0:
        return update_metrics(batch, tally, update=update, grad_norm=0.0)
    parameters = [each for each in policy.model.parameters() if each.requires_grad]
    norm = torch.nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm)
    optimizer.step()
    policy.cost += Cost(trained_steps=tally.steps)
    return update_metrics(batch, tally, update=update, grad_norm=float(norm))


def add_gradient(
    policy: Policy[Any],
    trajectory: Trajectory,
    of_round: Int[Tensor, " rollout"],
    credit: Credit,
    *,
    objective: Objective,
    proximal_logp: Float[Tensor, "round step"],
    reference_logp: Float[Tensor, "round step"] | None,
    tokens_per_microbatch: int,
) -> Tally:
    """Adds the gradient of a batch to the parameters' own; forwards only what has weight.

    Args:
      of_round: The round's row of each rollout of the batch.
    """
    tally = Tally()
    kept = (credit.weight != 0).any(dim=1).nonzero()[:, 0]
    if len(kept) == 0:
        return tally
    widths = policy.widths(trajectory)[of_round[kept]]
    for packed in pack_microbatches(widths, tokens_per_microbatch):
        rows = kept[packed]
        num_steps = last_step(credit.weight[rows])
        logp = policy.log_prob(trajectory.select(of_round[rows], num_steps))
        part = _cut(credit, rows, num_steps, logp.device)
        proximal = proximal_logp[of_round[rows], :num_steps].to(logp.device)
        reference = None
        if reference_logp is not None:
            reference = reference_logp[of_round[rows], :num_steps].to(logp.device)
        terms = loss_terms(
            objective, logp=logp, proximal_logp=proximal, reference_logp=reference, credit=part
        )
        loss = scalar_loss(terms, part)
        loss.backward()
        tally.add(terms, loss, logp.detach(), proximal)
    return tally


def _cut(
    credit: Credit, rows: Int[Tensor, " kept"], num_steps: int, device: torch.device
) -> Credit:
    """Returns the credit of some rollouts' first steps."""
    return Credit(
        advantage=credit.advantage[rows, :num_steps].to(device),
        weight=credit.weight[rows, :num_steps].to(device),
    )


def _clips(objective: Objective) -> list[tuple[float, float]]:
    """Returns low and high of every clip_surrogate in the chain."""
    return [
        (float(link.settings["low"] or 0), float(link.settings["high"] or 0))
        for link in objective.links
        if link.name == "clip_surrogate"
    ]
