"""What a link of an objective, a step of a curriculum or of a selection is called and set to."""

import math
from collections.abc import Mapping
from typing import NamedTuple

Setting = int | float | str | None


class _Fields(NamedTuple):
    name: str
    settings: Mapping[str, Setting]


class Link(_Fields):
    """A link's name and settings, kept so that rules and reports can read what it is part of."""

    def __new__(cls, name: str, settings: Mapping[str, Setting]) -> "Link":
        for key, value in settings.items():  # no comparison with a range refuses nan
            if isinstance(value, float) and math.isnan(value):
                raise ValueError(f"{name}.{key} must be a number, got nan")
        return super().__new__(cls, name, settings)
