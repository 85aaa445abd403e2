"""Metadata of links, of curriculum steps and of selections: name, settings and kinds."""

import inspect
import math
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Literal, NamedTuple

Setting = int | float | str | None
# Rules, checks and reports read the kinds of a link. A link may have several kinds, or none.
Kind = Literal[
    "baseline",
    "scale",
    "group scale",  # a scale of one group's rewards: of a pair it leaves the signs
    "average",
    "selection",
    "step selection",  # a selection of some steps of a rollout
    "phase selection",  # a step selection that reads phases
    "ratio",  # changes the log ratio
    "reference ratio",  # a ratio to the base policy
    "rollout ratio",  # a ratio of the whole rollout
    "rollout level",  # a rollout ratio, or a trust region that forms one
    "correction",  # of the difference between sampler and trainer
    "trust region",
    "penalty",
    "entropy bonus",
    "reward penalty",  # a penalty that is part of the reward
    "reward part",  # adds to the reward, and so comes before the baseline
    "part scores",  # reads scores of parts; its advantages differ between steps of a rollout
    "improvement",  # reads what a rollout improves on the first answer of its group
    "noise weight",
    "exact divergence",  # needs the means of Gaussian steps in addition to log-probs
    # Of a curriculum:
    "triage",  # drops prompts by their outcome rate, for sGPO
    "rate window",
    "group size",
    "phases",
    # Of a selection:
    "prompt selection",  # chooses prompts by earlier outcomes
    "visits",  # sets the number of prompts of an iteration, whatever their outcomes
]


class _Fields(NamedTuple):
    name: str
    settings: Mapping[str, Setting]
    kinds: frozenset[Kind]
    trust_range: float | None


class Link(_Fields):
    """A link's name, settings and kinds, which composition rules and reports read."""

    def __new__(
        cls,
        name: str,
        settings: Mapping[str, Setting],
        *kinds: Kind,
        trust_range: float | None = None,
    ) -> "Link":
        """Returns a link; one with a `trust_range` also has the kind "trust region".

        Args:
          trust_range: The smallest |log ratio| in nats at which a trust region clips, or halves the
            gradient. For a clip, its distance from 1 is used in place of the logarithm.

        Raises:
          ValueError: If a setting is NaN.
        """
        for key, value in settings.items():  # NaN passes range checks such as `not x < 0`
            if isinstance(value, float) and math.isnan(value):
                raise ValueError(f"{name}.{key} must be a number, got nan")
        region: tuple[Kind, ...] = () if trust_range is None else ("trust region",)
        return super().__new__(cls, name, settings, frozenset((*kinds, *region)), trust_range)


def functions_returning(kind: type, *modules: ModuleType) -> dict[str, Callable[..., Any]]:
    """Returns the public functions of `modules` that return a `kind`, by name.

    Functions with a variadic parameter are skipped: they compose components.
    """
    return {
        name: each
        for module in modules
        for name, each in inspect.getmembers(module, inspect.isfunction)
        if each.__module__ == module.__name__
        and not name.startswith("_")
        and each.__annotations__.get("return") is kind
        and not any(_is_variadic(given) for given in inspect.signature(each).parameters.values())
    }


def _is_variadic(parameter: inspect.Parameter) -> bool:
    return parameter.kind is inspect.Parameter.VAR_POSITIONAL
