"""Lookup of tasks and judges by the name of their module."""

import importlib
import pkgutil
from types import ModuleType

from grpo.errors import ParameterError

SHARED = "base"  # the module that all parts of a package share


def part_names(folder: ModuleType) -> tuple[str, ...]:
    """Returns the names of all modules in a package except SHARED and names that start with _."""
    found = (each.name for each in pkgutil.iter_modules(folder.__path__))
    return tuple(sorted(each for each in found if each != SHARED and not each.startswith("_")))


def import_part(folder: ModuleType, name: str) -> ModuleType:
    """Returns the module of a part that `part_names` lists."""
    return importlib.import_module(f"{folder.__name__}.{name}")


def missing_part(module: ModuleType, wanted: str) -> ParameterError:
    """Returns the error about a part's module that does not define what it must."""
    file = f"{module.__name__.replace('.', '/')}.py"
    return ParameterError(f"{file}: must define {wanted}, defines none; add it or remove the file")
