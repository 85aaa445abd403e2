"""Predicts costs and groups of a round from a profile and compares them with finished rounds.

docs/advice.md gives the cost model: a round reads every prompt once and samples every rollout; it
computes log-probs of the rollouts with weight once, if an iteration has several updates, and trains
on them once; the profile counts.
Rates are those of the base policy: the prediction ignores that they rise. Lengths are those of
solved rollouts (`Facts.in_training`). FLOPs of single passes come from the modality
(`grpo/modalities/costs.py`).
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch

from grpo.advice.facts import Facts
from grpo.allocation.curriculum import plan_curriculum, select_phase
from grpo.allocation.posterior import Floats, Ints, reused_uniform_chance
from grpo.allocation.selection import Selection
from grpo.errors import located
from grpo.modalities.costs import PassFlops
from grpo.objective.link import Link
from grpo.objective.penalty import scores_reference_of_all, scores_reference_of_kept
from grpo.params.parameters import BASE, Arm, Parameters
from grpo.report.reading import GROUP, read_rollouts, read_round_costs
from grpo.runtime.artifacts.files import read_json
from grpo.runtime.artifacts.stored_iterations import count_iterations, iterations_of
from grpo.runtime.artifacts.tables import is_judged
from grpo.runtime.seeds import derive_seed
from grpo.schema import PARAMS
from grpo.training.batches import pack_microbatches
from grpo.wiring.allocation import build_selection, curriculum_of, reads_profile
from grpo.wiring.objectives import build_objective
from grpo.wiring.prices import scores_proximal

TINY = 1e-9
SEED = 0  # of the draw of rollouts in `pass_flops`


@dataclass(frozen=True, kw_only=True)
class Amounts:
    """Cost and groups of one or several rounds, predicted or counted."""

    iterations: float
    groups: float  # used by an update
    uniform_groups: float  # of `groups`, those whose rollouts have equal outcomes
    rollouts: float  # sampled or reused from the profile
    sampled_steps: float
    decode_steps: float  # of sampling batches, each as many as its longest rollout has
    trained_steps: float
    sampling_flops: float
    update_flops: float
    signal: float  # sum over groups of (G - 1) p (1 - p): within-group sum of squares

    @classmethod
    def total(cls, each: pd.DataFrame) -> "Amounts":
        """Returns the sum over the rows of a table from `predict_each`."""
        return cls(**{name: float(each[name].sum()) for name in cls.__dataclass_fields__})

    @classmethod
    def of(cls, parts: Iterable["Amounts"]) -> "Amounts":
        """Returns the sum of several amounts."""
        return cls.total(pd.DataFrame([asdict(each) for each in parts]))

    def scaled(self, factor: float) -> "Amounts":
        """Returns all amounts multiplied by `factor`."""
        return Amounts(**{name: factor * amount for name, amount in asdict(self).items()})

    @property
    def uniform_fraction(self) -> float:
        """The fraction of groups whose rollouts all have the same outcome."""
        return self.uniform_groups / self.groups if self.groups else 0.0

    @property
    def mixed_groups(self) -> float:
        """Number of groups with both outcomes, which are the groups with signal."""
        return self.groups - self.uniform_groups

    @property
    def flops(self) -> float:
        """FLOPs of sampling and updates."""
        return self.sampling_flops + self.update_flops


@dataclass(frozen=True, kw_only=True)
class Treatment:
    """Settings of an arm that determine its rollouts and the passes over them."""

    drops_uniform: bool
    keep: int | None  # trained rollouts per group; None: all
    scores_proximal: bool  # whether proximal log-probs of trained rollouts are computed
    scores_reference: bool  # whether reference log-probs of trained rollouts are computed
    scores_reference_on_all: bool  # whether reference log-probs of all rollouts are computed
    selection: Selection
    iterations: int  # per round; each samples its own prompts, or spends the selection's budget
    updates_per_iteration: int  # in each pass
    passes: int  # over the rollouts of an iteration
    rollouts_per_batch: int  # in sampling
    tokens_per_microbatch: int

    @property
    def dealt(self) -> int:
        """The number of iterations to which the prompts of a phase are dealt, once each."""
        return self.iterations if self.selection.budget is None else 1


class TrainedGroups(NamedTuple):
    """Number of rollouts that training uses of each group, and the probability that it does."""

    size: Ints
    chance: Floats

    @property
    def expected(self) -> Floats:
        """Expected number of trained rollouts per prompt."""
        expected: Floats = self.size * self.chance
        return expected


def treatment_of(arm: Arm, name: str, facts: Facts) -> Treatment:
    """Returns the settings of an arm, which need not be in the parameter file.

    Raises:
      ParameterError: If a link or a selection of the arm is invalid.
    """
    links, training = build_objective(arm.objective, name).links, arm.training
    keep = [int(each.settings["keep"] or 0) for each in _named(links, "keep_extreme_rollouts")]
    return Treatment(
        drops_uniform=bool(_named(links, "drop_uniform_groups")),
        keep=min(keep, default=None),
        scores_proximal=scores_proximal(training.optimizer_steps_per_iteration, facts.cost_model),
        scores_reference=scores_reference_of_kept(links),
        scores_reference_on_all=scores_reference_of_all(links),
        selection=build_selection(arm.selection, name),
        iterations=training.iterations_per_round,
        updates_per_iteration=training.updates_per_iteration,
        passes=training.passes_per_iteration,
        rollouts_per_batch=arm.sampling.rollouts_per_batch,
        tokens_per_microbatch=arm.training.tokens_per_microbatch,
    )


def _named(links: tuple[Link, ...], name: str) -> list[Link]:
    return [link for link in links if link.name == name]


def plan_phase(params: Parameters, arm: str, phase: int, facts: Facts) -> pd.DataFrame:
    """Returns the prompts and group sizes that the curriculum stage will assign to a phase.

    Raises:
      ParameterError: If the curriculum is invalid or has no such phase.
    """
    steps = curriculum_of(params, arm)
    with located(f"{PARAMS}: arms.{arm}.curriculum"):
        plan = plan_curriculum(
            facts.profile, steps, seed=derive_seed(params.seed, "curriculum", arm)
        )
        return select_phase(plan, phase)


def predict_round(params: Parameters, name: str, facts: Facts) -> Amounts:
    """Returns the predicted amounts of a round of `params`."""
    each = params.rounds[name]
    return predict(
        plan_phase(params, each.arm, each.phase, facts),
        treatment_of(params.arms[each.arm], each.arm, facts),
        facts,
        starts_from_base=each.start == BASE,
    )


def predict_arm(params: Parameters, arm: str, facts: Facts) -> Amounts:
    """Returns the predicted amounts of the rounds on an arm's chain, without the profile."""
    return Amounts.of(predict_round(params, name, facts) for name in params.chain(arm)[1:])


