"""Parts of a run that are found by the name of their file: tasks and judges."""

import importlib
import pkgutil
from types import ModuleType

SHARED = "base"  # the file of a folder that all its parts share


def part_names(folder: ModuleType) -> tuple[str, ...]:
    """Returns the names of the parts in a package: of all its files but SHARED."""
    found = (each.name for each in pkgutil.iter_modules(folder.__path__))
    return tuple(sorted(name for name in found if name != SHARED))


def import_part(folder: ModuleType, name: str) -> ModuleType:
    """Returns the file of a part that `part_names` lists."""
    return importlib.import_module(f"{folder.__name__}.{name}")
