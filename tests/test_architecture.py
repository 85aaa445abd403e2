"""Layers of the code, README's map, and dvc.yaml's code dependencies against the import graph."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import grimp
import pytest

from grpo.params.yaml import parse_yaml

ROOT = Path(__file__).parents[1]
CODE = [path for folder in ("grpo", "stages", "flows") for path in ROOT.glob(f"{folder}/**/*.py")]
STAGES: dict[str, Any] = parse_yaml((ROOT / "dvc.yaml").read_text())["stages"]
# A change of these files must re-run what imports them; the other packages count as a whole.
SINGLE_FILES = ("grpo.build.", "stages.")
LINKS = "grpo.objective"  # counts as a whole for a stage that reads all of it, as for a new link


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("grpo", "stages")


JUDGE = "artifacts/data/judge.json"


def code_behind(graph: grimp.ImportGraph, module: str) -> set[str]:
    """Returns the files and folders that a module's imports touch, as dvc.yaml names them."""
    touched = {module, *graph.find_upstream_modules(module)}
    links = {each for each in graph.find_descendants(LINKS) if each in touched}
    single = set() if links == graph.find_descendants(LINKS) else links
    found = {_as_dependency(each) for each in touched - single if (ROOT / _file_of(each)).is_file()}
    return found | {_file_of(each) for each in single}


def _file_of(module: str) -> str:
    return module.replace(".", "/") + ".py"


def _as_dependency(module: str) -> str:
    parts = module.split(".")
    package = 3 if module.startswith(SINGLE_FILES) else 2
    return "/".join(parts[:package]) if len(parts) > package else _file_of(module)


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_depends_on_the_code_it_imports_and_no_other(graph: grimp.ImportGraph, name: str):
    stage = STAGES[name].get("do", STAGES[name])
    module = stage["cmd"].split()[2]
    if {"grpo", "stages"} <= set(stage["deps"]):  # all code there is
        return
    declared = {dep for dep in stage["deps"] if dep.startswith(("grpo/", "stages/"))}
    assert declared == code_behind(graph, module)


@pytest.mark.parametrize("name", STAGES)
def test_what_a_stage_keeps_of_itself_is_bound_to_the_judge_if_the_stage_is(name: str):
    """Else a stage that was killed would go on with what another judge's model has said."""
    stage = STAGES[name].get("do", STAGES[name])
    text = (ROOT / _file_of(stage["cmd"].split()[2])).read_text()
    if "scratch_of(" in text:
        assert ("[judge, " in text) == (JUDGE in stage["deps"])


def test_everything_is_caught_only_where_code_or_files_of_others_are_met():
    blind = [
        path.relative_to(ROOT).as_posix()
        for path in CODE
        if path.parts[len(ROOT.parts)] == "grpo"
        and re.search(r"except \(?Exception", path.read_text())
    ]
    assert sorted(blind) == [
        "grpo/errors.py",
        "grpo/rewards/base.py",
        "grpo/simulation/worker.py",
    ]


def test_reasoning_gym_is_imported_where_its_warnings_are_silenced():
    found = [
        path
        for path in CODE
        if re.search("import reasoning_gym|from reasoning_gym", path.read_text())
    ]
    assert [path.relative_to(ROOT).as_posix() for path in found] == ["grpo/rewards/reasoning.py"]


def test_the_library_defers_no_annotations_and_never_pickles():
    for path in CODE:
        if path.parts[len(ROOT.parts)] == "grpo":
            text = path.read_text()
            assert "from __future__ import annotations" not in text, path
            assert "import pickle" not in text, path
            assert "torch.load(" not in text, path


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("grpo.__main__", {"torch", "mlflow", "prefect", "transformers", "matplotlib", "boto3"}),
        ("grpo.params.parameters", {"torch", "mlflow", "prefect", "transformers", "boto3"}),
        ("flows.reproduce", {"torch", "transformers"}),
        ("stages.score", {"torch", "mlflow", "transformers", "matplotlib"}),
        ("stages.curriculum", {"torch", "mlflow", "transformers", "matplotlib"}),
        ("stages.prepare", {"torch", "mlflow", "transformers", "matplotlib"}),
    ],
)
def test_imports_stay_light(module: str, heavy: set[str]):
    code = f"import sys, {module}; print(' '.join(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert heavy.isdisjoint(result.stdout.split())


def test_every_path_of_the_readme_map_exists_and_every_package_is_on_it():
    map_lines = (ROOT / "README.md").read_text().split("<!-- map -->")[1].splitlines()
    named = {line.split("`")[1] for line in map_lines if line.startswith("| `")}
    for path in named:
        assert list(ROOT.glob(path)), f"README's map names {path}, which does not exist"
    for code in CODE:
        folder = code.relative_to(ROOT).parts[:-1][:2]
        row = "/".join(folder) + "/" if folder != ("grpo",) else "grpo/*.py"
        assert row in named, f"add a row for `{row}` to README's map"
