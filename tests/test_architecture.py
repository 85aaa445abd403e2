"""Layers of the code, README's map, and dvc.yaml's code dependencies against the import graph."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo.lineage.code_dependencies import PIPELINE, with_code_dependencies
from grpo.modalities import MODALITIES, all_modalities
from grpo.params.yaml import parse_yaml

ROOT = Path(__file__).parents[1]
CODE = [path for folder in ("grpo", "stages", "flows") for path in ROOT.glob(f"{folder}/**/*.py")]
STAGES: dict[str, Any] = parse_yaml((ROOT / "dvc.yaml").read_text())["stages"]
JUDGE = "artifacts/data/judge.json"


def test_a_stage_depends_on_the_code_it_imports_and_no_other():
    """If it fails, run `grpo dvc-deps --write`."""
    assert with_code_dependencies(ROOT) == (ROOT / PIPELINE).read_text()


def test_a_command_compares_and_writes_code_dependencies(tmp_path: Path):
    whole = (ROOT / PIPELINE).read_text()
    for folder in ("grpo", "stages"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    written = tmp_path / PIPELINE
    written.write_text(re.sub(r" grpo/params,", "", whole, count=1))

    def run(*options: str) -> int:
        command = [sys.executable, "-m", "grpo", "dvc-deps", *options]
        return subprocess.run(command, cwd=tmp_path, capture_output=True).returncode

    assert run() == 2
    assert run("--write") == 0
    assert written.read_text() == whole
    assert run() == 0


@pytest.mark.parametrize("name", STAGES)
def test_what_a_stage_keeps_of_itself_is_bound_to_the_judge_if_the_stage_is(name: str):
    """Otherwise, a killed stage would resume with the results of another judge model."""
    stage = STAGES[name].get("do", STAGES[name])
    text = (ROOT / f"stages/{stage['cmd'].split()[2].removeprefix('stages.')}.py").read_text()
    if "scratch_of(" in text:
        is_bound = "[judge, " in text or "RoundInputs(judge, " in text
        assert is_bound == (JUDGE in stage["deps"])


def test_everything_is_caught_only_where_code_or_files_of_others_are_met():
    blind = [
        path.relative_to(ROOT).as_posix()
        for path in CODE
        if path.parts[len(ROOT.parts)] == "grpo"
        and re.search(r"except \(?Exception", path.read_text())
    ]
    assert sorted(blind) == [
        "grpo/errors.py",
        "grpo/modalities/action_chunks/simulation/worker.py",
        "grpo/modalities/tokens/vllm_engine.py",
        "grpo/runtime/plugins.py",
        "grpo/sampling/judging.py",
    ]


def test_only_one_place_knows_the_name_of_the_parameter_file():
    for path in CODE:
        name = path.relative_to(ROOT).as_posix()
        if name.startswith("grpo/") and name != "grpo/schema.py":
            assert '"params.yaml: ' not in path.read_text(), f'{name}: write f"{{PARAMS}}: '


def test_reasoning_gym_is_imported_where_its_warnings_are_silenced():
    found = [
        path
        for path in CODE
        if re.search("import reasoning_gym|from reasoning_gym", path.read_text())
    ]
    assert [path.relative_to(ROOT).as_posix() for path in found] == [
        "grpo/rewards/reasoning_gym.py"
    ]


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


# Code for one kind of policy that is not yet in its folder.
OF_ONE_KIND = (
    "grpo/tasks/manipulation.py",  # whose scenes are those of the modality's simulator
)


def test_nothing_outside_its_folder_names_or_branches_on_a_kind_of_policy():
    kinds = "|".join(MODALITIES)
    names = "|".join(
        getattr(each, name).__name__
        for each in all_modalities().values()
        for name in ("policy", "sampling", "evaluation_sampling")
    )
    wrong = re.compile(rf"grpo\.modalities\.({kinds})\b|\.kind [=!]= |\b({names})\b|\"({kinds})\"")
    for path in CODE:
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(("grpo/modalities/", *OF_ONE_KIND)):
            continue
        found = [line for line in path.read_text().splitlines() if wrong.search(line)]
        assert [line for line in found if "task" not in line] == [], name
