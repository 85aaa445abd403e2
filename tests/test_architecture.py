"""The house's budgets and layers, and dvc.yaml's code dependencies against the import graph."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import grimp
import pytest
import yaml

ROOT = Path(__file__).parents[1]
CODE = [path for folder in ("grpo", "stages", "flows") for path in ROOT.glob(f"{folder}/**/*.py")]
STAGES: dict[str, Any] = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
# A change of these files must re-run what imports them; the other packages count as a whole.
SINGLE_FILES = ("grpo.build.", "stages.")


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("grpo", "stages")


def code_behind(graph: grimp.ImportGraph, module: str) -> set[str]:
    """Returns the files and folders that a module's imports touch, as dvc.yaml names them."""
    touched = {module, *graph.find_upstream_modules(module)}
    return {_as_dependency(each) for each in touched if (ROOT / _file_of(each)).is_file()}


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
def test_what_a_stage_keeps_of_itself_is_bound_to_data_if_the_stage_is(name: str):
    """Else a stage that was killed would go on with what another judge's model has said."""
    stage = STAGES[name].get("do", STAGES[name])
    text = (ROOT / _file_of(stage["cmd"].split()[2])).read_text()
    if "scratch_of(" in text:
        assert ("DATA" in text) == ("data" in stage["deps"])


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_keep_their_budgets(path: Path):
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    if path.parent.name == "stages" and path.name != "entry.py":
        assert _num_lines(ast.parse(text)) <= 60
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert _num_lines(node) <= 40, node.name
            positional = [each for each in node.args.args if each.arg not in {"self", "cls"}]
            assert len(positional) <= 7, node.name
            assert _depth(node) <= 4, node.name


def _num_lines(node: ast.Module | ast.FunctionDef) -> int:
    """Returns the lines of a body without its docstring."""
    body = node.body[1:] if ast.get_docstring(node) else node.body
    if not body:
        return 0
    return (body[-1].end_lineno or 0) - body[0].lineno + 1


def _depth(node: ast.AST) -> int:
    """Returns how deep blocks are nested, closures not counted."""
    blocks = (ast.For, ast.While, ast.If, ast.With, ast.Try)
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            continue
        deepest = max(deepest, _depth(child) + isinstance(child, blocks))
    return deepest


def test_the_library_catches_everything_only_at_the_rollout_boundary():
    blind = [
        path.relative_to(ROOT).as_posix()
        for path in CODE
        if path.parts[len(ROOT.parts)] == "grpo" and "except Exception" in path.read_text()
    ]
    assert sorted(blind) == ["grpo/rewards/base.py", "grpo/simulation/worker.py"]


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


def test_the_readme_map_is_true_and_whole():
    map_lines = (ROOT / "README.md").read_text().split("<!-- map -->")[1].splitlines()
    named = {line.split("`")[1] for line in map_lines if line.startswith("| `")}
    for path in named:
        assert (ROOT / path).exists(), path
    modules = {str(path.relative_to(ROOT)) for path in CODE if path.name != "__init__.py"}
    assert modules <= named
