"""Proposes the arm with as many groups with signal as the reference arm for the fewest FLOPs.

A candidate combines a group sizing with a window of outcome rates from which it takes prompts. It
uses a prompt at most as often as the reference arm, so small groups need many prompts.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import pandas as pd

from grpo.advice.facts import Facts
from grpo.advice.prediction import (
    Amounts,
    predict_arm,
    predict_each,
    profile_flops,
    treatment_of,
)
from grpo.allocation.curriculum import inverse_rate_size
from grpo.objective.rules import Severity
from grpo.params.parameters import (
    BASE,
    Arm,
    ConstantRate,
    DecayingRate,
    LinkSpec,
    Parameters,
    RoundParams,
    Training,
)
from grpo.wiring.checks import findings
from grpo.wiring.objectives import build_objective

NAME = "advised"
SIZES = (2, 4, 8, 16, 32)
RANGES = ((2, 8), (2, 16), (4, 16))  # of size_groups_by_inverse_rate
Window = tuple[float, float]  # of outcome rates, both ends included
LOWS, HIGHS = (0.0, 0.125, 0.25, 0.375), (0.625, 0.75, 0.875, 1.0)
WINDOWS: tuple[Window | None, ...] = (
    None,  # all prompts, without reading the profile
    *((low, high) for low in LOWS for high in HIGHS if (low, high) != (0.0, 1.0)),
)
FOR_ANY_SIZE: list[LinkSpec] = [{"rloo": {"low": 0.2, "high": 0.28}}]
DROP: LinkSpec = "drop_uniform_groups"
VISITS = "visit_prompts"
TINY = 1e-9


@dataclass(frozen=True, kw_only=True)
class Sizing:
    """One size for all groups, or sizes by the inverse of the outcome rate within a range."""

    smallest: int
    largest: int

    @property
    def is_fixed(self) -> bool:
        """Whether all groups have one size, for which the profile is not read."""
        return self.smallest == self.largest

    @property
    def step(self) -> LinkSpec:
        """The curriculum step that sets these sizes."""
        if self.is_fixed:
            return {"fix_group_size": {"rollouts": self.smallest}}
        return {"size_groups_by_inverse_rate": {"smallest": self.smallest, "largest": self.largest}}

    def __str__(self) -> str:
        return str(self.smallest) if self.is_fixed else f"{self.smallest} to {self.largest}"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An allocation and its cost for as many groups with signal as the reference."""

    sizing: Sizing
    window: Window | None  # None: all prompts
    available: int  # prompts in the window, the same number in each phase
    per_round: int  # groups of a round: its prompts, counted at every visit
    iterations: int  # of a round
    updates_per_iteration: int
    visits: int  # of a prompt, at most
    phases: int  # of the curriculum: one per round, or one of all prompts if visits are several
    rounds: int
    amounts: Amounts  # of these groups
    profile_flops: int  # 0 if the candidate does not read the profile

    @property
    def groups(self) -> int:
        """Groups of all rounds."""
        return self.per_round * self.rounds

    @property
    def needed(self) -> int:
        """Prompts that suffice for all groups and for each iteration."""
        return max(math.ceil(self.groups / self.visits), self.per_iteration)

    @property
    def shortage(self) -> float:
        """Prompts needed / prompts available, at least 1; 1 if there are enough."""
        return max(self.needed / max(self.available, TINY), 1.0)

    @property
    def per_iteration(self) -> int:
        """Prompts that an iteration samples, at most."""
        return math.ceil(self.per_round / self.iterations)

    @property
    def flops(self) -> float:
        """FLOPs of sampling, updates and, if the candidate reads it, the profile."""
        return self.amounts.flops + self.profile_flops


@dataclass(frozen=True, kw_only=True)
class _Matched:
    """What a candidate has in common with the reference arm."""

    training: Training
    rounds: int
    mixed_groups: float
    rollouts_per_update: float
    visits: int  # of a prompt, at most


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """The cheapest candidate that has enough prompts, as an arm with its rounds."""

    reference: str
    target: Amounts  # of the reference arm
    target_flops: float  # of the reference arm, with the profile if the arm reads it
    by_sizing: list[Candidate]  # per sizing the cheapest, or the one with the smallest shortage
    chosen: Candidate | None  # None: no candidate has enough prompts
    name: str  # of the proposed arm
    params: Parameters  # with the proposed arm and its rounds


