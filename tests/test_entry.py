"""How stages run, whoever starts them."""

import os
import subprocess
import sys
from pathlib import Path

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
    locks = {each.name for each in (tmp_path / ".work").iterdir()}
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
    """That would take a quarter of a short stage's time."""
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
