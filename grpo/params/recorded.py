"""What a stage's run is recorded as: unchanged parameters and code, and outputs of its own."""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo.errors import ArtifactError, ParameterError, located
from grpo.params.parameters import read_content
from grpo.params.yaml import read_yaml
from grpo.schema import PARAMS

PIPELINE = Path("dvc.yaml")
CODE = ("grpo/", "stages/")
INTERPOLATION = re.compile(r"\$\{[^}]*\}")


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


def require_own_outs(stage: str, paths: Mapping[str, Path]) -> None:
    """Refuses to replace what is no output of the stage.

    Under dvc there is nothing to refuse: it removes a stage's outs before it runs the stage.

    Args:
      stage: The module's name.
      paths: By parameter of the stage, in order; the name of an output ends in "out".

    Raises:
      ArtifactError: If a file or directory is at the path of an output, and it is an input, too,
        or dvc.yaml lets no stage of this module write it.
    """
    for name, path in paths.items():
        if name.endswith("out"):
            _require_no_link(path)
    there = [
        (position, path)
        for position, (name, path) in enumerate(paths.items())
        if name.endswith("out") and path.exists()
    ]
    if not there:
        return
    commands = _commands(stage)
    for position, path in there:
        usual = {words[position] for words in commands if position < len(words)}
        is_read = list(paths.values()).count(path) > 1
        if is_read or not any(_may_be(os.path.relpath(path), each) for each in usual):
            raise ArtifactError(
                f"{path}: exists and is not an output of stage {stage}, which writes "
                f"{' or '.join(sorted(usual)) or 'nothing'}; correct the path, or delete the file"
            )


def _require_no_link(path: Path) -> None:
    """Refuses an output that a link puts outside the workspace, before any compute is spent."""
    here = Path.cwd().resolve()
    if not path.is_absolute() and not path.parent.resolve().is_relative_to(here):
        raise ArtifactError(
            f"{path}: must lie in the workspace, a link leads to {path.parent.resolve()}, and DVC "
            "refuses outputs behind links; for a larger disk run dvc cache dir DIRECTORY and dvc "
            "config cache.type symlink instead"
        )


def _commands(stage: str) -> list[list[str]]:
    """Returns the paths that each stage of dvc.yaml gives to a module."""
    words = [each.get("do", each).get("cmd", "").split() for each in read_stages().values()]
    return [each[3:] for each in words if each[1:3] == ["-m", f"stages.{stage}"]]


def _may_be(path: str, usual: str) -> bool:
    """Returns whether a path is one that dvc.yaml spells with interpolations."""
    parts = map(re.escape, INTERPOLATION.split(usual))
    return re.fullmatch("[^/]+".join(parts), path) is not None
