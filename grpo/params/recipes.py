"""Parameter files as they are written: a recipe may extend another and say only what differs."""

import difflib
import os
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from grpo.errors import ArtifactError, ParameterError, brief
from grpo.params.yaml import dump_yaml, find_odd_value, parse_yaml, read_yaml
from grpo.schema import PARAMS

EXTENDS, WITHOUT = "extends", "without"
KINDS = ("kind", "source")  # keys that decide which other keys a section has
EDITOR = "# yaml-language-server: $schema="
SCHEMA, RECIPE_SCHEMA = "docs/params.schema.json", "docs/recipe.schema.json"
LONGEST_LINE = 10_000  # characters; a wrapped mapping is hard to read


def read_content(path: Path = PARAMS) -> dict[str, Any]:
    """Returns the content of a parameter file with all that it extends; validates no parameters.

    `extends` is a path relative to the file that says it. The parameters of that file come first:
    `without` removes some of them by dotted path, then `merge` adds those of the file itself.

    Raises:
      ParameterError: If a file is missing, not valid YAML or has unsupported values; or if
        `extends` or `without` is wrong.
    """
    found: dict[str, Any] = {}
    for file, base, own in reversed([*_chain(path)]):
        without = _paths_without(file, base, own, found)
        found = merge(found, own, without)
    odd = find_odd_value(found)  # of the merged values: each file is checked alone, too
    if odd:
        raise ParameterError(f"{path}: {odd}")
    return found


def merge(
    base: Mapping[str, Any], own: Mapping[str, Any], without: Set[str] = frozenset()
) -> dict[str, Any]:
    """Returns `base` with the parameters of `own`; mappings merge, lists and other values replace.

    A mapping of another `kind` or `source` than that of `base` replaces it: its keys are others.
    Keys have the order of `base`, then that of `own`.

    Args:
      without: Dotted paths that are removed from `base` before. One that is also in `own` is
        replaced.
    """
    return _merge(base, own, without, "")


def _merge(
    base: Mapping[str, Any], own: Mapping[str, Any], without: Set[str], above: str
) -> dict[str, Any]:
    merged = {}
    for key, value in base.items():
        path = f"{above}{key}"
        if path in without:
            if key in own:
                merged[key] = own[key]
        elif isinstance(value, dict) and not _replaces(own.get(key, {}), value):
            merged[key] = _merge(value, own.get(key, {}), without, f"{path}.")
        else:
            merged[key] = own.get(key, value)
    return {**merged, **{key: value for key, value in own.items() if key not in base}}


def _replaces(own: Any, base: Mapping[str, Any]) -> bool:
    """Returns whether a value replaces a mapping instead of being merged with it."""
    if not isinstance(own, dict):
        return True
    return any(name in own and name in base and own[name] != base[name] for name in KINDS)


def _chain(path: Path) -> Iterator[tuple[Path, Path | None, dict[str, Any]]]:
    """Yields a file, the one that it extends, and its own content; then the same of that one."""
    seen: list[Path] = []
    file: Path | None = path
    while file is not None:
        own = _read_mapping(file)
        seen.append(file)
        base = _find_base(file, own)
        if base is not None and base.resolve() in [each.resolve() for each in seen]:
            ways = " -> ".join(map(str, [*seen, base]))
            raise ParameterError(f"{file}: extends must not lead back to a file, got {ways}")
        yield file, base, own
        file = base


def _read_mapping(path: Path) -> dict[str, Any]:
    """Returns a file's own content."""
    try:
        content = read_yaml(path)
    except FileNotFoundError:
        way = "run python -m grpo params recipes/NAME.yaml --write"
        way = way if path.name == PARAMS.name else "correct the path"
        raise ParameterError(f"{path}: no such file; {way}") from None
    except ArtifactError as error:
        raise ParameterError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise ParameterError(f"{path}: must hold parameters by name, got {brief(repr(content))}")
    odd = find_odd_value(content)
    if odd:
        raise ParameterError(f"{path}: {odd}")
    return content


def _find_base(file: Path, own: dict[str, Any]) -> Path | None:
    """Removes `extends` from a file's content and returns the file that it names, or None."""
    if EXTENDS not in own:
        if WITHOUT in own:
            raise ParameterError(f"{file}: without needs extends, the recipe to leave them out of")
        return None
    name = own.pop(EXTENDS)
    if file.name == PARAMS.name:
        raise ParameterError(
            f"{file}: extends must be in a recipe: DVC reads {PARAMS} as it is; run "
            f"mv {PARAMS} NAME.yaml && python -m grpo params NAME.yaml --write"
        )
    if not isinstance(name, str):
        raise ParameterError(f"{file}: extends must be the path of a recipe, got {name!r}")
    base = Path(os.path.normpath(file.parent / name))
    if base.name == PARAMS.name:
        raise ParameterError(
            f"{file}: extends must not name {PARAMS}, which python -m grpo params --write "
            "replaces; copy it to recipes/ and extend the copy"
        )
    if not base.exists():
        raise ParameterError(
            f"{file}: extends must be a path relative to this file, {base} does not exist"
        )
    return base


def _paths_without(
    file: Path, base: Path | None, own: dict[str, Any], inherited: Mapping[str, Any]
) -> frozenset[str]:
    """Removes `without` from a file's content and returns it, if all are inherited parameters."""
    paths = own.pop(WITHOUT, [])
    if not isinstance(paths, list):
        raise ParameterError(f"{file}: without must be a list of parameters, got {paths!r}")
    known = [*_mapping_paths(inherited, "")] if paths else []
    for index, path in enumerate(paths):
        if path not in known:
            near = difflib.get_close_matches(str(path), known, n=1)
            hint = f"; is it {near[0]}?" if near else ""
            raise ParameterError(
                f"{file}: without[{index}] must be a parameter of {base}, got {path!r}{hint}"
            )
    return frozenset(paths)


def _mapping_paths(content: Mapping[str, Any], above: str) -> Iterator[str]:
    """Yields the dotted path of every key, those within lists left out."""
    for key, value in content.items():
        yield f"{above}{key}"
        if isinstance(value, dict):
            yield from _mapping_paths(value, f"{above}{key}.")


def resolved_text(path: Path) -> str:
    """Returns the text of params.yaml for a parameter file; validates no parameters.

    A file that extends no other keeps its text and comments. Resolving the result again does not
    change it.
    """
    content = read_content(path)
    own = path.read_text(encoding="utf-8-sig")
    if EXTENDS in parse_yaml(own):
        own = dump_yaml(_written_out(content), compact=True, width=LONGEST_LINE)
    elif own.startswith(EDITOR):
        own = own.partition("\n")[2]
    return f"{EDITOR}{SCHEMA}\n{own}"


def _written_out(value: Any) -> Any:
    """Returns equal values of which none is shared: YAML would write it as an alias."""
    if isinstance(value, dict):
        return {key: _written_out(each) for key, each in value.items()}
    return [_written_out(each) for each in value] if isinstance(value, list) else value
