"""Follows the pages docs/own-*.md to their end, like a reader, on a copy of the repository."""

import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo.runtime.artifacts.tables import PROMPTS, read_table
from tests import tiny_pipeline

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
COPIED = ("benchmarks", "grpo", "plugins", "stages", "recipes", "dvc.yaml", "tests")


def blocks(page: str, language: str) -> list[str]:
    """Returns the fenced blocks of a page, including those in lists."""
    found = re.findall(
        rf"^( *)```{language}\n(.*?)^ *```$", (DOCS / page).read_text(), flags=re.M | re.S
    )
    return [textwrap.dedent(block) for _, block in found]


def section(page: str, name: str) -> Any:
    """Returns a section of params.yaml as a page shows it."""
    shown = [yaml.safe_load(block) for block in blocks(page, "yaml")]
    return next(each[name] for each in shown if name in each)


def apply(block: str, root: Path) -> str:
    """Applies the diff of a block and returns the file. Each hunk must match exactly once."""
    head, *hunks = block.split("@@\n")
    path = root / head.removeprefix("--- ").strip()
    for hunk in hunks:
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if not line.startswith("+"))
        after = "".join(line[1:] for line in lines if not line.startswith("-"))
        assert path.read_text().count(before) == 1, f"{path}: {before}"
        path.write_text(path.read_text().replace(before, after))
    return path.relative_to(root).as_posix()


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository with all changes of the pages applied."""
    root = tmp_path_factory.mktemp("reader") / "clone"
    root.mkdir()
    for name in COPIED:
        source = ROOT / name
        ignored = shutil.ignore_patterns("__pycache__")
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, root / name, **({"ignore": ignored} if source.is_dir() else {}))
    shortness, closeness, counts, equations = blocks("own-reward.md", "python")
    parts = {
        "sums": blocks("own-task.md", "python")[0],
        "shortness": shortness,
        "closeness": closeness,
        "counts": counts,
        "equations": equations,
        "links": "\n\n".join(blocks("own-link.md", "python")),
    }
    for name, text in parts.items():
        (root / f"plugins/{name}.py").write_text(text)
    lines = (DOCS / "own-task.md").read_text().splitlines()
    shown = [line.strip() for line in lines if line.startswith('    {"prompt"')]
    (root / "data/my-task").mkdir(parents=True)
    (root / "data/my-task/train.jsonl").write_text("\n".join(shown) + "\n")
    (root / "data/my-task/eval.jsonl").write_text(shown[0].replace("3 + 4", "4 + 3") + "\n")
    return root


def python(root: Path, *words: str) -> str:
    """Returns the output of a module, which must exit with code 0."""
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=root,
        env={**tiny_pipeline.environment(), "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


def write_params(root: Path, **sections: Any) -> dict[str, Any]:
    """Writes the smoke recipe with other sections; returns all of them."""
    params = yaml.safe_load((root / "recipes/smoke.yaml").read_text())
    params = {**params, **sections}
    (root / "params.yaml").write_text(yaml.safe_dump(params))
    return params


def check(root: Path, **sections: Any) -> dict[str, Any]:
    """Runs `python -m grpo check` on what `write_params` writes."""
    params = write_params(root, **sections)
    python(root, "grpo", "check")
    return params


def prepare(root: Path) -> None:
    (root / "data/tiny-model").mkdir(exist_ok=True)
    described = ("artifacts/profile_needed.json", "artifacts/data", "artifacts/plugins")
    python(root, "stages.check", "params.yaml", "data", *described)
    python(root, "stages.prepare", "artifacts/data/task.json", "data", "artifacts/prompts")


def sums() -> dict[str, Any]:
    """Returns the new kind of task as own-task.md sets it."""
    found = re.search(r"^    task:\n(    .*\n)+", (DOCS / "own-task.md").read_text(), flags=re.M)
    assert found
    return dict(yaml.safe_load(found[0])["task"])


def imported() -> dict[str, Any]:
    """Returns a policy section with a directory as base, as in own-task.md."""
    return dict(section("own-model.md", "policy"))


def few() -> dict[str, Any]:
    """Returns a judge of texts for any task of numbers."""
    return dict(section("own-task.md", "reward"))


@pytest.mark.long
def test_prompts_of_ones_own_are_read_and_judged(clone: Path):
    check(clone, task=section("own-task.md", "task"), reward=few(), policy=imported())
    prepare(clone)
    table = read_table(clone / "artifacts/prompts/train.parquet", PROMPTS)
    assert table["answer"].tolist() == ["7", "12"]
    assert table["family"].tolist()[1] == "differences"


@pytest.mark.long
def test_a_new_kind_of_task_is_checked_and_makes_its_prompts(clone: Path):
    task = sums()
    check(clone, task=task, reward=few(), policy=imported())
    prepare(clone)
    table = read_table(clone / "artifacts/prompts/train.parquet", PROMPTS)
    assert len(table) == task["train_prompts"]
    assert set(table["family"]) == {"sums"}


def test_a_judge_of_ones_own_judges_the_tasks_own_answers(clone: Path):
    """Stage prepare judges them, and fails if the judge rejects them."""
    task = sums()
    reward = {**few(), "threshold": 0.5}
    reward["judges"][0]["judge"] = "plugins.closeness"
    write_params(clone, task=task, reward=reward, policy=imported())
    prepare(clone)
    assert read_table(clone / "artifacts/prompts/eval.parquet", PROMPTS)["answer"].notna().all()


@pytest.mark.long
def test_a_judge_of_parts_of_ones_own_gives_a_link_its_scores(clone: Path):
    """Rule H28 would refuse the link without the judge."""
    reward = few()
    reward["judges"].append({**reward["judges"][0], "judge": "plugins.equations", "weight": 0.0})
    params = yaml.safe_load((clone / "recipes/smoke.yaml").read_text())
    for arm in params["arms"].values():
        arm["objective"] = ["sum_later_part_scores", "average_over_prompts", "clip_surrogate"]
    check(clone, task=sums(), reward=reward, policy=imported(), arms=params["arms"])


@pytest.mark.long
def test_a_link_of_ones_own_is_a_link_as_any_other(clone: Path):
    shutil.copy(clone / "recipes/smoke.yaml", clone / "params.yaml")
    (block,) = [each for each in blocks("own-link.md", "diff") if "params.yaml" in each]
    apply(block, clone)
    python(clone, "grpo", "check")


@pytest.mark.long
def test_the_laws_hold_for_a_link_of_ones_own(clone: Path):
    batches = clone / "tests/objective/batches.py"
    batches.write_text(
        batches.read_text().replace(
            "OBJECTIVES: dict[str, Objective] = {",
            "from plugins.links import scale_failures\n"
            "OBJECTIVES: dict[str, Objective] = {\n"
            '    "mine": chain(rloo(), scale_failures(0.5)),',
        )
    )
    (clone / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    assert "passed" in python(clone, "pytest", "tests/objective/test_laws.py", "-k", "mine")


@pytest.mark.long
@pytest.mark.parametrize("name", ["shortness", "counts"])
def test_functions_and_readers_of_ones_own_are_judges(clone: Path, name: str):
    reward = dict(section("own-reward.md", "reward"))
    reward["judges"] = [{**reward["judges"][0], "judge": f"plugins.{name}"}]
    check(clone, task=section("own-task.md", "task"), reward=reward, policy=imported())
    prepare(clone)


@pytest.mark.long
def test_a_base_of_ones_own_is_imported(clone: Path):
    """As own-model.md does it: made in one workspace, imported in another."""
    params = check(clone)
    prepare(clone)
    read = ("artifacts/prompts/warmup.parquet", "artifacts/data/base.json", "data")
    base = ("stages.base", *read, "artifacts/policies/base", "artifacts/training/base")
    python(clone, *base)
    (clone / "data/tiny-model").rmdir()
    shutil.move(clone / "artifacts/policies/base", clone / "data/tiny-model")
    shutil.rmtree(clone / "artifacts")
    assert params["policy"]["base"]["source"] == "scratch"
    check(clone, task=section("own-task.md", "task"), reward=few(), policy=imported())
    prepare(clone)
    python(clone, *base)
    updates = (clone / "artifacts/training/base/updates.csv").read_text().splitlines()
    assert len(updates) == 1  # the titles: no warm-up


def stages_that_depend_on(*wanted: str) -> set[str]:
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    deps = {name: each.get("do", each)["deps"] for name, each in stages.items()}
    return {name for name, read in deps.items() if {*wanted} & {*read}}


def test_the_pages_say_which_stages_run_again():
    pages = {"own-task.md": "task", "own-reward.md": "judge", "own-link.md": "link"}
    for page, part in pages.items():
        text = " ".join((DOCS / page).read_text().split())
        said = re.search(r"these stages run again: (.*?)\. ", text)
        assert said
        runs = stages_that_depend_on("plugins", f"artifacts/plugins/{part}.json")
        assert {*re.findall(r"`([\w-]+)`", said[1])} == runs, page
