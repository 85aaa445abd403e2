"""YAML 1.2, read and written with the library and settings of DVC, so that both parse the same."""

import copy
import io
import math
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import YAMLError
from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent, NodeEvent
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.representer import SafeRepresenter

from grpo.errors import ArtifactError, brief

MOST_VALUES = 100_000  # of a file; nested aliases can exceed it
DEEPEST = 100
LARGEST = 2**63 - 1
WIDTH = 100
WORDS = re.compile(r"[A-Za-z0-9_./ -]*")


class _Representer(SafeRepresenter):
    """Quotes every string that is not plain words: libyaml reads `[1:30]` as a wrong mapping."""

    def represent_text(self, text: str) -> ScalarNode:
        style = None if WORDS.fullmatch(text) else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Representer.add_representer(str, _Representer.represent_text)


def parse_yaml(text: str) -> Any:
    """Returns the content of a YAML text, as DVC reads it.

    Raises:
      ArtifactError: If the text is not valid YAML, or has a duplicate key; the message has no path.
    """
    try:
        return copy.deepcopy(_load(text))
    except ArtifactError:
        raise
    except DuplicateKeyError as error:
        raise ArtifactError(next(_duplicates(text), None) or _reason(error)) from None
    except (YAMLError, ValueError, LookupError, TypeError) as error:  # the others: bad scalars
        tab = re.search(r"^ *\t", text, flags=re.M)
        why = _reason(error)
        if tab:
            line = text.count("\n", 0, tab.start()) + 1
            why = f"line {line} is indented by a tab; use spaces"
        raise ArtifactError(f"must be YAML, {why}") from None


@lru_cache(maxsize=8)  # a stage reads params.yaml and dvc.yaml several times
def _load(text: str) -> Any:
    """Returns the content of a YAML text, which callers must not change."""
    _require_small(text)
    return YAML(typ="safe").load(text)


def read_yaml(path: Path) -> Any:
    """Returns the content of a YAML file.

    Raises:
      FileNotFoundError: If the file is missing.
      ArtifactError: If the file is not valid YAML in UTF-8; the message has no path.
    """
    if path.exists() and not path.is_file():  # reading a pipe would block
        kind = "directory" if path.is_dir() else "pipe or device"
        raise ArtifactError(f"must be a YAML file, is a {kind}; correct the path")
    try:
        return parse_yaml(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ArtifactError(f"must be YAML in UTF-8, {error}; save it as UTF-8") from None
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ArtifactError(f"must be a file that can be read, {error.strerror}") from None


def dump_yaml(value: Any, *, compact: bool = False, width: int = WIDTH) -> str:
    """Returns plain values as YAML that `parse_yaml` and DVC read back unchanged.

    Args:
      compact: Writes mappings and lists of scalars on one line.
      width: Of a line, in characters; longer ones are wrapped.
    """
    writer = YAML(typ="safe", pure=True)
    writer.Representer = _Representer
    writer.default_flow_style = None if compact else False
    writer.width = width
    writer.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    writer.indent(mapping=2, sequence=4, offset=2)
    stream = io.StringIO()
    writer.dump(value, stream)
    return stream.getvalue()


def find_odd_value(content: Any) -> str | None:
    """Returns a message about the first value that parameters do not support, or None.

    Unsupported are recursive aliases, more than MOST_VALUES values, numbers that are not finite or
    exceed 64 bits, dates and other types that JSON lacks, and keys that are not strings.
    """
    left = MOST_VALUES

    def visit(value: Any, path: str, above: tuple[int, ...]) -> str | None:
        nonlocal left
        left -= 1
        if left < 0:
            return f"the file must have at most {MOST_VALUES} values, aliases written out"
        if isinstance(value, dict | list):
            if id(value) in above:
                return f"{path} is an alias of its own parent; write the values out"
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in pairs:
                if isinstance(value, dict) and not isinstance(key, str):
                    where = path or "the file"
                    return f"{where} has the key {key!r}, must have texts; put it in quotes"
                inner = f"{path}[{key}]" if isinstance(value, list) else f"{path}.{key}".lstrip(".")
                found = visit(item, inner, (*above, id(value)))
                if found:
                    return found
            return None
        return _odd_scalar(value, path or "the file")

    return visit(content, "", ())


def _require_small(text: str) -> None:
    """Raises ArtifactError if a text is too large to load.

    Deep nesting overflows libyaml's stack, and merge keys expand nested aliases.
    """
    open_since: list[tuple[str | None, int]] = []  # anchor, and values before the collection
    values, sizes = 0, dict[str | None, int]()  # with aliases expanded; sizes are by anchor
    copied = 0
    for event in YAML(typ="safe").parse(text):
        if isinstance(event, CollectionEndEvent):
            anchor, before = open_since.pop()
            sizes[anchor] = values - before
            continue
        if not isinstance(event, NodeEvent):
            continue
        size = sizes.get(event.anchor, 1) if isinstance(event, AliasEvent) else 1
        if isinstance(event, CollectionStartEvent):
            open_since.append((event.anchor, values))
        elif not isinstance(event, AliasEvent):
            sizes[event.anchor] = 1
        values += size
        copied += size - 1
        if len(open_since) > DEEPEST:
            raise ArtifactError(f"must be YAML with at most {DEEPEST} levels, has more")
        if copied > MOST_VALUES:
            raise ArtifactError(
                f"the file must have at most {MOST_VALUES} values, aliases written out"
            )


def _odd_scalar(value: Any, path: str) -> str | None:
    """Returns a message about an unsupported scalar, or None."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{path} must be a finite number, got {value}"
    if isinstance(value, int) and abs(value) > LARGEST:
        return f"{path} must lie within 64 bits, got a number of {value.bit_length()}"
    if value is not None and not isinstance(value, str | int | float):
        return (
            f"{path} must be a number, a text, true, false or null, got the "
            f"{type(value).__name__} {value}; put a text in quotes"
        )
    return None


def _duplicates(text: str) -> Iterator[str]:
    """Yields a message for each duplicate key, with its path and lines."""
    seen: set[int] = set()

    def visit(node: Node, path: str) -> Iterator[str]:
        if id(node) in seen:  # an alias
            return
        seen.add(id(node))
        if isinstance(node, MappingNode):
            lines: dict[tuple[str, str], int] = {}
            for key, value in node.value:
                inner = f"{path}.{key.value}".lstrip(".")
                line = key.start_mark.line + 1
                first = lines.get((key.tag, str(key.value)))
                if first is not None:
                    yield f"{inner} is a duplicate key, in lines {first} and {line}; remove one"
                lines[key.tag, str(key.value)] = line
                yield from visit(value, inner)
        elif isinstance(node, SequenceNode):
            for number, each in enumerate(node.value):
                yield from visit(each, f"{path}[{number}]")

    yield from visit(YAML(typ="safe").compose(text), "")


def _reason(error: object) -> str:
    return brief(str(error).partition("\n\nTo suppress")[0])


def value_at(content: Any, path: str, absent: Any = None) -> Any:
    """Returns the value at a dotted path, which counts the items of a list; else `absent`."""
    for part in path.split("."):
        try:
            content = content[int(part) if isinstance(content, list) else part]
        except (KeyError, IndexError, TypeError, ValueError):
            return absent
    return content
