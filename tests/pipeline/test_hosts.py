"""Hosts that share no directory: each is a directory of its own, with what it has pulled."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flows.server import free_port
from tests.files import contents
from tests.pipeline.corruptions import set_param
from tests.pipeline.processes import run_stage
from tests.pipeline.test_iterations import NAME, command_of, online
from tests.pipeline.workspaces import copy_for_stages, environment

pytestmark = pytest.mark.long
STAGE = f"train@{NAME}"
OUTS = (f"artifacts/policies/{NAME}", f"artifacts/training/{NAME}")
SECONDS = 240.0


@pytest.fixture
def divided(finished: Path, tmp_path: Path) -> Path:
    """Returns a workspace whose next stage trains four iterations in two ranks."""
    workspace = online(finished, tmp_path / "one", updates_per_iteration=2, ranks=2)
    for out in OUTS:
        shutil.rmtree(workspace / out)
    return workspace


@contextmanager
def torchrun(
    hosts: list[Path], command: str, *, stage: str = STAGE
) -> Iterator[list[subprocess.Popen[str]]]:
    """Starts one rank on every host; no process of them is left after the block."""
    _, _, module, *paths = command.split()
    port, processes = str(free_port()), []
    for rank, host in enumerate(hosts):
        distributed = ["-m", "torch.distributed.run", "--nnodes", str(len(hosts))]
        distributed += ["--node-rank", str(rank), "--nproc-per-node", "1"]
        distributed += ["--master-addr", "127.0.0.1", "--master-port", port]
        with (host.parent / f"{host.name}.log").open("a") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, *distributed, "-m", module, *paths],
                    cwd=host,
                    env={
                        **environment(),
                        "DVC_STAGE": stage,
                        "GLOO_SOCKET_IFNAME": "lo",
                        "PYTHONPATH": str(host),
                    },
                    stdout=log,
                    stderr=log,
                    text=True,
                    start_new_session=True,
                )
            )
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def said(hosts: list[Path]) -> str:
    return "".join((host.parent / f"{host.name}.log").read_text() for host in hosts)


def test_ranks_without_a_shared_directory_give_the_bytes_of_one_host(divided: Path, tmp_path: Path):
    """They are killed after a checkpoint that only the first has, and go on from it."""
    command = command_of(divided, "train")
    hosts = [copy_for_stages(divided, tmp_path / f"host-{n}") for n in range(2)]
    done = run_stage(divided, STAGE, command, timeout_seconds=SECONDS)
    assert done.code == 0, done.stderr
    checkpoints = f".work/{STAGE}/*/checkpoint-*"
    with torchrun(hosts, command) as processes:
        while not [*hosts[0].glob(checkpoints)]:
            assert all(each.poll() is None for each in processes), said(hosts)
            time.sleep(0.01)
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)
    time.sleep(0.5)
    assert not [*hosts[1].glob(checkpoints)]
    assert not (hosts[0] / OUTS[0]).exists()
    with torchrun(hosts, command) as processes:
        codes = [each.wait(SECONDS) for each in processes]
    assert codes == [0, 0], said(hosts)
    for out in OUTS:
        assert contents(hosts[0] / out) == contents(divided / out)
        assert not (hosts[1] / out).exists()
    for host in hosts:
        assert not (host / ".work" / STAGE).exists()
        assert not [*(host / ".work").glob("*.first-rank-*")]


def test_hosts_of_other_parameters_are_refused(divided: Path, tmp_path: Path):
    command = command_of(divided, "train")
    hosts = [copy_for_stages(divided, tmp_path / f"host-{n}") for n in range(2)]
    set_param("arms.uniform.training.learning_rate", 0.25)(hosts[1])
    with torchrun(hosts, command) as processes:
        codes = [each.wait(SECONDS) for each in processes]
    assert all(codes)
    assert "start all of them with the same commit and inputs" in said(hosts)
