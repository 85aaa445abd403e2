"""The command line as a user runs it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.workspaces import SHORT_ROLLOUTS
from grpo.params.yaml import dump_yaml, parse_yaml

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "unbuffered",
    [
        pytest.param("", id="as it ends", marks=pytest.mark.long),
        pytest.param("1", id="as it prints", marks=pytest.mark.long),
    ],
)
def test_a_reader_who_leaves_is_no_error(tmp_path: Path, unbuffered: str):
    """As in `python -m grpo lineage PATH | head`: no traceback, and the exit code of a shell."""
    content = parse_yaml(SHORT_ROLLOUTS.read_text())
    content["arms"]["uniform"]["objective"][0]["grpo"]["beta"] = 0.1  # the rules remark on it
    (tmp_path / "params.yaml").write_text(dump_yaml(content))
    with subprocess.Popen(
        [sys.executable, "-m", "grpo", "check"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 128 + signal.SIGPIPE
    assert "Traceback" not in said
    assert "BrokenPipeError" not in said
