"""How stages run, whoever starts them."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
STAGE = """\
from stages.entry import run

def main(usage):
    pass

run(main, stage="any")
"""


def test_of_ranks_that_torchrun_has_started_the_first_says_what_it_used(tmp_path: Path):
    for rank, told in (("1", []), ("0", ["any.json"])):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": rank}
        subprocess.run([sys.executable, "-c", STAGE], cwd=tmp_path, env=environment, check=True)
        assert [each.name for each in tmp_path.glob(".runs/*")] == told
    locks = {each.name for each in (tmp_path / ".work").iterdir()}
    assert locks == {"any.rank-0.lock", "any.rank-1.lock"}
