"""Lookup of tasks and judges by the name of their module."""

import importlib
import pkgutil
from types import ModuleType

SHARED = "base"  # the module that all parts of a package share


def part_names(folder: ModuleType) -> tuple[str, ...]:
    """Returns the names of all modules in a package except SHARED."""
    found = (each.name for each in pkgutil.iter_modules(folder.__path__))
    return tuple(sorted(name for name in found if name != SHARED))


def import_part(folder: ModuleType, name: str) -> ModuleType:
    """Returns the module of a part that `part_names` lists."""
    return importlib.import_module(f"{folder.__name__}.{name}")
