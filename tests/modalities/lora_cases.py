"""Cases with and without LoRA, of which every run of the tests has one per kind."""

from collections.abc import Sequence, Set
from typing import Any

import pytest


def with_and_without_lora(kinds: Sequence[str], *, long: Set[str] = frozenset()) -> list[Any]:
    """Returns the parameters ("kind", "lora"): with LoRA and in full in turns, the others long.

    Args:
      long: Kinds of which both are for long runs.
    """
    return [
        pytest.param(
            kind,
            lora,
            id=f"{kind}-{'lora' if lora else 'full'}",
            marks=() if lora == (index % 2 == 0) and kind not in long else pytest.mark.long,
        )
        for index, kind in enumerate(kinds)
        for lora in (True, False)
    ]
