"""Declarative GRPO training pipelines, and the objective as a library.

    import grpo

    objective = grpo.chain(grpo.rloo(), grpo.penalize_kl(0.01))

Here are the nouns (`Rollouts`, `Credit`, ...), `chain`, `assign_credit`, `loss_terms`,
`scalar_loss`, what makes a link of one's own, every link, and every named algorithm. They are
loaded when they are asked for: `import grpo` alone does not import torch.
"""

import importlib
from importlib.util import find_spec
from typing import Any

_NOUNS = ("Rollouts", "StepNoise", "ActionChunks", "Credit", "StepTerms", "Cost")
_FUNCTIONS = (
    *("Objective", "State", "chain", "assign_credit", "loss_terms", "scalar_loss"),
    *("credit_link", "stateful_credit_link", "loss_link"),
)
_PLACES = {
    **dict.fromkeys(_NOUNS, "grpo.types"),
    **dict.fromkeys(_FUNCTIONS, "grpo.objective.base"),
    "Link": "grpo.objective.link",
}
# Whatever returns an Objective here is a link or an algorithm.
_LINKS = ("algorithms", "advantage", "weight", "chunks", "ratio", "correction", "trust", "penalty")


def __getattr__(name: str) -> Any:
    # A submodule is no name of the library: looking for it must not import torch.
    if not name.startswith("_") and find_spec(f"grpo.{name}") is None:
        if name in _PLACES:
            return getattr(importlib.import_module(_PLACES[name]), name)
        links = _links()
        if name in links:
            return links[name]
    raise AttributeError(f"module 'grpo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_PLACES, *_links()])


def _links() -> dict[str, Any]:
    """Returns every link and algorithm by its name."""
    objective = importlib.import_module("grpo.objective.base").Objective
    modules = [importlib.import_module(f"grpo.objective.{each}") for each in _LINKS]
    return {
        name: each
        for module in modules
        for name, each in vars(module).items()
        if getattr(each, "__module__", None) == module.__name__
        and not name.startswith("_")
        and getattr(each, "__annotations__", {}).get("return") is objective
    }
