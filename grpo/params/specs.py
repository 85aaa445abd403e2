"""Reads lists of named components: "rloo" or {rloo: {low: 0.2}}."""

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from grpo.errors import ParameterError
from grpo.params.parameters import LinkSpec
from grpo.schema import PARAMS

Component = TypeVar("Component")
KINDS = {int: "an integer", float: "a number", str: "a text"}


def build_listed(
    specs: list[LinkSpec], table: Mapping[str, Callable[..., Component]], where: str
) -> list[tuple[str, Component]]:
    """Returns each component with its parameter path, e.g. arms.sgpo.objective[0].rloo.

    Raises:
      ParameterError: If a name or setting is unknown, missing or out of range.
    """
    return [_build(spec, table, f"{where}[{index}]") for index, spec in enumerate(specs)]


def _build(
    spec: LinkSpec, table: Mapping[str, Callable[..., Component]], where: str
) -> tuple[str, Component]:
    named = {spec: {}} if isinstance(spec, str) else spec
    if len(named) != 1:
        raise ParameterError(f"{PARAMS}: {where} must name one component, got {sorted(named)}")
    name, settings = next(iter(named.items()))
    if name not in table:
        raise ParameterError(
            f"{PARAMS}: {where} must be one of {sorted(table)}, got {name!r}{_nearest(name, table)}"
        )
    path = f"{where}.{name}"
    known = inspect.signature(table[name]).parameters
    for key in settings:
        if key not in known:
            raise ParameterError(
                f"{PARAMS}: {path}.{key} is unknown, it knows {sorted(known)}{_nearest(key, known)}"
            )
    for key, parameter in known.items():
        if key not in settings and parameter.default is parameter.empty:
            raise ParameterError(f"{PARAMS}: {path}.{key} is missing")
        _check_type(settings.get(key, parameter.default), parameter.annotation, f"{path}.{key}")
    try:
        return path, table[name](**settings)
    except ValueError as error:
        raise ParameterError(f"{PARAMS}: {path}: {error}") from None


def _nearest(name: str, known: Iterable[str]) -> str:
    """Returns a hint at the known name that resembles this one, if there is one."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; is it {near[0]}?" if near else ""


def _check_type(value: object, annotation: type, path: str) -> None:
    """Raises unless a setting is of the annotated plain type and finite; an int is a float."""
    accepted = (int, float) if annotation is float else annotation
    if not isinstance(value, accepted) or isinstance(value, bool):
        raise ParameterError(
            f"{PARAMS}: {path} must be {KINDS.get(annotation, annotation.__name__)}, got {value!r}"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise ParameterError(f"{PARAMS}: {path} must be a finite number, got {value}")