def propose(params: Parameters, facts: Facts) -> Proposal:
    """Returns the arm with as many groups with signal as the first arm, for the fewest FLOPs."""
    reference = next(arm for arm in params.arms if params.rounds_of(arm))
    target = predict_arm(params, reference, facts)
    by_sizing = list(_by_sizing(params, facts, reference, target))
    possible = [each for each in by_sizing if each.shortage == 1.0]
    chosen = min(possible, key=lambda each: each.flops, default=None)
    name = next(each for each in _names() if each not in params.arms)
    return Proposal(
        reference=reference,
        target=target,
        target_flops=target.flops + profile_flops(params, reference, facts),
        by_sizing=by_sizing,
        chosen=chosen,
        name=name,
        params=_with_arm(params, name, reference, chosen) if chosen else params,
    )


def _by_sizing(
    params: Parameters, facts: Facts, reference: str, target: Amounts
) -> Iterator[Candidate]:
    """Yields, per sizing, the cheapest candidate, or the one with the smallest shortage."""
    rounds, arm = len(params.rounds_of(reference)), params.arms[reference]
    per_update = target.rollouts / rounds / _updates_per_round(arm.training)
    one_size = treatment_of(_without_selection(arm, _dropping(arm)), NAME, facts)
    any_size = treatment_of(_without_selection(arm, FOR_ANY_SIZE), NAME, facts)
    matched = _Matched(
        training=arm.training,
        rounds=rounds,
        mixed_groups=target.mixed_groups,
        rollouts_per_update=per_update,
        visits=_visits(arm, target, facts),
    )
    sizings = [Sizing(smallest=each, largest=each) for each in SIZES]
    sizings += [Sizing(smallest=low, largest=high) for low, high in RANGES]
    for sizing in sizings:
        rates = facts.profile["outcome_rate"].tolist()
        sizes = [inverse_rate_size(rate, sizing.smallest, sizing.largest) for rate in rates]
        plan = pd.DataFrame({"prompt_id": facts.profile["prompt_id"], "rollouts": sizes})
        wanted = _updates(float(sum(sizes)), per_update)
        iterations, updates = _divide(arm.training, wanted, prompts=len(plan))
        treatment = replace(
            one_size if sizing.is_fixed else any_size,
            iterations=iterations,
            updates_per_iteration=updates,
        )
        each = predict_each(plan, treatment, facts, starts_from_base=False)
        found = [_candidate(each, facts, sizing, window, matched) for window in WINDOWS]
        yield min(found, key=lambda each: (each.shortage, each.flops))


def _visits(arm: Arm, target: Amounts, facts: Facts) -> int:
    """Returns how often an arm visits a prompt, rounded up; 1 without VISITS."""
    if not any(VISITS in each for each in arm.selection):
        return 1
    return max(1, math.ceil(target.groups / len(facts.profile)))


def _candidate(
    each: pd.DataFrame,
    facts: Facts,
    sizing: Sizing,
    window: Window | None,
    matched: _Matched,
) -> Candidate:
    """Returns the candidate with as many prompts of a window as give the mixed groups."""
    rates = facts.profile["outcome_rate"]
    inside = each if window is None else each[rates.between(*window)]
    whole = Amounts.total(inside)
    rounds = matched.rounds
    phases = 1 if matched.visits > 1 else rounds
    share = matched.mixed_groups / max(whole.mixed_groups, TINY)
    per_round = max(1, math.ceil(share * len(inside) / rounds))
    amounts = whole.scaled(per_round * rounds / max(len(inside), 1))
    wanted = _updates(amounts.rollouts / rounds, matched.rollouts_per_update)
    iterations, updates = _divide(matched.training, wanted, prompts=per_round)
    return Candidate(
        sizing=sizing,
        window=window,
        available=len(inside) // phases * phases,
        per_round=per_round,
        iterations=iterations,
        updates_per_iteration=updates,
        visits=matched.visits,
        phases=phases,
        rounds=rounds,
        amounts=amounts,
        profile_flops=0 if window is None and sizing.is_fixed else facts.cost.flops,
    )


