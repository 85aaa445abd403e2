"""What a composition rule is."""

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from grpo.objective.predicates import Plan


class Severity(Enum):
    INFO = 0
    WARN = 1
    ERROR = 2


class Rule(NamedTuple):
    """`find` returns the causes: link names or parameter paths; none if the rule is kept."""

    id: str
    severity: Severity
    sentence: str
    find: Callable[[Plan], list[str]]
