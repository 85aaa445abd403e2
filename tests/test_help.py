"""`--help` of every command prints help, soon, and does nothing else."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(
    f"{folder}.{path.stem}"
    for folder in ("flows", "stages")
    for path in (ROOT / folder).glob("*.py")
    if 'if __name__ == "__main__":' in path.read_text()
)


def help_of(directory: Path, *words: str) -> str:
    """Returns what a command prints for --help in an empty directory, which stays empty."""
    done = subprocess.run(
        [sys.executable, "-m", *words, "--help"],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=30,  # about one second on a quiet machine
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert list(directory.iterdir()) == []  # a server would have written its log
    return done.stdout


@pytest.mark.long
def test_every_flow_and_stage_has_help(tmp_path: Path):
    assert {"flows.reproduce", "flows.ui", "flows.team", "stages.train"} <= set(MODULES)
    for module in MODULES:
        assert help_of(tmp_path, module).startswith("usage: "), module


def test_every_command_of_grpo_has_help(tmp_path: Path):
    commands = re.findall(r"^    ([a-z-]+) ", help_of(tmp_path, "grpo"), re.MULTILINE)
    assert {"summary", "rollouts", "diff", "dvc-deps"} <= set(commands)
    for command in commands:
        assert help_of(tmp_path, "grpo", command).startswith(f"usage: python -m grpo {command} ")