def _with_arm(params: Parameters, name: str, reference: str, chosen: Candidate) -> Parameters:
    """Returns the parameters with the proposed arm and a chain of rounds added."""
    arm = params.arms[reference]
    iterations, updates = chosen.iterations, chosen.updates_per_iteration
    per_round = iterations * updates * arm.training.passes_per_iteration
    training = arm.training.model_copy(
        update={
            "iterations_per_round": iterations,
            "updates_per_iteration": updates,
            "updates_per_audit": per_round,
            "schedule": _rescaled(arm.training, per_round),
            "stop_on_plateau": None,  # the amounts are those of all iterations
        }
    )
    names = [BASE, *(f"{name}-{index + 1}" for index in range(chosen.rounds))]
    rounds = {
        after: RoundParams(arm=name, start=before, phase=min(phase, chosen.phases))
        for phase, (before, after) in enumerate(pairwise(names), start=1)
    }
    allocated = arm.model_copy(update={"curriculum": _curriculum(chosen), "training": training})
    for objective in [_dropping(arm), FOR_ANY_SIZE] if chosen.sizing.is_fixed else [FOR_ANY_SIZE]:
        proposed = _without_selection(allocated, objective)
        if chosen.visits > 1:
            visits = {VISITS: {"prompts": chosen.per_iteration}}
            proposed = proposed.model_copy(update={"selection": [visits]})
        found = _with(params, name, proposed, rounds)
        own = [each for each in findings(found) if each.path.startswith(f"arms.{name}.")]
        if not any(each.severity is Severity.ERROR for each in own):
            break
    return found


def _rescaled(training: Training, per_round: int) -> ConstantRate | DecayingRate | None:
    """Returns the schedule of a learning rate that decays as far in rounds of other lengths.

    Args:
      per_round: Updates of a round of the proposal, which has as many rounds.
    """
    schedule = training.schedule
    if not isinstance(schedule, DecayingRate):
        return schedule
    before = training.iterations_per_round * training.optimizer_steps_per_iteration
    total = math.ceil(schedule.total_updates * per_round / before)
    warmup = schedule.warmup_updates * per_round // before
    return schedule.model_copy(update={"total_updates": total, "warmup_updates": warmup})


def _curriculum(chosen: Candidate) -> list[LinkSpec]:
    """Returns the curriculum steps of a candidate."""
    prompts = chosen.available if chosen.visits > 1 else chosen.per_round
    split: LinkSpec = {"split_at_random": {"phases": chosen.phases, "prompts_per_phase": prompts}}
    if chosen.window is None:
        return [split, chosen.sizing.step]
    low, high = chosen.window
    return [{"keep_rate_window": {"low": low, "high": high}}, split, chosen.sizing.step]


def _without_selection(arm: Arm, objective: list[LinkSpec]) -> Arm:
    """Returns the arm with another objective and no selection: it samples each prompt once."""
    return arm.model_copy(update={"selection": [], "objective": objective})


def _dropping(arm: Arm) -> list[LinkSpec]:
    """Returns an arm's objective with DROP added, unless a uniform group has a gradient.

    A group is uniform if its outcomes are equal. Whether its rewards differ is not looked at.
    """
    links = build_objective(arm.objective, NAME).links
    needs_all = any(link.name in (DROP, "center_by_moving_average") for link in links)
    needs_all |= any(
        link.settings.get("beta") or {"entropy bonus", "part scores"} & {*link.kinds}
        for link in links
    )
    return arm.objective if needs_all else [*arm.objective, DROP]


def _with(params: Parameters, name: str, arm: Arm, rounds: dict[str, RoundParams]) -> Parameters:
    return params.model_copy(
        update={"arms": {**params.arms, name: arm}, "rounds": {**params.rounds, **rounds}}
    )


def _updates(rollouts: float, per_update: float) -> int:
    """Returns the number of updates with about `per_update` rollouts each, at least 1."""
    return max(1, round(rollouts / max(per_update, TINY)))


def _updates_per_round(training: Training) -> int:
    return training.iterations_per_round * training.updates_per_iteration


def _divide(training: Training, updates: int, *, prompts: int) -> tuple[int, int]:
    """Returns iterations per round and updates per iteration, about `updates` in all.

    If each iteration of the reference has one update, so has each of the proposal, which thus stays
    on-policy. Otherwise, the number of iterations is the reference's. An update takes at least one
    of the round's prompts.
    """
    if training.updates_per_iteration == 1:
        return min(updates, prompts), 1
    iterations = min(training.iterations_per_round, updates, prompts)
    return iterations, max(1, min(round(updates / iterations), prompts // iterations))


def _names() -> Iterator[str]:
    """Yields candidate names for an arm: NAME, then NAME with version numbers."""
    yield NAME
    number = 2
    while True:
        yield f"{NAME}-v{number}"
        number += 1
