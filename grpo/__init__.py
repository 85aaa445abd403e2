"""Declarative GRPO training pipelines, and the objective as a library.

    import grpo

    objective = grpo.chain(grpo.algorithms.rloo(), grpo.links.penalize_kl(0.01))

The package exports the data types (`Rollouts`, `Credit`, ...), `chain`, `assign_credit`, `loss` and
its parts `loss_terms` and `scalar_loss`, the constructors of custom links (`credit_link`, ...), the
modules `algorithms` and `links`, and every function of these two modules (`grpo.rloo`).
`grpo.check(file)` lists the problems of a parameter file. Names are imported on first access:
`import grpo` alone does not import torch.
"""

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_TYPES = ("Rollouts", "StepNoise", "ActionChunks", "PartScores", "Credit", "StepTerms", "Cost")
_FUNCTIONS = (
    *("Objective", "State", "chain", "assign_credit", "loss", "loss_terms", "scalar_loss"),
    *("credit_link", "stateful_credit_link", "loss_link", "exp_log_ratio"),
)
_MODULE_BY_NAME = {
    **dict.fromkeys(_TYPES, "grpo.types"),
    **dict.fromkeys(_FUNCTIONS, "grpo.objective.base"),
    "Link": "grpo.objective.link",
}
_MODULES = ("algorithms", "links")


def check(params_file: str | Path) -> list[str]:
    """Returns the problems of a parameter file, errors first, as `grpo check` prints them.

    Raises:
      ParameterError: If a parameter is wrong.
    """
    from grpo.params.parameters import read_params
    from grpo.wiring.checks import findings

    return [str(each) for each in findings(read_params(Path(params_file)))]


def __getattr__(name: str) -> Any:
    # Python looks up submodules here, too: that must not import torch.
    if not name.startswith("_") and find_spec(f"grpo.{name}") is None:
        if name in _MODULE_BY_NAME:
            return getattr(importlib.import_module(_MODULE_BY_NAME[name]), name)
        if name in _MODULES:
            return importlib.import_module(f"grpo.objective.{name}")
        functions = _functions()
        if name in functions:
            return functions[name]
    raise AttributeError(f"module 'grpo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_BY_NAME, *_MODULES, *_functions()])


def _functions() -> dict[str, Any]:
    """Returns every link and algorithm by its name."""
    links = importlib.import_module("grpo.objective.links")
    return {**links.LINKS, **links.ALGORITHMS}
