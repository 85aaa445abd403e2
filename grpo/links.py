"""What a link of an objective, a step of a curriculum or of a selection is called and set to."""

from collections.abc import Mapping
from typing import NamedTuple

Setting = int | float | str | None


class Link(NamedTuple):
    """A link's name and settings, kept so that rules and reports can read what it is part of."""

    name: str
    settings: Mapping[str, Setting]
