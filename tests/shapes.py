"""Checks arguments and results of the library's functions against their annotations, in tests."""

from collections import Counter
from collections.abc import Callable
from types import CodeType
from typing import Any

from beartype import beartype
from beartype.roar import BeartypeDecorHintException

MOST = 8  # checked functions per `def`, whose inner functions are made anew by each call
made: Counter[CodeType] = Counter()


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function with checks of types and shapes, except if MOST others have them.

    `MOST` counts functions of the same `def`. Preparing the checks takes longer than running an
    inner function, such as that of a link.
    """
    code = getattr(function, "__code__", None)
    if code is not None:
        made[code] += 1
        if made[code] > MOST:
            return function
    try:
        checked: Callable[..., Any] = beartype(function)
    except BeartypeDecorHintException:  # such as of Self, and of protocols of pydantic
        return function
    return checked
