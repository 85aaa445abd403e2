"""All links and algorithms by name: the public functions that return an Objective."""

from collections.abc import Callable

from grpo.objective import (
    advantage,
    algorithms,
    chunks,
    penalty,
    trust,
    weight,
)
from grpo.objective.base import Objective
from grpo.objective.link import functions_returning

LINKS = functions_returning(Objective, advantage, weight, chunks, trust, penalty)
ALGORITHMS = functions_returning(Objective, algorithms)


def __getattr__(name: str) -> Callable[..., Objective]:
    """Returns a link by name; users import this module as `grpo.links`."""
    if name in LINKS:
        return LINKS[name]
    raise AttributeError(f"module 'grpo.links' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *LINKS])
