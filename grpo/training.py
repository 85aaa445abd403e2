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
from grpo.errors import UnsoundError
from grpo.objective.advantage import is_uniform, sum_by_group
from grpo.objective.base import Objective, State, assign_credit, loss_terms, scalar_loss
from grpo.objective.penalty import k3
from grpo.objective.ratio import is_clipped
from grpo.policies.base import Policy, Trajectory
from grpo.policies.storage import read_trainable, write_trainable
from grpo.types import Cost, Credit, Rollouts, StepTerms

MIN_CLIP_PER_DRIFT = 3.0  # rule U27


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    updates_per_round: int
    max_grad_norm: float
    tokens_per_microbatch: int  # rows times width of one forward pass
    updates_per_checkpoint: int


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The rollouts of one update and their credit, decided before any forward pass."""

    rows: Int[Tensor, " rollout"]  # of the round
    rollouts: Rollouts
    credit: Credit


@dataclass(frozen=True, kw_only=True)
class UpdateMetrics:
    """What one optimizer step saw and did; a row of updates.csv."""

    update: int
    reward_mean: float
    outcome_mean: float
    reward_std_within: float
    uniform_group_fraction: float
    rollouts: int
    trained_rollouts: int
    trained_steps: int
    loss: float
    clip_fraction: float
    kl_to_start: float  # k3 to the round's first policy, nats per trained step
    grad_norm: float  # before clipping
    advantage_abs_mean: float
    ratio_min: float
    ratio_max: float


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


def plan_batches(
    objective: Objective,
    rollouts: Rollouts,
    state: State,
    *,
    num_batches: int,
    generator: Generator,
) -> tuple[list[Batch], State]:
    """Returns the round's batches with their credit: whole groups, about equal in rollouts."""
    groups = torch.unique(rollouts.group)
    shuffled = groups[torch.randperm(len(groups), generator=generator)]
    rank = torch.empty(int(groups.max()) + 1, dtype=torch.long)
    rank[shuffled] = torch.arange(len(groups))
    order = rank[rollouts.group].argsort(stable=True)
    sizes = torch.bincount(rank[rollouts.group])
    batch_of_group = (sizes.cumsum(0) - sizes) * num_batches // len(rollouts.group)
    batch_of_row = batch_of_group[rank[rollouts.group[order]]]
    batches = []
    for index in range(num_batches):
        rows = order[batch_of_row == index]
        if len(rows):
            part = select_rollouts(rollouts, rows)
            credit, state = assign_credit(objective, part, state, generator)
            batches.append(Batch(rows=rows, rollouts=part, credit=credit))
    return batches, state


def select_rollouts(rollouts: Rollouts, rows: Int[Tensor, " kept"]) -> Rollouts:
    """Returns some rows of every field."""
    reference = rollouts.reference_logp
    return Rollouts(
        group=rollouts.group[rows],
        reward=rollouts.reward[rows],
        outcome=rollouts.outcome[rows],
        mask=rollouts.mask[rows],
        behavior_logp=rollouts.behavior_logp[rows],
        reference_logp=None if reference is None else reference[rows],
    )


def pack_microbatches(
    widths: Int[Tensor, " rollout"], tokens_per_microbatch: int
) -> list[Int[Tensor, " kept"]]:
    """Returns rows sorted by width, cut so that rows times the widest stay within the budget."""
    order = widths.argsort(stable=True)
    packed: list[list[int]] = [[]]
    for row in order.tolist():
        if packed[-1] and (len(packed[-1]) + 1) * int(widths[row]) > tokens_per_microbatch:
            packed.append([])
        packed[-1].append(row)
    return [torch.tensor(rows) for rows in packed if rows]


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
        num_steps = _last_step(needed[kept])
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
    weight = batch.credit.weight
    kept = (weight != 0).any(dim=1).nonzero()[:, 0]
    tally = _Tally()
    if len(kept) == 0:
        return _metrics(batch, tally, update=update, grad_norm=0.0)
    optimizer.zero_grad(set_to_none=True)
    widths = policy.widths(trajectory)[batch.rows[kept]]
    for packed in pack_microbatches(widths, settings.tokens_per_microbatch):
        rows = kept[packed]
        of_round, num_steps = batch.rows[rows], _last_step(weight[rows])
        logp = policy.log_prob(trajectory.select(of_round, num_steps))
        device = logp.device
        credit = _cut(batch.credit, rows, num_steps, device)
        proximal = proximal_logp[of_round, :num_steps].to(device)
        terms = loss_terms(
            objective,
            logp=logp,
            proximal_logp=proximal,
            reference_logp=None
            if reference_logp is None
            else reference_logp[of_round, :num_steps].to(device),
            credit=credit,
        )
        loss = scalar_loss(terms, credit)
        loss.backward()
        tally.add(terms, loss, logp.detach(), proximal, _clips(objective))
    parameters = [each for each in policy.model.parameters() if each.requires_grad]
    norm = torch.nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm)
    optimizer.step()
    policy.cost += Cost(trained_steps=tally.steps)
    return _metrics(batch, tally, update=update, grad_norm=float(norm))


