"""Computes the code dependencies of the stages in dvc.yaml from their imports."""

import ast
import copy
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from grpo.errors import ArtifactError, MissingExtraError
from grpo.params.yaml import read_yaml

CODE = ("grpo", "stages")
# Folders whose files are separate dependencies, unless a stage imports all of them. Other folders
# are one dependency each.
FILE_BY_FILE = {
    *("grpo", "grpo/allocation", "grpo/modalities", "grpo/objective", "grpo/rewards"),
    *("grpo/sampling", "grpo/tasks", "grpo/training", "grpo/wiring", "stages"),
}
# Modules that look up parts of a package by name at run time: a stage that imports the module
# depends on the whole package. Stages that only validate the parameters of a task or judge do not
# depend on its code.
FOUND_BY_NAME = {
    "grpo.wiring.rewards": "grpo.rewards",
    "grpo.wiring.tasks": "grpo.tasks",
    "stages.check": "grpo.tasks",  # writes which files under data/ a task reads
    "grpo.modalities.policy": "grpo.modalities",  # creates, loads and samples policies
}
# Files of modalities that only these modules call. As general dependencies, a change of a figure
# would rerun the base policy's stage.
CALLED_BY = {
    "films": {"grpo.report.samples"},
    "phase_metrics": {"grpo.wiring.phase_profiles", "grpo.wiring.rounds"},
}
# The part of the modalities that reading parameters needs, without imports inside methods.
LIGHT = "grpo.modalities.*.modality"
WITH_SUBFOLDERS = ("grpo/runtime",)
PIPELINE = "dvc.yaml"
WIDTH = 120


def with_code_dependencies(workspace: Path) -> str:
    """Returns the text of dvc.yaml with the imported code of every stage in its `deps: [...]`.

    Other dependencies, and stages that depend on all code, are unchanged.

    Raises:
      ArtifactError: If a stage's `deps` is not a multi-line list in brackets.
      MissingExtraError: If grimp, which analyzes imports, is not installed.
    """
    path = workspace / PIPELINE
    text = path.read_text(encoding="utf-8")
    for name, code in _code_behind_stages(workspace):
        stage = rf"^  {name}:\n(?:    .*\n|\n)*?"
        block = re.search(stage + r"( +)deps: \[\n((?:.*\n)*?)\1\]$", text, re.MULTILINE)
        if block is None:
            raise ArtifactError(
                f"{path}: stages.{name}.deps must be a list of several lines, from `deps: [` to `]`"
            )
        kept = [each for each in block[2].splitlines(keepends=True) if not _is_code(each)]
        lines = _wrap(code, indent=block[1] + "  ") + "".join(kept)
        text = text[: block.start(2)] + lines + text[block.end(2) :]
    return text


def _code_behind_stages(workspace: Path) -> Iterator[tuple[str, list[str]]]:
    """Yields each stage of dvc.yaml and the code that its module imports."""
    try:
        import grimp  # with the extra `test`
    except ImportError:
        raise MissingExtraError("grpo dvc-deps needs grimp; run pip install -e '.[test]'") from None
    graph = grimp.build_graph(*CODE, cache_dir=None, exclude_type_checking_imports=True)
    files = {file for each in graph.modules if (file := _file_of(workspace, each))}
    modalities = {
        str(each.parent) for each in map(Path, files) if each.match("grpo/modalities/*/*")
    }
    light = copy.deepcopy(graph)
    for importer, imported in _imports_within_functions(graph, workspace):
        light.remove_import(importer=importer, imported=imported)
    for stage, content in read_yaml(workspace / PIPELINE)["stages"].items():
        declared = content.get("do", content)
        if set(CODE) <= {*declared["deps"]}:
            continue
        module = declared["cmd"].split()[2]
        touched = {module, *light.find_upstream_modules(module)}
        found = {each for each in FOUND_BY_NAME if each in touched}
        parts = {part for each in found for part in graph.find_descendants(FOUND_BY_NAME[each])}
        parts |= {*light.find_matching_modules(LIGHT)} if "grpo.modalities" in touched else set()
        for name, callers in CALLED_BY.items():
            called = {each for each in graph.modules if each.endswith(f".{name}")}
            parts = parts - called if callers.isdisjoint(touched) else parts | called
        for part in parts:
            touched |= {part, *light.find_upstream_modules(part)}
        single = FILE_BY_FILE | modalities
        wanted = {file for each in touched if (file := _file_of(workspace, each))}
        yield stage, _cover(wanted, files, single)


def _imports_within_functions(graph: Any, workspace: Path) -> Iterator[tuple[str, str]]:
    """Yields (importer, imported) for the imports inside a modality's methods."""
    for importer in graph.find_matching_modules("grpo.modalities.*.modality"):
        file = workspace / (importer.replace(".", "/") + ".py")
        lines = file.read_text(encoding="utf-8").splitlines()
        for imported in graph.find_modules_directly_imported_by(importer):
            details = graph.get_import_details(importer=importer, imported=imported)
            if all(lines[each["line_number"] - 1].startswith(" ") for each in details):
                yield importer, imported


def _file_of(workspace: Path, module: str) -> str | None:
    """Returns a module's file, or None for a package whose __init__.py is only a docstring."""
    stem = module.replace(".", "/")
    if (workspace / f"{stem}.py").is_file():
        return f"{stem}.py"
    init = f"{stem}/__init__.py"
    return init if len(ast.parse((workspace / init).read_text("utf-8")).body) > 1 else None


def _cover(wanted: set[str], files: set[str], single: set[str]) -> list[str]:
    """Returns the wanted files, or the folders that contain them.

    Args:
      single: Folders whose files are listed one by one unless all are wanted.
    """
    paths = set()
    for folder in {_folder_of(each) for each in wanted}:
        inside = {each for each in files if each.startswith(f"{folder}/")}
        if folder in single and not inside <= wanted:
            paths |= {each for each in wanted if str(Path(each).parent) == folder}
        else:
            paths.add(folder)
    return sorted(each for each in paths if paths.isdisjoint(map(str, Path(each).parents)))


def _folder_of(file: str) -> str:
    whole = [each for each in WITH_SUBFOLDERS if file.startswith(f"{each}/")]
    return whole[0] if whole else str(Path(file).parent)


def _is_code(line: str) -> bool:
    return line.strip().startswith(tuple(f"{each}/" for each in CODE))


def _wrap(code: Iterable[str], *, indent: str) -> str:
    return (
        textwrap.fill(
            ", ".join(code) + ",",
            WIDTH,
            initial_indent=indent,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        + "\n"
    )
