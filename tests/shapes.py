"""Checks arguments and results of the library's functions against their annotations, in tests."""

from collections import Counter
from collections.abc import Callable
from types import CodeType
from typing import Any

from beartype import beartype

MOST = 8  # of the functions that one `def` makes: of an inner one each call makes another
made: Counter[CodeType] = Counter()


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function with checks of types and shapes; as it is, if MOST like it have them.

    Preparing the checks takes longer than what an inner function, such as a link's, does.
    """
    code = getattr(function, "__code__", None)
    if code is not None:
        made[code] += 1
        if made[code] > MOST:
            return function
    checked: Callable[..., Any] = beartype(function)
    return checked