class _Tally:
    """Adds up what the microbatches of one update show."""

    def __init__(self) -> None:
        self.loss = self.kl = 0.0
        self.steps = self.clipped = self.rollouts = 0
        self.ratio_min = self.ratio_max = 1.0

    def add(
        self,
        terms: StepTerms,
        loss: Tensor,
        logp: Tensor,
        proximal_logp: Tensor,
        clips: list[tuple[float, float]],
    ) -> None:
        with torch.no_grad():
            self.loss += float(loss)
            self.rollouts += len(logp)
            self.steps += int(terms.mask.sum())
            self.kl += float(k3(logp, proximal_logp, terms.mask).double().sum())
            self.clipped += sum(int(is_clipped(terms, *clip).sum()) for clip in clips)
            ratio = terms.log_ratio[terms.mask].exp()
            self.ratio_min = min(self.ratio_min, float(ratio.min()))
            self.ratio_max = max(self.ratio_max, float(ratio.max()))


def _metrics(batch: Batch, tally: _Tally, *, update: int, grad_norm: float) -> UpdateMetrics:
    rollouts, reward = batch.rollouts, batch.rollouts.reward.double()
    total, size = sum_by_group(reward, rollouts.group)
    squares, _ = sum_by_group((reward - total / size) ** 2, rollouts.group)
    share = 1 / size  # of its group: sums over rollouts become sums over groups
    uniform = is_uniform(rollouts.outcome, rollouts.group) * share
    mask = rollouts.mask
    steps = max(tally.steps, 1)
    return UpdateMetrics(
        update=update,
        reward_mean=float(reward.mean()),
        outcome_mean=float(rollouts.outcome.double().mean()),
        reward_std_within=float(((squares / size).sqrt() * share).sum() / share.sum()),
        uniform_group_fraction=float(uniform.sum() / share.sum()),
        rollouts=len(reward),
        trained_rollouts=tally.rollouts,
        trained_steps=tally.steps,
        loss=tally.loss,
        clip_fraction=tally.clipped / steps,
        kl_to_start=tally.kl / steps,
        grad_norm=grad_norm,
        advantage_abs_mean=float(batch.credit.advantage[mask].abs().mean()),
        ratio_min=tally.ratio_min,
        ratio_max=tally.ratio_max,
    )


def _cut(
    credit: Credit, rows: Int[Tensor, " kept"], num_steps: int, device: torch.device
) -> Credit:
    """Returns the credit of some rollouts' first steps."""
    return Credit(
        advantage=credit.advantage[rows, :num_steps].to(device),
        weight=credit.weight[rows, :num_steps].to(device),
    )


def _last_step(weight: Float[Tensor, "rollout step"]) -> int:
    """Returns the number of steps up to the last one with weight."""
    return int((weight != 0).any(dim=0).nonzero().max()) + 1


def _clips(objective: Objective) -> list[tuple[float, float]]:
    """Returns low and high of every clip_surrogate in the chain."""
    return [
        (float(link.settings["low"] or 0), float(link.settings["high"] or 0))
        for link in objective.links
        if link.name == "clip_surrogate"
    ]
