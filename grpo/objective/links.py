"""Every link and every algorithm by its name: a function is one when it returns an Objective."""

import inspect
from collections.abc import Callable
from types import ModuleType

from grpo.objective import (
    advantage,
    algorithms,
    chunks,
    correction,
    penalty,
    ratio,
    trust,
    weight,
)
from grpo.objective.base import Objective


def _objectives(*modules: ModuleType) -> dict[str, Callable[..., Objective]]:
    """Returns the public functions of some modules that return an Objective."""
    return {
        name: each
        for module in modules
        for name, each in inspect.getmembers(module, inspect.isfunction)
        if each.__module__ == module.__name__
        and not name.startswith("_")
        and each.__annotations__.get("return") is Objective
    }


LINKS = _objectives(advantage, weight, chunks, ratio, correction, trust, penalty)
ALGORITHMS = _objectives(algorithms)


def __getattr__(name: str) -> Callable[..., Objective]:
    """Makes every link a name of this module, which is `grpo.links`."""
    if name in LINKS:
        return LINKS[name]
    raise AttributeError(f"module 'grpo.links' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *LINKS])
