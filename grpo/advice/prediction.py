"""What a round will take and yield, expected from a profile before it runs.

The cost model is that of docs/advice.md: every prompt is read once and every rollout sampled; what
has weight is scored once and trained on once; the profile counts. All of it under the base policy:
what a round's own learning changes is not foreseen.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import pandas as pd

from grpo.advice.cost import TrainedGroups, pass_flops, sampling_flops
from grpo.advice.facts import Facts
from grpo.advice.posterior import Floats, Ints, reused_uniform_chance
from grpo.allocation.curriculum import plan_curriculum, select_phase
from grpo.allocation.selection import Selection
from grpo.errors import located
from grpo.modalities.tokens.modality import TokenPolicyParams
from grpo.objective.link import Link
from grpo.params.parameters import BASE, Arm, Parameters
from grpo.runtime.seeds import derive_seed
from grpo.schema import PARAMS
from grpo.wiring.allocation import build_curriculum, build_selection, reads_profile
from grpo.wiring.objectives import build_objective

TINY = 1e-9


@dataclass(frozen=True, kw_only=True)
class Amounts:
    """What a round, or several, takes and yields: expected, or counted."""

    groups: float  # that reach an update
    uniform_groups: float  # of them
    rollouts: float  # sampled, or taken from the profile
    sampled_steps: float
    trained_steps: float
    sampling_flops: float
    update_flops: float
    signal: float  # sum over groups of (G - 1) p (1 - p): within-group sum of squares

    @classmethod
    def total(cls, each: pd.DataFrame) -> "Amounts":
        """Returns the sum over the rows of what `predict_each` gives."""
        return cls(**{name: float(each[name].sum()) for name in cls.__dataclass_fields__})

    @classmethod
    def of(cls, parts: Iterable["Amounts"]) -> "Amounts":
        """Returns the sum of several."""
        return cls.total(pd.DataFrame([asdict(each) for each in parts]))

    def scaled(self, factor: float) -> "Amounts":
        """Returns `factor` times as much of everything."""
        return Amounts(**{name: factor * amount for name, amount in asdict(self).items()})

    @property
    def uniform_fraction(self) -> float:
        """The share of groups whose rollouts all have the same outcome."""
        return self.uniform_groups / self.groups if self.groups else 0.0

    @property
    def mixed_groups(self) -> float:
        """Groups with both outcomes: those that teach."""
        return self.groups - self.uniform_groups

    @property
    def flops(self) -> float:
        """Sampling and updates."""
        return self.sampling_flops + self.update_flops


@dataclass(frozen=True, kw_only=True)
class Treatment:
    """What an arm does with the rollouts of a round, as far as it costs or saves."""

    drops_uniform: bool
    keep: int | None  # rollouts of a group that are trained on; None: all
    scores_proximal: bool  # what is trained on, before the updates
    scores_reference: bool  # under the base policy too, what is trained on
    scores_reference_on_all: bool  # ... and what is sampled
    selection: Selection
    updates: int
    rollouts_per_batch: int  # of sampling
    tokens_per_microbatch: int


def treatment_of(params: Parameters, arm: Arm, name: str) -> Treatment:
    """Returns what an arm does, be it one of `params` or not.

    Raises:
      ParameterError: If a link or a selection of the arm is wrong.
    """
    replays = params.policy_as(TokenPolicyParams).routing == "replay_proximal"
    links, updates = build_objective(arm.objective, name).links, arm.training.updates_per_round
    keep = [int(each.settings["keep"] or 0) for each in _named(links, "keep_extreme_rollouts")]
    penalties = _named(links, "penalize_kl"), _named(links, "subtract_kl_from_reward")
    on_kept, on_all = (any(each.settings["beta"] for each in found) for found in penalties)
    return Treatment(
        drops_uniform=bool(_named(links, "drop_uniform_groups")),
        keep=min(keep, default=None),
        scores_proximal=updates > 1 or replays,
        scores_reference=on_kept,
        scores_reference_on_all=on_all,
        selection=build_selection(arm.selection, name),
        updates=updates,
        rollouts_per_batch=arm.sampling.rollouts_per_batch,
        tokens_per_microbatch=arm.training.tokens_per_microbatch,
    )


def plan_phase(params: Parameters, arm: str, phase: int, facts: Facts) -> pd.DataFrame:
    """Returns the very prompts and group sizes that the curriculum stage will give a phase.

    Raises:
      ParameterError: If the curriculum is wrong or has no such phase.
    """
    steps = build_curriculum(params.arms[arm].curriculum, arm)
    with located(f"{PARAMS}: arms.{arm}.curriculum"):
        plan = plan_curriculum(
            facts.profile, steps, seed=derive_seed(params.seed, "curriculum", arm)
        )
        return select_phase(plan, phase)


def predict_round(params: Parameters, name: str, facts: Facts) -> Amounts:
    """Returns what a round of `params` will take and yield."""
    each = params.rounds[name]
    return predict(
        plan_phase(params, each.arm, each.phase, facts),
        treatment_of(params, params.arms[each.arm], each.arm),
        facts,
        starts_from_base=each.start == BASE,
    )


def predict_arm(params: Parameters, arm: str, facts: Facts) -> Amounts:
    """Returns what the rounds on an arm's chain will take and yield, without the profile."""
    return Amounts.of(predict_round(params, name, facts) for name in params.chain(arm)[1:])