def allocates_online(params: Parameters, arm: str) -> bool:
    """Returns whether a round on an arm's chain chooses by what earlier iterations have learned.

    Its prompts and group sizes depend on outcomes that a profile does not have: no prediction.
    """
    arms = {arm, *(params.rounds[name].arm for name in params.chain(arm)[1:])}
    return any(build_selection(params.arms[each].selection, each).allocate for each in arms)


def profile_flops(params: Parameters, arm: str, facts: Facts) -> int:
    """Returns the FLOPs of the profile if an arm on this arm's chain reads it, else 0."""
    arms = {arm, *(params.rounds[name].arm for name in params.chain(arm)[1:])}
    return facts.cost.flops if any(reads_profile(params, each) for each in arms) else 0


def predict(
    plan: pd.DataFrame, treatment: Treatment, facts: Facts, *, starts_from_base: bool
) -> Amounts:
    """Returns the expected amounts of a plan."""
    each = predict_each(plan, treatment, facts, starts_from_base=starts_from_base)
    return Amounts.total(each)


def predict_each(
    plan: pd.DataFrame, treatment: Treatment, facts: Facts, *, starts_from_base: bool
) -> pd.DataFrame:
    """Returns the expected amounts of each planned prompt, a column per field of Amounts.

    The first iteration of a round from the base may reuse rollouts of the profile.

    Args:
      plan: Columns prompt_id and rollouts (the group size).
    """
    reused = treatment.selection.reuses_profile and starts_from_base
    passed = _predict_pass(plan, treatment, facts, reused=reused)
    if reused and treatment.iterations > 1:
        share = 1 / treatment.iterations  # the first iteration's
        later = _predict_pass(plan, treatment, facts, reused=False)
        passed = share * passed + (1 - share) * later
    return passed * (treatment.iterations // treatment.dealt)


def _predict_pass(
    plan: pd.DataFrame, treatment: Treatment, facts: Facts, *, reused: bool
) -> pd.DataFrame:
    """Returns the expected amounts of each planned prompt in one pass over the plan.

    Without a budget, a round makes one pass, which is dealt to its iterations. With a budget, every
    iteration makes one.
    """
    rows = facts.rows_of(plan["prompt_id"])
    size, uniform = _groups(rows, plan["rollouts"].to_numpy(), facts, reused=reused)
    sampled, kept = _visited(treatment.selection, uniform)
    equal = uniform * treatment.selection.keeps_uniform
    trained = TrainedGroups(
        size=size if treatment.keep is None else np.minimum(size, treatment.keep),
        chance=kept * (1 - uniform + equal * (not treatment.drops_uniform)),
    )
    everything = TrainedGroups(size=size, chance=np.full(len(size), kept))
    scale = sampling_scale(facts)
    facts = facts if reused else facts.in_training
    steps = facts.profile["mean_steps"].to_numpy()[rows]
    drawn = 0.0 if reused else sampled
    # An iteration that samples a part of the prompts has fewer of each length.
    sampling = partial(
        sampling_flops,
        facts,
        rows,
        scale=scale,
        rollouts_per_batch=treatment.dealt * treatment.rollouts_per_batch,
    )
    revision = treatment.selection.revision
    first_answers = revision.share if revision else 0.0  # per group
    decoding = partial(
        decode_steps,
        facts,
        rows,
        draws=_draws(treatment, sampled * len(rows)),
        rollouts_per_batch=treatment.rollouts_per_batch,
    )
    return pd.DataFrame(
        {
            "iterations": treatment.dealt / len(rows),
            "groups": kept * (1 - uniform + equal),
            "uniform_groups": kept * equal,
            "rollouts": sampled * size,
            "sampled_steps": drawn * (size + first_answers) * steps,
            "decode_steps": (
                decoding(drawn * size) + decoding(drawn * first_answers * np.ones_like(size))
            )
            / len(rows),
            "trained_steps": treatment.passes * trained.expected * steps,
            "sampling_flops": drawn
            * (sampling(size) + first_answers * sampling(np.ones_like(size))),
            "update_flops": _update_flops(rows, trained, everything, treatment, facts),
            "signal": kept * (size - 1) * facts.posterior.outcome_variance()[rows],
        }
    )


def _groups(rows: Ints, asked: Ints, facts: Facts, *, reused: bool) -> tuple[Ints, Floats]:
    """Returns the size of each group and the probability that its outcomes are all equal."""
    if not reused:
        return asked, facts.posterior.select(rows).uniform_chance(asked)
    drawn = facts.profile["rollouts"].to_numpy()[rows]
    successes = facts.profile["successes"].to_numpy()[rows]
    size = np.minimum(asked, drawn)
    return size, reused_uniform_chance(successes, drawn, size)


def _visited(selection: Selection, uniform: Floats) -> tuple[float, float]:
    """Returns the fractions of planned prompts that are sampled, and kept if mixed."""
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


def _draws(treatment: Treatment, prompts: float) -> float:
    """Returns how often a pass over the plan samples, which draws this many prompts in all."""
    budget = treatment.selection.budget
    if budget is None or treatment.selection.keeps_uniform:
        return treatment.dealt
    return prompts / budget.prompts_per_batch  # outcomes are read after every batch


def _update_flops(
    rows: Ints, trained: TrainedGroups, sampled: TrainedGroups, treatment: Treatment, facts: Facts
) -> Floats:
    """Returns the FLOPs per prompt of log-prob and training passes over rollouts."""
    one_pass = partial(
        pass_flops, facts, rows, tokens_per_microbatch=treatment.tokens_per_microbatch
    )
    dealt = treatment.dealt
    updates = dealt * treatment.updates_per_iteration
    total = treatment.passes * one_pass(trained, parts=updates, is_training=True)
    scored = treatment.scores_proximal + treatment.scores_reference
    if scored:
        total = total + scored * one_pass(trained, parts=dealt, is_training=False)
    if treatment.scores_reference_on_all:
        total = total + one_pass(sampled, parts=dealt, is_training=False)
    return total


def decode_steps(
    facts: Facts, rows: Ints, rollouts: Floats, *, draws: float, rollouts_per_batch: int
) -> float:
    """Returns the expected decode steps, of each batch as many as its longest rollout has.

    Args:
      rollouts: Expected number of sampled rollouts per prompt, of all draws.
      draws: Number of times that prompts are sampled; each starts a batch.
    """
    total = float(rollouts.sum())
    if not total:
        return 0.0
    batches = math.ceil(total / draws / rollouts_per_batch)
    of_prompt = np.bincount(rows, weights=rollouts, minlength=len(facts.profile))
    longest = expected_longest(
        facts.rollouts["steps"].to_numpy(),
        of_prompt[facts.rollouts["row"].to_numpy()],
        count=total / draws / batches,
    )
    return draws * batches * longest


def expected_longest(steps: Ints, weights: Floats, *, count: float) -> float:
    """Returns the expected maximum of `count` draws, sum over t of 1 - P(steps <= t)^count."""
    mass = np.bincount(steps, weights=weights)
    at_most = mass.cumsum() / mass.sum()
    return float((1 - np.minimum(at_most, 1.0) ** count).sum())


def sampling_scale(facts: Facts) -> float:
    """Returns the counted FLOPs of the profile over those of the formula for its sampling."""
    everything = np.arange(len(facts.profile))
    flops = sampling_flops(
        facts, everything, facts.drawn, scale=1.0, rollouts_per_batch=facts.rollouts_per_batch
    )
    return facts.cost.flops / float(flops.sum())


def sampling_flops(
    facts: Facts, rows: Ints, sizes: Ints, *, scale: float, rollouts_per_batch: int
) -> Floats:
    """Returns the expected FLOPs of sampling each prompt's group.

    Args:
      scale: By which the formula's value is multiplied; see `sampling_scale`.
    """
    steps = facts.rollouts["steps"].to_numpy()
    return scale * facts.cost_model.group_flops(
        _padded_prompts(facts, rows, sizes, rollouts_per_batch),
        sizes,
        mean_later_steps=_mean_by_prompt(facts, steps - 1.0)[rows],
        mean_step_pairs=_mean_by_prompt(facts, steps * (steps - 1) / 2)[rows],
    )


def pass_flops(
    facts: Facts,
    rows: Ints,
    groups: TrainedGroups,
    *,
    parts: int,
    tokens_per_microbatch: int,
    is_training: bool,
) -> Floats:
    """Returns the FLOPs per prompt of one pass over the trained rollouts.

    Packs one draw of rollouts into microbatches as training does. Because of padding and shared
    prompts, packed FLOPs differ from the sum over single rollouts by a factor, which is applied to
    every prompt.

    Args:
      parts: Number of batches into which the groups are divided.
    """
    prompt_of_rollout, steps = facts.rollouts["row"].to_numpy(), facts.rollouts["steps"].to_numpy()
    prompt_tokens = facts.profile["prompt_tokens"].to_numpy()[prompt_of_rollout]
    alone = _mean_by_prompt(
        facts, facts.cost_model.rollout_flops(prompt_tokens, steps, is_training=is_training)
    )
    drawn = _draw(facts, rows, groups, parts)
    computed = spread = 0.0
    for part in range(parts):
        own = drawn[drawn[:, 0] == part]
        computed += packed_flops(facts.cost_model, own[:, 1:], tokens_per_microbatch, is_training)
        spread += float(alone[own[:, 1]].sum())
    result: Floats = groups.expected * alone[rows] * (computed / spread if spread else 1.0)
    return result


def packed_flops(
    flops: PassFlops, rollouts: Ints, tokens_per_microbatch: int, is_training: bool
) -> float:
    """Returns the FLOPs of a pass over rollouts packed into microbatches.

    Args:
      rollouts: Columns prompt (an index), prompt tokens and steps.
    """
    if len(rollouts) == 0:
        return 0.0
    widths = torch.from_numpy(rollouts[:, 1] + rollouts[:, 2])
    packed = pack_microbatches(widths, tokens_per_microbatch)
    return float(
        sum(
            flops.microbatch_flops(rollouts[each.numpy()], is_training=is_training)
            for each in packed
        )
    )


def _draw(facts: Facts, rows: Ints, groups: TrainedGroups, parts: int) -> Ints:
    """Returns a draw of trained rollouts: columns part, profile row, prompt tokens, steps."""
    chooser = np.random.default_rng(SEED)
    counts = groups.size * (chooser.random(len(rows)) < groups.chance)
    # Without replacement: duplicates have equal length and would share a microbatch and its prompt.
    steps = [
        np.resize(chooser.permutation(facts.steps_of(row)), count)
        for row, count in zip(rows.tolist(), counts.tolist())
    ]
    columns = (
        np.repeat(chooser.permutation(len(rows)) % parts, counts),
        np.repeat(rows, counts),
        np.repeat(facts.profile["prompt_tokens"].to_numpy()[rows], counts),
        np.concatenate(steps),
    )
    return np.stack(columns, axis=1).astype(np.int64)


def _padded_prompts(facts: Facts, rows: Ints, sizes: Ints, rollouts_per_batch: int) -> Floats:
    """Returns each prompt's padded length; sampling batches prompts of similar length."""
    tokens = facts.profile["prompt_tokens"].to_numpy()[rows]
    order = tokens.argsort(kind="stable")
    batch = (sizes[order].cumsum() - sizes[order]) // rollouts_per_batch
    widest = np.zeros(int(batch.max(initial=0)) + 1)
    np.maximum.at(widest, batch, tokens[order])
    width = np.empty(len(rows))
    width[order] = widest[batch]
    return width


def _mean_by_prompt(facts: Facts, value: Floats) -> Floats:
    """Returns the mean over each prompt's rollouts of a value per profile rollout."""
    rows = facts.rollouts["row"].to_numpy()
    total = np.bincount(rows, weights=value, minlength=len(facts.profile))
    mean: Floats = total / np.bincount(rows, minlength=len(facts.profile))
    return mean


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Predicted and counted amounts of a finished round."""

    round: str
    predicted: Amounts
    actual: Amounts


def compare_rounds(artifacts: Path, params: Parameters, facts: Facts) -> list[Compared]:
    """Returns the comparisons of the finished rounds of `params`, in file order.

    Omits a round that has rollouts of prompts outside its curriculum phase, because it ran with
    other parameters. A round that stopped on a plateau is predicted for the iterations that it
    had: when it stops is not predicted.

    Raises:
      ArtifactError: If a file of a finished round is broken.
    """
    found = []
    for name, each in params.rounds.items():
        summary = artifacts / "training" / name / "summary.json"
        if not summary.exists():
            continue
        arm = params.arms[each.arm]
        actual = count_round(
            artifacts, name, facts, rollouts_per_batch=arm.sampling.rollouts_per_batch
        )
        planned = set(plan_phase(params, each.arm, each.phase, facts)["prompt_id"])
        if planned.issuperset(actual.prompts):
            predicted = predict_round(params, name, facts)
            if "plateau" in read_json(summary):
                done = count_iterations(summary) / arm.training.iterations_per_round
                predicted = predicted.scaled(done)
            found.append(Compared(round=name, predicted=predicted, actual=actual.amounts))
    return found


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Prompts and amounts of a finished round."""

    prompts: frozenset[str]
    amounts: Amounts


def count_round(artifacts: Path, name: str, facts: Facts, *, rollouts_per_batch: int) -> Counted:
    """Returns prompts and amounts of all iterations of a round, counted in its artifacts.

    Which batch a rollout was in is not stored: each batch counts the longest of its iteration.
    Dropped groups of a selection and first answers are not stored, so that `rollouts` and
    `decode_steps` lack them.
    """
    costs = read_round_costs(artifacts, name)
    rollouts = read_rollouts(iterations_of(artifacts, name), facts.profile)
    judged = rollouts[is_judged(rollouts)]
    is_first_sampled = costs.sampling["sampled_steps"] > costs.later_sampling["sampled_steps"]
    sampled = rollouts if is_first_sampled else rollouts[rollouts["iteration"] > 0]  # else reused
    lengths = sampled.groupby("iteration")["steps"].agg(["size", "max"])
    groups = judged.groupby(GROUP)["outcome"].agg(["size", "mean", "min", "max"])
    amounts = Amounts(
        iterations=float(rollouts["iteration"].nunique()),
        groups=float(len(groups)),
        uniform_groups=float((groups["min"] == groups["max"]).sum()),
        rollouts=float(len(rollouts)),
        sampled_steps=float(costs.sampling["sampled_steps"]),
        decode_steps=float((np.ceil(lengths["size"] / rollouts_per_batch) * lengths["max"]).sum()),
        trained_steps=float(costs.update["trained_steps"]),
        sampling_flops=float(costs.sampling["flops"]),
        update_flops=float(costs.update["flops"]),
        signal=float((groups["size"] * groups["mean"] * (1 - groups["mean"])).sum()),
    )
    return Counted(prompts=frozenset(judged["prompt_id"]), amounts=amounts)


def relative_error(predicted: float, actual: float) -> float | None:
    """Returns predicted / actual - 1; None if actual is 0."""
    return predicted / actual - 1 if actual else None
