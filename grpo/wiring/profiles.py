"""Who reads the profile: the curriculum steps and selections of a parameter file."""

from grpo.params.parameters import Parameters
from grpo.wiring.curricula import build_curriculum
from grpo.wiring.selections import build_selection


def is_profile_needed(params: Parameters) -> bool:
    """Returns whether the profile must be drawn: some arm reads it, or the parameters ask for it.

    Raises:
      ParameterError: If an arm's curriculum or selection is wrong.
    """
    return params.profile.when == "always" or any(reads_profile(params, arm) for arm in params.arms)


def reads_profile(params: Parameters, arm: str) -> bool:
    """Returns whether an arm's curriculum looks at outcome rates, or it trains on the rollouts.

    Raises:
      ParameterError: If the arm's curriculum or selection is wrong.
    """
    settings = params.find_arm(arm)
    steps = build_curriculum(settings.curriculum, arm)
    selection = build_selection(settings.selection, arm)
    return selection.reuses_profile or any(step.reads_profile for step in steps)
