"""Cases with LoRA and in full, of which every run of the tests has one per kind."""

from collections.abc import Mapping
from typing import Any, Literal

import pytest


def lora_cases(quick: Mapping[str, Literal["lora", "full"] | None]) -> list[Any]:
    """Returns the values of ("kind", "lora"): every kind with LoRA and in full.

    Args:
      quick: The one of the two that is in every run of the tests, by kind; None: neither. The
        others are for long runs.
    """
    return [
        pytest.param(
            kind,
            way == "lora",
            id=f"{kind}-{way}",
            marks=() if way == chosen else pytest.mark.long,
        )
        for kind, chosen in quick.items()
        for way in ("lora", "full")
    ]
