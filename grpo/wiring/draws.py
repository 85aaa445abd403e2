"""How policies draw, from parameters: for a round, for the profile, for evaluation."""

from typing import Any

from grpo.params.parameters import BASE, Parameters


def draws_of(params: Parameters, asked_by: str) -> dict[str, Any]:
    """Returns the ways of drawing that a section of the parameters asks for, by name.

    Args:
      asked_by: "profile", "evaluation" or "rounds.NAME".
    """
    if asked_by == "evaluation":
        return draws_of_evaluation(params)
    if asked_by == "profile":
        return {"sampled": draws_of_profile(params)}
    return {"sampled": draws_of_round(params, asked_by.removeprefix("rounds."))}


def draws_of_round(params: Parameters, name: str) -> Any:
    """Returns how a round draws its rollouts, and scores them."""
    arm = params.find_round(name).arm
    return draws_of_arm(params, arm, rounds_behind=_rounds_behind(params, name))


def draws_of_arm(params: Parameters, arm: str, *, rounds_behind: int = 0) -> Any:
    """Returns how an arm draws the rollouts of a round.

    Args:
      rounds_behind: Rounds of the same arm that the round goes on from.
    """
    sampling = params.find_arm(arm).sampling
    return params.modality.round_draws(params.policy, sampling, rounds_behind=rounds_behind)


def draws_of_profile(params: Parameters) -> Any:
    """Returns how the profile draws: as evaluation does, several rollouts per prompt."""
    return params.modality.profile_draws(params.policy, params.evaluation.sampling)


def draws_of_evaluation(params: Parameters) -> dict[str, Any]:
    """Returns how evaluation draws: greedily, where there is such a thing, and at random."""
    return params.modality.evaluation_draws(params.policy, params.evaluation.sampling)


def _rounds_behind(params: Parameters, name: str) -> int:
    """Returns how many rounds of the same arm a round goes on from."""
    arm, behind = params.rounds[name].arm, 0
    while (name := params.rounds[name].start) != BASE and params.rounds[name].arm == arm:
        behind += 1
    return behind