def profile_flops(params: Parameters, arm: str, facts: Facts) -> int:
    """Returns the FLOPs of the profile if an arm on this arm's chain uses it, else 0."""
    looked = {arm, *(params.rounds[name].arm for name in params.chain(arm)[1:])}
    return facts.cost.flops if any(reads_profile(params, each) for each in looked) else 0


def predict(
    plan: pd.DataFrame, treatment: Treatment, facts: Facts, *, starts_from_base: bool
) -> Amounts:
    """Returns what is expected of groups of planned prompts."""
    each = predict_each(plan, treatment, facts, starts_from_base=starts_from_base)
    return Amounts.total(each)


def predict_each(
    plan: pd.DataFrame, treatment: Treatment, facts: Facts, *, starts_from_base: bool
) -> pd.DataFrame:
    """Returns what is expected of each planned prompt, a column per field of Amounts.

    Args:
      plan: Columns prompt_id and rollouts, the size of the group.
    """
    rows = facts.rows_of(plan["prompt_id"])
    reused = treatment.selection.reuses_profile and starts_from_base
    size, uniform = _groups(rows, plan["rollouts"].to_numpy(), facts, reused=reused)
    sampled, kept = _visited(treatment.selection, uniform)
    equal = uniform * treatment.selection.keeps_uniform
    trained = TrainedGroups(
        size=size if treatment.keep is None else np.minimum(size, treatment.keep),
        chance=kept * (1 - uniform + equal * (not treatment.drops_uniform)),
    )
    everything = TrainedGroups(size=size, chance=np.full(len(size), kept))
    steps = facts.profile["mean_steps"].to_numpy()[rows]
    drawn = 0.0 if reused else sampled
    per_batch = treatment.rollouts_per_batch
    return pd.DataFrame(
        {
            "groups": kept * (1 - uniform + equal),
            "uniform_groups": kept * equal,
            "rollouts": sampled * size,
            "sampled_steps": drawn * size * steps,
            "trained_steps": trained.expected * steps,
            "sampling_flops": drawn
            * sampling_flops(facts, rows, size, rollouts_per_batch=per_batch),
            "update_flops": _update_flops(rows, trained, everything, treatment, facts),
            "signal": kept * (size - 1) * facts.posterior.outcome_variance()[rows],
        }
    )


def _groups(rows: Ints, asked: Ints, facts: Facts, *, reused: bool) -> tuple[Ints, Floats]:
    """Returns the size of each group and the chance that it has one outcome only."""
    if not reused:
        return asked, facts.posterior.select(rows).uniform_chance(asked)
    drawn = facts.profile["rollouts"].to_numpy()[rows]
    successes = facts.profile["successes"].to_numpy()[rows]
    size = np.minimum(asked, drawn)
    return size, reused_uniform_chance(successes, drawn, size)


def _visited(selection: Selection, uniform: Floats) -> tuple[float, float]:
    """Returns the shares of planned prompts that are sampled, and kept if their group is mixed."""
    planned, budget = len(uniform), selection.budget
    if budget is None:
        return 1.0, 1.0
    if selection.keeps_uniform:
        share = min(budget.prompts, planned) / planned
        return share, share
    mixed = float((1 - uniform).mean())
    batches = math.ceil(budget.prompts / max(budget.prompts_per_batch * mixed, TINY))
    batches = min(batches, budget.max_batches)
    sampled = min(batches * budget.prompts_per_batch, planned)
    return sampled / planned, min(budget.prompts / max(planned * mixed, TINY), sampled / planned)


def _update_flops(
    rows: Ints, trained: TrainedGroups, sampled: TrainedGroups, treatment: Treatment, facts: Facts
) -> Floats:
    """Returns the FLOPs, per prompt, of the passes over what is trained on."""
    one_pass = partial(
        pass_flops, facts, rows, tokens_per_microbatch=treatment.tokens_per_microbatch
    )
    total = one_pass(trained, parts=treatment.updates, is_training=True)
    scored = treatment.scores_proximal + treatment.scores_reference
    if scored:
        total = total + scored * one_pass(trained, parts=1, is_training=False)
    if treatment.scores_reference_on_all:
        total = total + one_pass(sampled, parts=1, is_training=False)
    return total


def _named(links: tuple[Link, ...], name: str) -> list[Link]:
    return [link for link in links if link.name == name]
