"""Lookup of tasks and judges by the name of their module."""

import importlib
import pkgutil
from collections.abc import Callable
from types import ModuleType
from typing import Any

from grpo.errors import ParameterError

SHARED = "base"  # the module that all parts of a package share


def part_names(folder: ModuleType) -> tuple[str, ...]:
    """Returns the names of all modules in a package except SHARED."""
    found = (each.name for each in pkgutil.iter_modules(folder.__path__))
    return tuple(sorted(name for name in found if name != SHARED))


def find_part(folder: ModuleType, name: str, is_part: Callable[[object], bool], wanted: str) -> Any:
    """Returns the value that a part's module defines.

    Args:
      name: One of `part_names`.
      wanted: Description of the value, for the error.

    Raises:
      ParameterError: If the module defines no such value.
    """
    module = importlib.import_module(f"{folder.__name__}.{name}")
    for each in vars(module).values():
        is_imported = isinstance(each, type) and each.__module__ != module.__name__
        if is_part(each) and not is_imported:
            return each
    file = f"{module.__name__.replace('.', '/')}.py"
    raise ParameterError(f"{file}: must define {wanted}, defines none; add one or remove the file")
