"""Judges of rollouts, one file each, named as the parameter `judge`."""

import sys
from typing import Any

from grpo.errors import ParameterError
from grpo.rewards._reward_functions import judge_of_function
from grpo.rewards.base import Judge
from grpo.runtime.lookup import import_part, missing_part, part_names
from grpo.runtime.plugins import import_plugin, is_plugin


def judge_names() -> tuple[str, ...]:
    """Returns all names of judges."""
    return part_names(sys.modules[__name__])


def find_judge(name: str) -> Judge:
    """Returns the judge of a name in `judge_names`, or at a dotted path under plugins/.

    Raises:
      ParameterError: If its file defines none.
    """
    if is_plugin(name):
        return _find_own(name)
    module = import_part(sys.modules[__name__], name)
    judge = getattr(module, "JUDGE", None)
    if not isinstance(judge, Judge):
        raise missing_part(module, "JUDGE = Judge(...)")
    return judge


def _find_own(name: str) -> Judge:
    found: Any = import_plugin(name, "JUDGE")
    if isinstance(found, Judge):
        return found
    if callable(found) and not isinstance(found, type):
        return judge_of_function(name, found)
    raise ParameterError(
        f"{name}: must be a Judge or a function (prompts, completions, **columns) -> rewards, or "
        f"a file with JUDGE or with a function of its name, got a {type(found).__name__}"
    )
