"""Ray without a cluster; with one, `tests/pipeline/test_executors.py`."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.pipeline.processes import until

ROOT = Path(__file__).parents[2]
HELD = """\
import sys
from grpo.runtime.executors.ray_cluster import connected

with connected(processors=1, gpus=0):
    print("connected", flush=True)
    sys.stdin.read()
"""
STAGE = """\
from grpo.runtime.executors.ray_cluster import connected
from stages.entry import run

def main(usage):
    with connected(processors=1, gpus=0):
        pass

run(main, stage="any")
"""


def test_nobody_at_the_clusters_address_is_one_line(tmp_path: Path):
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-c", STAGE],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": address},
            capture_output=True,
            text=True,
        )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith(f"RAY_ADDRESS {address}: no Ray cluster answers there, ")


@pytest.mark.long
@pytest.mark.parametrize("has_started", [True, False])
def test_no_process_of_a_local_cluster_outlives_a_killed_stage(tmp_path: Path, has_started: bool):
    """Killed when the cluster has started, or soon after its first processes have."""
    with subprocess.Popen(
        [sys.executable, "-c", HELD],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as stage:
        assert stage.stdout is not None
        process = psutil.Process(stage.pid)
        if has_started:
            assert stage.stdout.readline() == b"connected\n"
        else:
            until(lambda: len(process.children(recursive=True)) > 3)
            time.sleep(0.5)
        below = process.children(recursive=True)
        stage.kill()
    assert len(below) > 3
    _, alive = psutil.wait_procs(below, timeout=10)
    assert [each for each in alive if each.status() != psutil.STATUS_ZOMBIE] == []
