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
