"""Training metrics: the columns of updates.csv and of steps.csv."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo.objective.advantage import is_uniform, sum_by_group
from grpo.objective.base import exp_log_ratio
from grpo.objective.penalty import k3
from grpo.runtime.ranks import all_reduce_max, sum_counts, sum_numbers
from grpo.training.batches import Batch
from grpo.types import Rollouts, StepTerms


@dataclass(frozen=True, kw_only=True)
class UpdateMetrics:
    """The metrics of one optimizer step; a row of updates.csv."""

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
    kl_to_start: float  # k3 to the iteration's first policy, nats per trained step and dimension
    grad_norm: float  # before clipping
    advantage_abs_mean: float
    ratio_min: float
    ratio_max: float
    audit_cosine: float | None  # with the gradient of the full credit; None: not audited
    audit_norm_ratio: float | None  # gradient norm, divided by that of the full credit
    mismatch_weight_mean: float | None  # over trained steps; None: no link corrects the sampler
    mismatch_masked_fraction: float | None  # of trained steps: those of weight 0
    reward_share_between_variants: float | None  # of the variance within groups; None: no variants
    learning_rate: float | None = None  # None: constant
    entropy_mean: float | None = None  # nats per trained step; None: no entropy bonus


OPTIONAL = ("learning_rate", "entropy_mean")  # columns of methods that an arm may not use


def update_rows(metrics: Sequence[UpdateMetrics]) -> list[dict[str, Any]]:
    """Returns the rows of updates.csv, without the optional columns that are None everywhere."""
    unused = {name for name in OPTIONAL if all(getattr(each, name) is None for each in metrics)}
    rows = [asdict(each) for each in metrics]
    return [{name: value for name, value in row.items() if name not in unused} for row in rows]


class Audit(NamedTuple):
    """Comparison of an update's gradient with the gradient of all sampled steps."""

    cosine: float
    norm_ratio: float | None  # used / full; None: only the full gradient is 0


class Tally:
    """Accumulates statistics over the microbatches of one update."""

    def __init__(self) -> None:
        self.loss = self.kl = 0.0
        self.steps = self.clipped = self.rollouts = 0
        self.ratio_min = self.ratio_max = 1.0
        self.drift = 0.0  # nats, between sampler and trainer, if the update measures it
        self.mismatch_weight: float | None = None  # sum over steps
        self.mismatch_masked = 0
        self.entropy: float | None = None  # sum over steps

    def add(self, terms: StepTerms, loss: Tensor, logp: Tensor, proximal_logp: Tensor) -> None:
        with torch.no_grad():
            self.loss += float(loss)
            self.rollouts += len(logp)
            self.steps += int(terms.mask.sum())
            now, start = (each / terms.dimensions for each in (logp, proximal_logp))
            self.kl += float(k3(now, start, terms.mask).double().sum())
            if terms.clipped is not None:
                self.clipped += int((terms.mask & terms.clipped).sum())
            if terms.mismatch_weight is not None:
                weight = terms.mismatch_weight[terms.mask]
                self.mismatch_weight = (self.mismatch_weight or 0.0) + float(weight.double().sum())
                self.mismatch_masked += int((weight == 0).sum())
            if terms.entropy is not None:
                self.entropy = (self.entropy or 0.0) + float(terms.entropy.double().sum())
            ratio = exp_log_ratio(terms.log_ratio[terms.mask])
            self.ratio_min = min(self.ratio_min, float(ratio.min()))
            self.ratio_max = max(self.ratio_max, float(ratio.max()))

    def add_drift(self, drift: float) -> None:
        self.drift = max(self.drift, drift)

    def add_ranks(self) -> None:
        """Reduces the statistics over all ranks."""
        optional = (self.mismatch_weight, self.entropy)
        sums = [self.loss, self.kl, *(each or 0.0 for each in optional)]
        counts = [self.steps, self.clipped, self.rollouts, self.mismatch_masked]
        known = [int(each is not None) for each in optional]
        self.loss, self.kl, weight, entropy = sum_numbers(sums)
        self.steps, self.clipped, self.rollouts, self.mismatch_masked, *known = sum_counts(
            [*counts, *known]
        )
        self.mismatch_weight, self.entropy = (
            each if ranks else None for each, ranks in zip((weight, entropy), known)
        )
        smallest, self.ratio_max, self.drift = all_reduce_max(
            [-self.ratio_min, self.ratio_max, self.drift]
        )
        self.ratio_min = -smallest


