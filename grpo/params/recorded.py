"""Checks that DVC records what a stage ran: unchanged parameters and code, and its own outputs."""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo.errors import ArtifactError, ParameterError, located
from grpo.params.recipes import read_content
from grpo.params.yaml import read_yaml, value_at
from grpo.runtime.artifacts.files import files_in, read_json, sha256_of
from grpo.schema import PARAMS

PIPELINE = Path("dvc.yaml")
CODE = ("grpo/", "stages/")
PLUGIN_MANIFESTS = Path("artifacts/plugins")
INTERPOLATION = re.compile(r"\$\{[^}]*\}")


@contextmanager
def unchanged(stage: str) -> Iterator[None]:
    """Raises ParameterError if parameters or code changed while the block ran.

    DVC reads parameters and code after a stage has ended, and would record an edit in between as
    the source of the outputs. Without a dvc.yaml nothing is recorded, and nothing is checked.

    Args:
      stage: Full name of the stage, e.g. train@sgpo-1.
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
                f"{what} must not change while {stage} runs; nothing is recorded, run it again"
            )


def read_stages() -> dict[str, Any]:
    """Returns the stages of dvc.yaml, uninterpolated; empty if there is no such file.

    Raises:
      ArtifactError: If the file is not valid YAML.
    """
    if not PIPELINE.exists():
        return {}
    with located(PIPELINE):
        stages: dict[str, Any] = (read_yaml(PIPELINE) or {}).get("stages") or {}
    return stages


def _recorded(declared: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a stage's parameters by path, and the hashes of its code files and plugins."""
    content, found = read_content(), dict[str, Any]()
    for path in declared.get("params", []):
        found[f"{PARAMS}: {path}"] = value_at(content, path)
    for dep in declared.get("deps", []):
        if dep.startswith(CODE):
            for file in files_in(Path(dep)):
                found[str(file)] = hashlib.sha256(file.read_bytes()).digest()
        elif Path(dep).parent == PLUGIN_MANIFESTS:
            found |= _require_described(Path(dep))
        elif dep == str(PARAMS):
            found |= {f"{PARAMS}: {name}": value for name, value in content.items()}
    return found


def _require_described(manifest: Path) -> dict[str, str]:
    """Returns the hashes of a manifest of files under plugins/, which must be those of the files.

    Raises:
      ArtifactError: If a file has changed since the stage check wrote the manifest.
    """
    said: dict[str, str] = read_json(manifest) if manifest.exists() else {}
    for name, wanted in said.items():
        if not Path(name).is_file() or sha256_of(Path(name)) != wanted:
            raise ArtifactError(f"{name}: has changed since check ran; run it again")
    return said


def _declared(stage: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the stage of dvc.yaml with the variables of a foreach filled in."""
    name, _, key = stage.partition("@")
    declared: Mapping[str, Any] = read_stages().get(name, {})
    if "foreach" not in declared:
        return declared
    entries = value_at(params, declared["foreach"].removeprefix("${").removesuffix("}"))
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


def require_own_outs(stage: str, paths: Mapping[str, Path]) -> None:
    """Raises if a stage would replace a file that is not its output.

    This cannot happen under DVC, which removes the outputs of a stage before it runs.

    Args:
      stage: Name of the stage's module.
      paths: Paths by parameter of the stage, in order; the name of an output ends in "out".

    Raises:
      ArtifactError: If the path of an output exists, and it is also an input or not an output of
        this module in dvc.yaml.
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
    """Raises if a symbolic link places an output outside the workspace."""
    here = Path.cwd().resolve()
    if not path.is_absolute() and not path.parent.resolve().is_relative_to(here):
        raise ArtifactError(
            f"{path}: must be in the workspace, a link leads to {path.parent.resolve()}, and DVC "
            "refuses outputs behind links; for a larger disk run dvc cache dir DIRECTORY and dvc "
            "config cache.type symlink instead"
        )


def _commands(stage: str) -> list[list[str]]:
    """Returns the path arguments of each stage of dvc.yaml that runs a module."""
    words = [each.get("do", each).get("cmd", "").split() for each in read_stages().values()]
    return [each[3:] for each in words if each[1:3] == ["-m", f"stages.{stage}"]]


def _may_be(path: str, usual: str) -> bool:
    """Returns whether a path matches one of dvc.yaml that may contain interpolations."""
    parts = map(re.escape, INTERPOLATION.split(usual))
    return re.fullmatch("[^/]+".join(parts), path) is not None
