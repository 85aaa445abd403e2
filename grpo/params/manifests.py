"""Manifests: hashes of the files under data/ and plugins/ that parameters name.

Stages depend on them: one that depended on the whole folders would rerun for every unrelated file.
"""

import hashlib
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from grpo.errors import ArtifactError, ParameterError
from grpo.params.parameters import LinkSpec, Parameters
from grpo.runtime.artifacts.files import known_sha256, read_json
from grpo.runtime.plugins import is_plugin, plugin_files
from grpo.runtime.sources import require_directory
from grpo.schema import PARAMS, DirectoryBase

MANIFESTS = Path("artifacts/data")
Reader = Literal["task", "base", "judge"]  # the component that reads the files
Part = Literal["task", "judge", "allocation", "link", "modality"]  # a kind of part under plugins/


def describe_data(params: Parameters, data: Path, reader: Reader) -> dict[str, str]:
    """Returns the SHA-256 of every file under data/ that a component reads, by path.

    Files on the Hugging Face Hub or in S3 are not included: parameters pin their content. The
    settings of judges are, by their parameter: stages that depend on a judge's name and model
    cannot depend on a key that most judges lack.

    Raises:
      ParameterError: If a file is missing.
    """
    files = {str(file): known_sha256(file) for file in sorted(_files(params, data, reader))}
    return files | (_settings(params) if reader == "judge" else {})


def describe_plugins(params: Parameters, part: Part) -> dict[str, str]:
    """Returns the SHA-256 of every file of parts of a kind under plugins/, by path.

    Raises:
      ParameterError: If there is no such file.
    """
    named = sorted({each for each in _named(params, part) if is_plugin(each)})
    files = {file for each in named for file in plugin_files(each)}
    return {str(file): known_sha256(file) for file in sorted(files)}


def _named(params: Parameters, part: Part) -> Iterator[str]:
    """Yields the names of all parts of a kind."""
    match part:
        case "task":
            yield params.task.kind
        case "modality":
            yield params.policy.kind
        case "judge":
            yield from (each.judge for each in params.judges("evaluation").values())
        case "allocation":
            yield from chain.from_iterable(
                _names([*each.curriculum, *each.selection]) for each in params.arms.values()
            )
        case "link":
            yield from chain.from_iterable(_names(each.objective) for each in params.arms.values())


def _names(specs: Iterable[LinkSpec]) -> Iterator[str]:
    for each in specs:
        yield from [each] if isinstance(each, str) else each


def require_described(manifest: Path, params: Parameters, data: Path, reader: Reader) -> None:
    """Raises if data differs from the manifest that the stage check wrote.

    Raises:
      ArtifactError: If a file was changed, removed or added.
      ParameterError: If a file that parameters name is missing.
    """
    said, there = read_json(manifest), describe_data(params, data, reader)
    if not isinstance(said, dict):
        raise ArtifactError(f"{manifest}: must hold a hash for each file; rerun check")
    for name in sorted({*said, *there}):
        if said.get(name) != there.get(name):
            raise ArtifactError(
                f"{name}: differs from {manifest}, it has changed since check ran; rerun check"
            )


def _settings(params: Parameters) -> dict[str, str]:
    """Returns the SHA-256 of the settings of each judge that has some, by parameter."""
    settings = {
        f"{where}.settings": each.settings for where, each in params.judges("evaluation").items()
    }
    return {
        where: hashlib.sha256(each.model_dump_json().encode()).hexdigest()
        for where, each in settings.items()
        if each is not None
    }


def _files(params: Parameters, data: Path, reader: Reader) -> Iterator[Path]:
    if reader == "task":
        for parameter, file in params.task.files():
            yield _require_file(parameter, data / file)
        return
    sections = (
        {"policy.base": params.policy.base} if reader == "base" else params.judges("evaluation")
    )
    for at, section in sections.items():
        for directory in _directories(section, data, at):
            yield from (each for each in directory.rglob("*") if each.is_file())


def _require_file(parameter: str, path: Path) -> Path:
    if not path.is_file():
        raise ParameterError(f"{PARAMS}: {parameter} must be a file, {path} is not one")
    return path


def _directories(value: object, data: Path, parameter: str) -> Iterator[Path]:
    """Yields the directories under data/ that a section of the parameters names."""
    if isinstance(value, DirectoryBase):
        yield require_directory(value, data, parameter=parameter)
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _directories(getattr(value, name), data, f"{parameter}.{name}")
