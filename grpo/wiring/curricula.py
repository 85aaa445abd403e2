"""Curricula from parameters."""

from collections.abc import Callable

from grpo.allocation import curriculum
from grpo.allocation.curriculum import CurriculumStep
from grpo.errors import located
from grpo.params.parameters import LinkSpec
from grpo.params.specs import build_listed
from grpo.schema import PARAMS

STEPS: dict[str, Callable[..., CurriculumStep]] = {
    "drop_trivial": curriculum.drop_trivial,
    "sample_unsolved": curriculum.sample_unsolved,
    "keep_rate_window": curriculum.keep_rate_window,
    "fix_group_size": curriculum.fix_group_size,
    "size_groups_by_inverse_rate": curriculum.size_groups_by_inverse_rate,
    "split_at_random": curriculum.split_at_random,
    "split_easy_to_hard": curriculum.split_easy_to_hard,
    "stage_by_family": curriculum.stage_by_family,
}


def build_curriculum(specs: list[LinkSpec], arm: str) -> list[CurriculumStep]:
    """Returns an arm's curriculum steps.

    Raises:
      ParameterError: If one is unknown or its settings are wrong, or a decision has no owner.
    """
    where = f"arms.{arm}.curriculum"
    steps = [step for _, step in build_listed(specs, STEPS, where)]
    with located(f"{PARAMS}: {where}"):
        curriculum.require_owners(steps)
    return steps
