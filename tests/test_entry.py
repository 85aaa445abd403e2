"""How stages run under any caller."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STAGE = """\
from stages.entry import run

def main(usage):
    print("runs", flush=True)

run(main, stage="any")
"""
LATE_STAGE = f"import stages\nprint('starts', flush=True)\ninput()\n{STAGE}"
STARTER = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def test_of_ranks_that_torchrun_has_started_the_first_says_what_it_used(tmp_path: Path):
    for rank, told in (("1", []), ("0", ["any.json"])):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": rank}
        subprocess.run([sys.executable, "-c", STAGE], cwd=tmp_path, env=environment, check=True)
        assert [each.name for each in tmp_path.glob(".runs/*")] == told
    locks = {each.name for each in (tmp_path / ".work").glob("*.lock")}
    assert locks == {"any.rank-0.lock", "any.rank-1.lock"}


def test_a_stage_whose_parent_dies_during_its_imports_does_not_run(tmp_path: Path):
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, LATE_STAGE],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert starter.stdout is not None
    assert starter.stdout.readline() == "starts\n"
    starter.kill()
    starter.wait()
    said, _ = starter.communicate("go on\n")  # until the stage has ended
    assert said == ""
    assert not (tmp_path / ".runs").exists()


def test_what_a_stage_imports_is_never_looked_at_for_garbage(tmp_path: Path):
    """Traversing them would take a quarter of the time of a short stage."""
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, gc\natexit.register(lambda: print(gc.isenabled(), gc.get_freeze_count()))"
    )
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    ended = subprocess.run(
        [sys.executable, "-m", "stages.prepare"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert "takes the paths" in ended.stderr
    is_enabled, frozen = ended.stdout.split()
    assert is_enabled == "True"
    assert int(frozen) > 100_000


def test_who_imports_stages_keeps_its_garbage_collection():
    code = "import gc, stages, sys; sys.exit(not gc.isenabled())"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


PIPELINE = """\
stages:
  any:
    foreach: ${rounds}
    do:
      cmd: python
      deps: [grpo/code, stages/any.py, data]
      params: [seed, "arms.${item.arm}.training", "rounds.${key}"]
  whole:
    cmd: python
    deps: [params.yaml]
"""
EDITS = """\
from pathlib import Path
from stages.entry import run

def main(usage):
    {edit}

run(main, stage="any")
"""
NOW = "{arms: {a: {training: {rate: 1e-5}, objective: x}, b: {training: {rate: 1}}}, "
PARAMS = NOW + "rounds: {a-1: {arm: a}, b-1: {arm: b}}, seed: 1, reward: 1}"


@pytest.mark.parametrize(
    ("stage", "file", "old", "new", "named"),
    [
        ("any@a-1", "params.yaml", "1e-5", "2e-5", "params.yaml: arms.a.training"),
        pytest.param(
            "any@a-1",
            "params.yaml",
            "seed: 1",
            "seed: 2",
            "params.yaml: seed",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "any@a-1",
            "params.yaml",
            "{arm: a}",
            "{arm: b}",
            "params.yaml: rounds.a-1",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "any@a-1",
            "params.yaml",
            "a-1: {arm: a}, ",
            "",
            "params.yaml: rounds.a-1",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "any@a-1",
            "params.yaml",
            "seed: 1",
            "seed: [",
            "params.yaml: must be YAML",
            marks=pytest.mark.long,
        ),
        ("any@a-1", "grpo/code/b.py", "1", "2", "grpo/code/b.py"),
        pytest.param(
            "any@a-1", "grpo/code/c.py", "", "2", "grpo/code/c.py", marks=pytest.mark.long
        ),
        pytest.param("any@a-1", "stages/any.py", "1", "2", "stages/any.py", marks=pytest.mark.long),
        pytest.param(
            "whole",
            "params.yaml",
            "reward: 1",
            "reward: 2",
            "params.yaml: reward",
            marks=pytest.mark.long,
        ),
        ("any@a-1", "params.yaml", "reward: 1", "reward: 2", None),  # of other stages
        pytest.param(
            "any@a-1",
            "params.yaml",
            "training: {rate: 1}",
            "training: {rate: 2}",
            None,
            marks=pytest.mark.long,
        ),
        ("any@a-1", "params.yaml", "1e-5", "0.00001", None),  # the same value
        pytest.param("any@a-1", "grpo/other.py", "1", "2", None, marks=pytest.mark.long),
        pytest.param("by hand", "params.yaml", "seed: 1", "seed: 2", None, marks=pytest.mark.long),
    ],
)
def test_a_stage_ends_if_what_dvc_would_record_changed_while_it_ran(
    tmp_path: Path, stage: str, file: str, old: str, new: str, named: str | None
):
    contents = {"dvc.yaml": PIPELINE, "params.yaml": PARAMS, "grpo/code/a.py": "1"}
    contents |= {"grpo/code/b.py": "1", "grpo/other.py": "1", "stages/any.py": "1"}
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    content = contents.get(file, "").replace(old, new) if old else new
    assert content != contents.get(file)
    edit = f"Path({file!r}).write_text({content!r})"
    ended = subprocess.run(
        [sys.executable, "-P", "-c", EDITS.format(edit=edit)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "DVC_STAGE": stage},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == (2 if named else 0), ended.stderr
    assert (tmp_path / ".runs" / f"{stage}.json").exists() == (named is None)
    assert ended.stderr.count("\n") == (1 if named else 0)
    assert ended.stderr.startswith(named or "")
