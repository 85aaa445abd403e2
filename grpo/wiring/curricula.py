"""Curricula from parameters."""

from collections.abc import Callable

from grpo.allocation import curriculum
from grpo.allocation.curriculum import CurriculumStep
from grpo.errors import located
from grpo.objective.link import functions_returning
from grpo.params.parameters import LinkSpec
from grpo.params.specs import build_listed
from grpo.schema import PARAMS

STEPS: dict[str, Callable[..., CurriculumStep]] = functions_returning(CurriculumStep, curriculum)


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