def update_metrics(
    batch: Batch,
    tally: Tally,
    *,
    update: int,
    grad_norm: float,
    audit: Audit | None,
    learning_rate: float | None = None,
) -> UpdateMetrics:
    """Returns the metrics of one optimizer step."""
    rollouts, reward = batch.rollouts, batch.rollouts.reward.double()
    total, size = sum_by_group(reward, rollouts.group)
    squares, _ = sum_by_group((reward - total / size) ** 2, rollouts.group)
    share = 1 / size  # turns sums over rollouts into sums over groups
    uniform = is_uniform(rollouts.outcome, rollouts.group) * share
    mask = rollouts.mask
    steps = max(tally.steps, 1)
    corrected = tally.mismatch_weight
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
        audit_cosine=None if audit is None else audit.cosine,
        audit_norm_ratio=None if audit is None else audit.norm_ratio,
        mismatch_weight_mean=None if corrected is None else corrected / steps,
        mismatch_masked_fraction=None if corrected is None else tally.mismatch_masked / steps,
        reward_share_between_variants=share_between_variants(rollouts),
        learning_rate=learning_rate,
        entropy_mean=None if tally.entropy is None else tally.entropy / steps,
    )


def share_between_variants(rollouts: Rollouts) -> float | None:
    """Returns the fraction of the within-group sum of squares that is between prompt variants.

    This part of the variance is caused by the variants, not by the policy's samples. None without
    variants, or if all groups are uniform.
    """
    if rollouts.variant is None or not rollouts.variant.any():
        return None
    reward, group = rollouts.reward.double(), rollouts.group
    cell = group * (int(rollouts.variant.max()) + 1) + rollouts.variant
    means = []
    for index in (group, cell):
        total, size = sum_by_group(reward, index)
        means.append(total / size)
    of_group, of_cell = means
    whole = ((reward - of_group) ** 2).sum()
    return float(((of_cell - of_group) ** 2).sum() / whole) if whole > 0 else None


@dataclass(frozen=True, kw_only=True)
class _StepMetrics:
    """Statistics of a round's rollouts at one step; a row of steps.csv."""

    step: int  # index of a token in the rollout, or of a denoising step in the schedule
    rollouts: int  # with this step on their mask
    reward_std_within: float | None  # mean over their groups, ddof=0; None: no group of two
    trained_rollouts: int
    advantage_mean: float | None  # over trained rollouts; None: there are none
    advantage_abs_mean: float | None


def step_metrics(rollouts: Rollouts, batches: Sequence[Batch]) -> list[_StepMetrics]:
    """Returns one row per step that is on the mask of a rollout, in order."""
    mask = rollouts.mask.double()
    spread = _std_within_groups(rollouts.reward.double(), rollouts.group, mask)
    trained, signed, absolute = (torch.zeros_like(mask[0]) for _ in range(3))
    for batch in batches:
        is_trained = (batch.credit.weight != 0).double()
        advantage = batch.credit.advantage.double() * is_trained
        trained += is_trained.sum(dim=0)
        signed += advantage.sum(dim=0)
        absolute += advantage.abs().sum(dim=0)
    return [
        _StepMetrics(
            step=step,
            rollouts=int(mask[:, step].sum()),
            reward_std_within=_number(spread[step]),
            trained_rollouts=int(trained[step]),
            advantage_mean=_number(signed[step] / trained[step]),
            advantage_abs_mean=_number(absolute[step] / trained[step]),
        )
        for step in mask.any(dim=0).nonzero().flatten().tolist()
    ]


def _std_within_groups(reward: Tensor, group: Tensor, mask: Tensor) -> Tensor:
    """Returns the std of reward within groups at each step; NaN if no group has two rollouts.

    Args:
      mask: Shape [rollout, step], as 0 and 1.
    """
    index = group.unique(return_inverse=True)[1]
    empty = mask.new_zeros(int(index.max()) + 1, mask.shape[1])
    size = empty.index_add(0, index, mask)
    mean = empty.index_add(0, index, mask * reward[:, None]) / size
    squares = empty.index_add(0, index, mask * (reward[:, None] - mean[index]) ** 2)
    return torch.where(size > 1, (squares / size).sqrt(), torch.nan).nanmean(dim=0)


def _number(value: Tensor) -> float | None:
    return None if value.isnan() else float(value)
