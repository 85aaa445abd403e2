"""Judges of rollouts, one file each, named as the parameter `judge`."""

import sys

from grpo.rewards.base import Judge
from grpo.runtime.lookup import import_part, missing_part, part_names


def judge_names() -> tuple[str, ...]:
    """Returns all names of judges."""
    return part_names(sys.modules[__name__])


def find_judge(name: str) -> Judge:
    """Returns the judge of a name in `judge_names`.

    Raises:
      ParameterError: If its file defines none.
    """
    module = import_part(sys.modules[__name__], name)
    judge = getattr(module, "JUDGE", None)
    if not isinstance(judge, Judge):
        raise missing_part(module, "JUDGE = Judge(...)")
    return judge
