"""Construction of objectives from parameters."""

from grpo.errors import ParameterError
from grpo.objective.base import Objective, chain
from grpo.objective.links import ALGORITHMS, LINKS
from grpo.params.parameters import LinkSpec, build_listed
from grpo.schema import PARAMS


def build_objective(specs: list[LinkSpec], arm: str) -> Objective:
    """Returns the chain of an arm's links and algorithms.

    Raises:
      ParameterError: If a link is unknown or its settings are wrong.
    """
    try:
        return chain(*(each for _, each in list_objective(specs, arm)))
    except ValueError as error:
        raise ParameterError(f"{PARAMS}: arms.{arm}.objective: {error}") from None


def list_objective(specs: list[LinkSpec], arm: str) -> list[tuple[str, Objective]]:
    """Returns an arm's links and algorithms, each with its parameter path.

    Raises:
      ParameterError: If a link is unknown or its settings are wrong.
    """
    return build_listed(specs, {**LINKS, **ALGORITHMS}, f"arms.{arm}.objective", Objective)
