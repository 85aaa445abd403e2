"""What DVC records of a stage beside data: its parameters and its code, compared at both ends."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo.errors import ParameterError, located
from grpo.params.parameters import read_content
from grpo.params.yaml import read_yaml
from grpo.schema import PARAMS

PIPELINE = Path("dvc.yaml")
CODE = ("grpo/", "stages/")


@contextmanager
def unchanged(stage: str) -> Iterator[None]:
    """Raises ParameterError after the block if what DVC will record is not what the stage read.

    DVC reads parameters and code when a stage has ended; an edit in between would be recorded as
    what made the outs. By hand, without a dvc.yaml, nothing is recorded.

    Args:
      stage: Its full name, e.g. train@sgpo-1.
    """
    if not PIPELINE.exists() or not PARAMS.exists():
        yield
        return
    declared = _declared(stage, read_content())
    before = _recorded(declared)
    yield
    after = _recorded(declared)
    for what in sorted(before.keys() | after.keys()):
        if before.get(what) != after.get(what):
            raise ParameterError(
                f"{what} changed while {stage} ran, which read the old one; nothing is recorded, "
                "run it again"
            )


def read_stages() -> dict[str, Any]:
    """Returns the stages of dvc.yaml as they stand there; none without the file.

    Raises:
      ArtifactError: If it is no YAML.
    """
    if not PIPELINE.exists():
        return {}
    with located(PIPELINE):
        stages: dict[str, Any] = (read_yaml(PIPELINE) or {}).get("stages") or {}
    return stages


def _recorded(declared: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a stage's parameters by path, and the hash of each file of its code."""
    content, found = read_content(), dict[str, Any]()
    for path in declared.get("params", []):
        found[f"{PARAMS}: {path}"] = _value_at(content, path)
    for dep in declared.get("deps", []):
        if dep.startswith(CODE):
            for file in _files(Path(dep)):
                found[str(file)] = hashlib.sha256(file.read_bytes()).digest()
        elif dep == str(PARAMS):
            found |= {f"{PARAMS}: {name}": value for name, value in content.items()}
    return found


def _declared(stage: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the stage as dvc.yaml has it, the names of a foreach filled in."""
    name, _, key = stage.partition("@")
    declared: Mapping[str, Any] = read_stages().get(name, {})
    if "foreach" not in declared:
        return declared
    entries = _value_at(params, declared["foreach"].removeprefix("${").removesuffix("}"))
    item = (entries or {}).get(key) or {}
    fillings = {"${key}": key} | {
        f"${{item.{name}}}": value for name, value in item.items() if isinstance(value, str)
    }
    return {
        section: [_fill(each, fillings) for each in declared["do"].get(section, [])]
        for section in ("params", "deps")
    }


def _fill(text: str, fillings: Mapping[str, str]) -> str:
    for name, value in fillings.items():
        text = text.replace(name, value)
    return text


def _value_at(content: Any, path: str) -> Any:
    """Returns what stands at a dotted path; None if nothing does."""
    for part in path.split("."):
        content = content.get(part) if isinstance(content, Mapping) else None
    return content


def _files(path: Path) -> list[Path]:
    """Returns a file, or the source files of a folder."""
    if not path.is_dir():
        return [path] if path.is_file() else []
    return [
        Path(folder) / name
        for folder, _, names in os.walk(path)
        for name in names
        if "__pycache__" not in folder
    ]
