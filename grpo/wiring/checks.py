"""Application of the composition rules to a parameter file."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from grpo.errors import ParameterError, located
from grpo.objective.base import chain
from grpo.objective.rules import RULES, Plan, Severity
from grpo.objective.trial import try_objective
from grpo.params.parameters import BASE, Arm, DecayingRate, Parameters
from grpo.rewards import find_judge
from grpo.runtime.plugins import call_plugin, is_plugin
from grpo.schema import PARAMS
from grpo.wiring.allocation import (
    build_selection,
    check_selection,
    curriculum_of,
    selection_paths,
)
from grpo.wiring.objectives import build_objective, list_objective
from grpo.wiring.prices import has_cost_model


class Finding(NamedTuple):
    """A violation of a composition rule, with the path of the parameter that causes it."""

    rule: str
    severity: Severity
    path: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.rule} {self.severity.name} {self.path}: {self.sentence}"


def findings(params: Parameters) -> list[Finding]:
    """Returns all violations of composition rules, errors first.

    Raises:
      ParameterError: If a component is wrong, or the curriculum does not have a round's phase.
    """
    found = []
    for name, arm in params.arms.items():
        paths, plan = _plan(params, name, arm)
        _check_phases(params, name)
        check_selection(params, name, plan.curriculum)
        _check_budget(params, name)
        _check_updates(params, name, plan)
        _check_schedule(params, name)
        _check_own_links(arm, name, plan)
        for rule in RULES:
            for cause in rule.find(plan):
                is_of_arm = cause.split(".")[0] in type(arm).model_fields
                path = paths.get(cause, f"arms.{name}.{cause}" if is_of_arm else cause)
                found.append(Finding(rule.id, rule.severity, path, rule.sentence))
    return sorted(found, key=lambda each: (-each.severity.value, each.path, each.rule))


def remarks_on_revisions(params: Parameters) -> list[str]:
    """Returns a warning for each model of the hub whose revision is not a commit."""
    return [
        f"{path}.revision: {revision!r} is not a commit, so that a later run may load other "
        "weights; name the commit that you use"
        for path, revision in _hub_models(params.model_dump(), "")
        if not re.fullmatch("[0-9a-f]{40}", revision)
    ]


def _hub_models(value: object, path: str) -> Iterator[tuple[str, str]]:
    """Yields the path and the revision of each model of the hub below a value."""
    match value:
        case {"source": "hub", "revision": str(revision)}:
            yield path, revision
        case dict():
            for name, each in value.items():
                yield from _hub_models(each, f"{path}.{name}".removeprefix("."))
        case list() | tuple():
            for index, each in enumerate(value):
                yield from _hub_models(each, f"{path}[{index}]")


def _plan(params: Parameters, name: str, arm: Arm) -> tuple[dict[str, str], Plan]:
    """Returns the path of each component of an arm by name, and the facts that rules read."""
    objective, chained = list_objective(arm.objective, name), build_objective(arm.objective, name)
    curriculum, selection = curriculum_of(params, name), build_selection(arm.selection, name)
    paths = {link.name: path for path, each in objective for link in each.links}
    for index, step in enumerate(curriculum):
        paths[step.link.name] = f"arms.{name}.curriculum[{index}].{step.link.name}"
    rounds = [params.rounds[each] for each in params.rounds_of(name)]
    return {**paths, **selection_paths(arm.selection, name)}, Plan(
        links=chained.links,
        curriculum=tuple(step.link for step in curriculum),
        group_sizes=selection.sizes.union(*(step.sizes for step in curriculum)),
        optimizer_steps_per_iteration=arm.training.optimizer_steps_per_iteration,
        updates_per_iteration=arm.training.updates_per_iteration,
        iterations_per_round=arm.training.iterations_per_round,
        staleness=arm.training.staleness,
        refreshes_reference=arm.training.refreshes_reference,
        has_binary_reward=_has_binary_reward(params),
        scores_parts=any(find_judge(each.judge).scores_parts for each in params.reward.judges),
        normalized=tuple(
            f"{where}.normalize"
            for where, each in zip(params.judges("reward"), params.reward.judges)
            if each.normalize != "none"
        ),
        dropouts=_dropouts(params),
        has_other_density=arm.sampling.has_other_density,
        follows_reward=arm.sampling.num_levels > 1,
        stops_on_plateau=arm.training.stop_on_plateau is not None,
        selection=selection.links,
        phases=tuple(each.phase for each in rounds),
        starts_from_base=any(each.start == BASE for each in rounds),
        reads_profile=any(step.reads_profile for step in curriculum),
        profile_rollouts=params.profile.rollouts_per_prompt,
        **params.modality.rule_facts(params.policy, arm.sampling),
    )


def _check_phases(params: Parameters, name: str) -> None:
    """Raises if a round's phase exceeds those of the curriculum, or these need too many prompts."""
    steps = curriculum_of(params, name)
    phases = max(each.phases for each in steps)
    prompts = getattr(params.task, "train_prompts", None)
    for index, step in enumerate(steps):
        needed = step.phases * int(step.link.settings.get("prompts_per_phase") or 0)
        if prompts is not None and needed > prompts:
            raise ParameterError(
                f"{PARAMS}: arms.{name}.curriculum[{index}].{step.link.name} needs {needed} "
                f"prompts, task.train_prompts is {prompts}; raise it or lower prompts_per_phase"
            )
    for each in params.rounds_of(name):
        phase = params.rounds[each].phase
        if phase > phases:
            raise ParameterError(
                f"{PARAMS}: rounds.{each}.phase must be at most {phases}, the phases of "
                f"arms.{name}.curriculum, got {phase}"
            )


