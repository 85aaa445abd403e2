"""Follows docs/own-run.md from a clone to a finished run with a task, judge, link and model."""

import re
import shlex
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest
import yaml

from tests import tiny_pipeline
from tests.modalities.tiny import tiny_policy

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/own-run.md").read_text()
INSTALLS = ("make setup", ". .venv/bin/activate", "cp -r MODEL")  # done by the test in its own way


def blocks() -> list[str]:
    """Returns the indented blocks of the page, in order."""
    found = re.findall(r"\n\n((?: {8}.*\n|\n)+)", PAGE)
    return [textwrap.dedent(each).strip() for each in found]


def commands() -> list[str]:
    return [
        line for each in blocks() if not each.startswith("extends:") for line in each.split("\n")
    ]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone of the working tree with a tiny model."""
    listed = run(ROOT, "git ls-files -co --exclude-standard").split("\n")
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tmp_path / name)
    run(tmp_path, "git init -q")
    run(tmp_path, "git add -A")
    for key, value in (("name", "t"), ("email", "t@example.invalid")):
        run(tmp_path, f"git config user.{key} {value}")
    run(tmp_path, "git commit -q -m clone")
    policy = tiny_policy()
    for part in (policy.model, policy.tokenizer):
        part.save_pretrained(tmp_path / "data/my-model")
    return tmp_path


def run(place: Path, command: str) -> str:
    environment = {**tiny_pipeline.environment(), "PYTHONPATH": str(place)}
    done = subprocess.run(
        shlex.split(command), cwd=place, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def follow(clone: Path, until: str) -> None:
    """Runs the commands of the page before one that starts with `until`."""
    for command in commands():
        if command.startswith(until):
            return
        if command.startswith("python -m grpo check"):
            (given,) = [each for each in blocks() if each.startswith("extends:")]
            written = yaml.safe_load((clone / "my-run.yaml").read_text())
            whole = yaml.safe_load(given)
            assert whole["extends"] == written["extends"]
            assert whole["policy"] == {**written["policy"], "max_steps": 16}
            (clone / "my-run.yaml").write_text(given)
        if not command.startswith(INSTALLS):
            run(clone, command)
    raise AssertionError(f"{until} is no command of the page")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of libraries
def test_the_page_leads_to_a_finished_run_without_an_edit_of_the_library(clone: Path):
    follow(clone, "make demo")
    run(clone, "python -m grpo params my-run.yaml --write")  # as `make demo` does
    run(clone, "python -m flows.reproduce --no-server")
    assert (clone / "artifacts/report/index.html").is_file()
    changed = run(clone, "git status --porcelain --untracked-files=all").split("\n")
    folders = {each[3:].split("/")[0] for each in changed if each}
    assert folders == {"plugins", "my-run.yaml", "params.yaml", "dvc.lock", "data"}
    with pytest.raises(AssertionError, match=r"contains\.py: is not tracked, .* run git add"):
        run(clone, "python -m flows.sweep --set seed=0,1,2")
    told = commands()[commands().index("make demo RECIPE=my-run.yaml") + 1 :]
    for command in told[: told.index("python -m flows.sweep --set seed=0,1,2")]:
        run(clone, command)
    table = run(clone, "python -m flows.sweep --set seed=1")
    assert all(f"{arm} gain over base" in table for arm in ("own", "rloo_only")), table


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_the_page_leads_to_parameters_that_pass_the_check(clone: Path):
    follow(clone, "make demo")
    written = [each for each in (clone / "plugins").iterdir() if each.name.startswith("test_")]
    assert len(written) == 3
