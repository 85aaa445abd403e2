"""A user's own parts: files under plugins/, which parameters name by a dotted path."""

import ast
import importlib
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from grpo.errors import AbsentError, GrpoError, ParameterError, brief, describe_error

PLUGINS = Path("plugins")


class _Place(NamedTuple):
    """Where a dotted path leads."""

    file: Path
    module: str
    inside: list[str]  # names within the module; empty: the module itself


def is_plugin(name: object) -> bool:
    """Returns whether a parameter names a part under plugins/."""
    return isinstance(name, str) and name.startswith(f"{PLUGINS}.")


def import_plugin(name: str, *usual: str) -> Any:
    """Returns the object at a dotted path, e.g. plugins.judges.closeness.

    A path that ends at a file leads to what has a usual name there, or the file's own name, or else
    to the module.

    Args:
      usual: Names to look for in a module.

    Raises:
      ParameterError: If no file or no name in it is there, or the file cannot be imported.
    """
    place = _find(name)
    found: Any = _import(place)
    for each in place.inside:
        if not hasattr(found, each):
            raise ParameterError(f"{name}: {place.file} defines no {each!r}; correct the name")
        found = getattr(found, each)
    if isinstance(found, ModuleType):
        named = (each for each in (*usual, name.split(".")[-1]) if hasattr(found, each))
        found = getattr(found, next(named, ""), found)
    return found


def call_plugin(function: Callable[..., Any], *values: Any, does: str = "cannot be called") -> Any:
    """Returns what a function of a plugin, or one that calls such a function, returns.

    Args:
      does: What is said of the function if it raises.

    Raises:
      ValueError: If the function raises it, which says what is wrong with a value.
      GrpoError: If the function raises it.
      AbsentError: If a file or a package that it needs is missing.
      ParameterError: If it raises anything else.
    """
    try:
        return function(*values)
    except (ValueError, GrpoError):
        raise
    except (FileNotFoundError, ImportError) as error:
        raise AbsentError(_describe_failure(None, error, does)) from None
    except Exception as error:  # noqa: BLE001  of any kind: it is a user's function
        raise ParameterError(_describe_failure(None, error, does)) from None


def plugin_files(name: str) -> list[Path]:
    """Returns the file of a part and the files under plugins/ that it imports, in turn.

    Raises:
      ParameterError: If no file is there, or one is not valid Python.
    """
    found, waiting = set[Path](), [_find(name).file]
    while waiting:
        file = waiting.pop()
        if file not in found:
            found.add(file)
            waiting += _imported_files(file)
    return sorted(found)


def _find(name: str) -> _Place:
    """Returns the longest part of a dotted path that is a file, and what is left of it."""
    parts = name.split(".")
    if all(each.isidentifier() for each in parts):
        for end in range(len(parts), 1, -1):
            file = _file_of(parts[:end])
            if file is not None:
                return _Place(file, ".".join(parts[:end]), parts[end:])
    tried = Path(*parts[:2]).with_suffix(".py") if len(parts) > 1 and parts[1] else PLUGINS
    raise ParameterError(
        f"{name}: must be plugins.FILE.NAME of a file under {PLUGINS}/, {tried} is not there; "
        "correct the name, or write one with python -m grpo new"
    )


def _file_of(parts: list[str]) -> Path | None:
    stem = Path(*parts)
    for file in (stem.with_name(f"{stem.name}.py"), stem / "__init__.py"):
        if file.is_file():
            return file
    return None


def _import(place: _Place) -> ModuleType:
    """Returns a module of the workspace, even if another workspace's was imported before."""
    here = Path.cwd()
    known = sys.modules.get(place.module)
    if known is not None and _is_below(known, here):
        return known
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == str(PLUGINS) and not _is_below(module, here):
            del sys.modules[name]
    if str(here) in sys.path:
        sys.path.remove(str(here))
    sys.path.insert(0, str(here))
    importlib.invalidate_caches()
    try:
        return importlib.import_module(place.module)
    except (Exception, SystemExit) as error:  # noqa: BLE001  of any kind: it is a user's file
        raise ParameterError(_describe_failure(place.file, error, "cannot be imported")) from None


def _is_below(module: ModuleType, folder: Path) -> bool:
    """Returns whether a module, or a folder of modules, is in a workspace."""
    places = [module.__file__] if module.__file__ else [*module.__path__]
    return any(Path(each).is_relative_to(folder / PLUGINS) for each in places)


def _describe_failure(file: Path | None, error: BaseException, what: str) -> str:
    """Returns what failed and the error, with the last line under plugins/ that led to it.

    Args:
      file: What is named if no such line is known.
    """
    if isinstance(error, SyntaxError):
        where = f"{error.filename}, line {error.lineno}"
    else:
        lines = [
            f"{each.filename}, line {each.lineno}"
            for each in traceback.extract_tb(error.__traceback__)
            if str(Path.cwd() / PLUGINS) in each.filename
        ]
        where = lines[-1] if lines else str(file or "")
    where = where.removeprefix(f"{Path.cwd()}/")
    return f"{where and f'{where}: '}{what}, {brief(describe_error(error))}; correct it"


def _imported_files(file: Path) -> Iterator[Path]:
    """Yields the files under plugins/ that a file imports, also within functions."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
    except (SyntaxError, ValueError) as error:
        raise ParameterError(_describe_failure(file, error, "cannot be imported")) from None
    package = file.parent.parts
    for node in ast.walk(tree):
        names = list[str]()
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            start = [*above, *((node.module or "").split(".") if node.module else [])]
            names = [".".join([*start, each.name]) for each in node.names]
        for name in filter(is_plugin, names):
            parts = name.split(".")
            for end in range(2, len(parts) + 1):  # packages on the way are imported, too
                found = _file_of(parts[:end])
                if found is not None:
                    yield found
