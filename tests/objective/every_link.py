"""Every link and every named algorithm that params.yaml knows: a new one is covered unnamed."""

import inspect
from collections.abc import Callable

from grpo.objective.advantage import center_by_group_mean
from grpo.objective.base import Objective, chain
from grpo.objective.links import ALGORITHMS, LINKS
from grpo.objective.weight import average_over_rollouts

# Values of settings without a default. Others get BY_TYPE.
SETTINGS: dict[str, float] = {
    "beta": 0.05,
    "budget": 2,
    "dimensions": 3,
    "horizon": 8,
    "keep": 2,
    "ratio_max": 5.0,
    "tokens": 3,
}


BY_TYPE: dict[type, float] = {int: 2, float: 0.5}


def make(named: Callable[..., Objective]) -> Objective:
    """Returns a link or an algorithm with a value for each setting that has no default."""
    parameters = inspect.signature(named).parameters.values()
    needed = [each for each in parameters if each.default is inspect.Parameter.empty]
    return named(
        **{each.name: SETTINGS.get(each.name, BY_TYPE[each.annotation]) for each in needed}
    )


NAMED: dict[str, Objective] = {name: make(each) for name, each in ALGORITHMS.items()}
EVERY: dict[str, Objective] = {
    **NAMED,
    **{name: make(each) for name, each in LINKS.items()},
    **{
        f"centered, averaged, {name}": chain(
            center_by_group_mean(), average_over_rollouts(), make(each)
        )
        for name, each in LINKS.items()
    },
}
