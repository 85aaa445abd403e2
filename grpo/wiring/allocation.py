"""Construction of curricula and selections from parameters, and their dependency on the profile."""

from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Any

from grpo.allocation import curriculum, online, selection
from grpo.allocation.curriculum import CurriculumStep, split_order
from grpo.allocation.selection import Revision, Selection, require_candidates
from grpo.errors import ParameterError, located
from grpo.objective.link import Link, functions_returning
from grpo.params.parameters import LinkSpec, Parameters, build_listed
from grpo.runtime.artifacts.files import digest
from grpo.schema import PARAMS

CURRICULUM_STEPS: dict[str, Callable[..., CurriculumStep]] = functions_returning(
    CurriculumStep, curriculum
)
SELECTION_STEPS: dict[str, Callable[..., Selection]] = functions_returning(
    Selection, selection, online
)


def curriculum_of(params: Parameters, arm: str) -> list[CurriculumStep]:
    """Returns an arm's curriculum steps; see `build_curriculum`."""
    settings = params.find_arm(arm)
    has_sizes = bool(build_selection(settings.selection, arm).sizes)
    return build_curriculum(settings.curriculum, arm, has_sizes=has_sizes)


def build_curriculum(
    specs: list[LinkSpec], arm: str, *, has_sizes: bool = False
) -> list[CurriculumStep]:
    """Returns an arm's curriculum steps.

    Args:
      has_sizes: Whether the arm's selection sets group sizes.

    Raises:
      ParameterError: If a step is unknown or its settings are wrong, or no step sets group sizes or
        phases.
    """
    where = f"arms.{arm}.curriculum"
    steps = [step for _, step in build_listed(specs, CURRICULUM_STEPS, where, CurriculumStep)]
    with located(f"{PARAMS}: {where}"):
        curriculum.require_sizes_and_phases(steps, has_sizes=has_sizes)
    return steps


def build_selection(specs: list[LinkSpec], arm: str) -> Selection:
    """Returns the composed selection steps of an arm.

    Raises:
      ParameterError: If a step is unknown or its settings are wrong.
    """
    return selection.compose(
        *(each for _, each in build_listed(specs, SELECTION_STEPS, _path(arm), Selection))
    )


def inputs_of_selection(params: Parameters, arm: str, profile: Path) -> dict[str, Any]:
    """Returns the inputs of an arm's rollouts that only some selections read.

    The rollout stage depends on these values instead of on the reward and the profile, so that
    other arms do not resample when the reward or the profile changes.

    Args:
      profile: Directory of the profile's rollouts.
    """
    sampling = params.find_arm(arm).sampling
    selection = build_selection(params.find_arm(arm).selection, arm)
    inputs: dict[str, Any] = {}
    # Penalties shape the reward; they do not affect outcomes.
    if params.modality.judges_while_sampling(sampling) or selection.reads_outcomes:
        penalties = {"unfinished_penalty", "overlong_penalty"}
        inputs["reward"] = params.reward.model_dump(mode="json", exclude=penalties)
    if selection.reuses_profile:
        inputs["profile_rollouts"] = digest([profile])
    return inputs


def counts_profile(params: Parameters, arm: str) -> bool:
    """Returns whether the profile's outcomes are the first data of an arm's online allocation."""
    selection = build_selection(params.find_arm(arm).selection, arm)
    return selection.allocate is not None and reads_profile(params, arm)


def selection_paths(specs: list[LinkSpec], arm: str) -> dict[str, str]:
    """Returns the parameter path of each step by its name."""
    return {
        each.links[0].name: path
        for path, each in build_listed(specs, SELECTION_STEPS, _path(arm), Selection)
    }


def check_selection(params: Parameters, name: str, curriculum: Sequence[Link]) -> None:
    """Raises ParameterError if an arm's selection or stages do not fit the other parameters."""
    arm = params.find_arm(name)
    selection = build_selection(arm.selection, name)
    if selection.reuses_profile:
        _require_draws_of_profile(params, name)
    if selection.revision:
        _require_revisable(params, name, selection.revision)
    for link in curriculum:
        candidates = link.settings.get("prompts_per_phase")
        if candidates is not None:
            with located(f"{PARAMS}: {_path(name)}"):
                require_candidates(selection, int(candidates))
        families = getattr(params.task, "families", None)  # None: they are in the task's files
        if link.name == "stage_by_family" and families is not None:
            _check_families({*families}, link, f"arms.{name}.curriculum")


def _require_draws_of_profile(params: Parameters, name: str) -> None:
    """Raises ParameterError unless an arm has the sampling settings of the profile."""
    sampling, profiled = params.find_arm(name).sampling, params.evaluation.sampling
    if unlike := params.modality.find_profile_mismatch(sampling, profiled):
        raise ParameterError(f"{PARAMS}: arms.{name}.{unlike}")


def _require_revisable(params: Parameters, name: str, revision: Revision) -> None:
    """Raises ParameterError unless first answers are texts that a known judge scores."""
    where = f"{PARAMS}: {_path(name)}: revise_first_answers"
    if params.modality.output_kind != "text":
        raise ParameterError(
            f"{where} needs a policy.kind that answers in text, got {params.policy.kind}"
        )
    known = [each.judge for each in params.reward.judges]
    if revision.judge not in known:
        raise ParameterError(
            f"{where}.judge must be one of reward.judges, {known}, got {revision.judge!r}; add it "
            "there, with weight 0 if it is to have no other effect"
        )
    if len(known) == 1:
        raise ParameterError(
            f"{where}.judge: scores are stored only with several judges; add one to reward.judges, "
            "with weight 0 if it is to have no effect"
        )


def _check_families(families: Set[str], link: Link, where: str) -> None:
    """Raises ParameterError unless stage_by_family names exactly the families of the task."""
    stages = split_order(str(link.settings["order"]))
    if set(stages) != families:
        raise ParameterError(
            f"{PARAMS}: {where}: stage_by_family.order must name the families of the task, "
            f"{sorted(families)}, got {sorted(stages)}"
        )


def _path(arm: str) -> str:
    return f"arms.{arm}.selection"


def is_profile_needed(params: Parameters) -> bool:
    """Returns whether the profile must be sampled: an arm reads it, or `profile.when` is always.

    Raises:
      ParameterError: If an arm's curriculum or selection is wrong.
    """
    return params.profile.when == "always" or any(reads_profile(params, arm) for arm in params.arms)


def reads_profile(params: Parameters, arm: str) -> bool:
    """Returns whether an arm reads the profile's outcome rates or trains on its rollouts.

    Raises:
      ParameterError: If the arm's curriculum or selection is wrong.
    """
    selection = build_selection(params.find_arm(arm).selection, arm)
    return selection.reuses_profile or any(
        step.reads_profile for step in curriculum_of(params, arm)
    )
