"""`grpo new` writes parts that work as they are."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo.errors import ArtifactError, ParameterError
from grpo.params.parameters import read_params
from grpo.params.yaml import dump_yaml
from grpo.wiring.checks import findings
from grpo.wiring.new_parts import EXAMPLES, KINDS, PartKind, write_part

ROOT = Path(__file__).parents[1]


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    shutil.copytree(ROOT / EXAMPLES, EXAMPLES)
    return tmp_path


def run(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f".{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def without(arm: dict[str, Any], section: str) -> dict[str, Any]:
    """Returns an arm without the parts of one's own in a section."""
    kept = [each for each in arm[section] if "plugins." not in str(each)]
    return {**arm, section: kept}


@pytest.mark.usefixtures("workspace")
def test_every_new_part_passes_its_test_and_the_check():
    for kind in KINDS:
        write_part(kind, f"own_{kind}")
    done = run("pytest", "plugins", "-q", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout
    assert f"{'.' * len(KINDS)} " in done.stdout
    params = yaml.safe_load((ROOT / "recipes/smoke.yaml").read_text())
    params["task"] = {"kind": "plugins.own_task", "largest": 9, "train_prompts": 8}
    params["task"]["eval_prompts"] = 4
    params["reward"]["judges"][0]["judge"] = "plugins.own_judge"
    params["reward"] |= {"answer_pattern": None, "timeout_seconds": None}
    arm = params["arms"]["sgpo"]
    arm["curriculum"] = [
        {"plugins.own_curriculum": {"low": 0.1, "high": 0.9}},
        {"split_at_random": {"phases": 1, "prompts_per_phase": 8}},
        {"fix_group_size": {"rollouts": 4}},
    ]
    arm["selection"] = [{"plugins.own_selection": {"prompts": 4, "chance": 0.5}}]
    arm["objective"].append({"plugins.own_link": {"factor": 0.5}})
    found = []
    for left_out in ("curriculum", "selection"):  # U19 refuses two that filter by outcomes
        path = Path(f"{left_out}.yaml")
        path.write_text(dump_yaml(params | {"arms": {"sgpo": without(arm, left_out)}}))
        found += findings(read_params(path))
    assert [each for each in found if "own" in each.path] == []


@pytest.mark.usefixtures("workspace")
@pytest.mark.parametrize("name", ["", "A", "test_a", "_a", "a-b", "../a", "a.b", "class"])
def test_a_name_that_is_none_of_a_module_is_refused(name: str):
    with pytest.raises(ParameterError, match="must be the name of a Python file"):
        write_part("judge", name)
    assert not Path("plugins").exists()


@pytest.mark.usefixtures("workspace")
@pytest.mark.parametrize("kind", KINDS)
def test_no_file_is_replaced(kind: PartKind):
    assert write_part(kind, "mine") == [Path("plugins/mine.py"), Path("plugins/test_mine.py")]
    for name in ("mine", "test_mine"):
        before = Path(f"plugins/{name}.py").read_text()
        with pytest.raises(ArtifactError, match="is there already"):
            write_part("judge", "mine")
        assert Path(f"plugins/{name}.py").read_text() == before
        Path("plugins/mine.py").unlink(missing_ok=True)


@pytest.mark.usefixtures("workspace")
def test_the_command_says_where_to_name_the_part_and_refuses_in_one_line():
    done = run("grpo", "new", "link", "mine")
    assert done.stdout.split() == ["plugins/mine.py", "plugins/test_mine.py"]
    assert "plugins.mine, an entry of arms.ARM.objective" in done.stderr
    done = run("grpo", "new", "judge", "mine")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