def _check_budget(params: Parameters, name: str) -> None:
    """Raises if an arm's selection has a budget of FLOPs, and the modality has no cost model."""
    seconds = build_selection(params.find_arm(name).selection, name).seconds
    if seconds is not None and not any(seconds) and not has_cost_model(params.modality):
        raise ParameterError(
            f"{PARAMS}: arms.{name}.selection: allocate_by_signal.budget is in FLOPs, which "
            f"policy.kind {params.policy.kind} cannot predict; declare seconds_per_sampled_step "
            "and seconds_per_trained_step"
        )


def _check_updates(params: Parameters, name: str, plan: Plan) -> None:
    """Raises if an arm has more updates than its iterations can have groups."""
    training = params.find_arm(name).training
    iterations, updates = training.iterations_per_round, training.updates_per_iteration
    selection = build_selection(params.find_arm(name).selection, name)
    phases = [getattr(params.task, "train_prompts", None)]
    phases += [link.settings.get("prompts_per_phase") for link in plan.curriculum]
    prompts = min((int(each) for each in phases if each is not None), default=iterations * updates)
    where = f"{PARAMS}: arms.{name}.training"
    if not selection.chooses_prompts and iterations > prompts:
        raise ParameterError(
            f"{where}.iterations_per_round must be at most {prompts}, the prompts of a phase, got "
            f"{iterations}: every iteration samples other prompts"
        )
    most = prompts if selection.chooses_prompts else prompts // iterations
    if selection.budget:
        most = min(prompts, selection.budget.prompts)
    if updates > most:
        raise ParameterError(
            f"{where}.updates_per_iteration must be at most {most}, the prompts of "
            f"an iteration, got {updates}: an update takes whole groups"
        )


def _check_schedule(params: Parameters, name: str) -> None:
    """Raises if the learning rate of an arm decays over fewer updates than its chain has.

    Beyond them, the schedule of cosine would rise again.
    """
    schedule = params.find_arm(name).training.schedule
    if not isinstance(schedule, DecayingRate) or not params.rounds_of(name):
        return
    chain = [params.find_arm(params.find_round(each).arm) for each in params.chain(name)[1:]]
    updates = sum(
        each.training.iterations_per_round * each.training.optimizer_steps_per_iteration
        for each in chain
    )
    if schedule.total_updates < updates:
        raise ParameterError(
            f"{PARAMS}: arms.{name}.training.schedule.total_updates must be at least {updates}, "
            f"the updates of the rounds from the base to {params.chain(name)[-1]}, got "
            f"{schedule.total_updates}"
        )


def _check_own_links(arm: Arm, name: str, plan: Plan) -> None:
    """Raises if a link of a plugin fails or returns the wrong thing on a small batch."""
    parts = list_objective(arm.objective, name)
    size = max(2, min(plan.group_sizes, default=4))
    for index, (path, _) in enumerate(parts):
        if not is_plugin(path.partition("].")[2]):
            continue
        upto = chain(*(each for _, each in parts[: index + 1]))
        with located(f"{PARAMS}: {path}"):
            wrong = call_plugin(try_objective, upto, size, does="fails on a small batch")
        if wrong is not None:
            raise ParameterError(f"{PARAMS}: {path}: {wrong}")


def _has_binary_reward(params: Parameters) -> bool:
    """Returns whether rewards take only two values."""
    reward, (first, *others) = params.reward, params.reward.judges
    is_alone = first.normalize == "none" and not any(each.weight for each in others)
    has_penalty = reward.unfinished_penalty > 0 or reward.overlong_penalty is not None
    return is_alone and reward.maximize == "outcome" and not has_penalty


def _dropouts(params: Parameters) -> frozenset[str]:
    """Returns the parameter paths of all dropouts above 0."""
    on = {
        f"{name}.{key}"
        for name, config in params.policy.fresh_configs().items()
        for key, value in config.items()
        if "dropout" in key and value
    }
    if params.policy.lora and params.policy.lora.dropout:
        on.add("policy.lora.dropout")
    return frozenset(on)
