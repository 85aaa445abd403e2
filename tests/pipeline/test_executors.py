"""Stages that sample in processes or on a Ray cluster write the bytes of a single process."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from grpo.errors import GrpoError
from grpo.runtime.executors.base import Job, Weights
from grpo.runtime.memory import MemoryFile
from tests.files import contents
from tests.pipeline.corruptions import set_param
from tests.pipeline.processes import run_stage, start_stage
from tests.pipeline.workspaces import copy_for_stages, locked_stages
from tests.runtime.test_processes import EXPECTED, squares
from tests.runtime.work import MAKE, marked, setup_of

pytestmark = pytest.mark.long

ROLLOUT = "rollout@uniform-1"
SCRATCH = f".work/{ROLLOUT}"


def listening(process: psutil.Process) -> set[str]:
    """Returns the addresses on which a process and those below it wait for connections."""
    found = set()
    for each in [process, *process.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            ports = [port for port in each.net_connections() if port.status == psutil.CONN_LISTEN]
            found |= {port.laddr.ip for port in ports}
    return found


@pytest.fixture(scope="module")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yields the executor's module, connected to a new cluster with two processors.

    After the tests, its processes and files are gone. It listens on the loopback interface only.
    """
    home = tmp_path_factory.mktemp("home")
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HOME", str(home))
            patch.delenv("RAY_ADDRESS", raising=False)
            from grpo.runtime.executors import ray_cluster

            before = set(psutil.Process().children(recursive=True))
            assert stack.enter_context(ray_cluster.connected(processors=2, gpus=0)) == 1
        started = set(psutil.Process().children(recursive=True)) - before
        yield ray_cluster
        assert listening(psutil.Process()) <= {"127.0.0.1", "::ffff:127.0.0.1"}
    assert [each for each in started if each.is_running()] == []
    assert list(ray_cluster.FOLDERS.glob(f".grpo-ray-*.{os.getpid()}.*")) == []
    assert list(home.iterdir()) == []


def test_jobs_on_ray_give_the_same_bytes_and_say_what_went_wrong(ray_cluster: Any, tmp_path: Path):
    """One job is killed with its worker, one is refused, and one has a bug."""
    pool = partial(
        ray_cluster.RayPool,
        MAKE,
        setup_of(tmp_path),
        workers=2,
        needs={"num_cpus": 1},
        environment={"PYTHONPATH": str(Path.cwd())},
    )
    with pool() as executor:
        assert squares(tmp_path, executor, {3: "dies-once"}) == EXPECTED
        first, second = marked(tmp_path / "dies-once")
        assert first != second
        assert executor.seconds() == {"load": 2.0}
        for version, is_offered in enumerate((False, True)):
            content = f"weights {version}".encode()
            file = MemoryFile(lambda file, content=content: file.write(content))
            paths = {socket.gethostname(): str(file.path)} if is_offered else {}
            executor.load_weights(Weights(version, file.path, paths))
            assert (executor.stored is None) == is_offered
            (out,) = executor.run([Job("weigh", {"what": ""}, tmp_path / f"weighed-{version}")])
            assert (out.out / "weights.txt").read_bytes() == content
            file.close()
    with pytest.raises(GrpoError, match=r"row 3:\nmust be scored"), pool() as executor:
        squares(tmp_path / "refused", executor, {0: "raises"})
    with pytest.raises(ZeroDivisionError, match="a bug"), pool() as executor:
        squares(tmp_path / "failed", executor, {0: "fails"})


def draw(workspace: Path, command: str, executor: str, environment: dict[str, str]) -> None:
    """Runs a stage to its end under an executor, "EXECUTOR WORKERS"."""
    set_executor(workspace, executor)
    done = run_stage(workspace, ROLLOUT, command, environment=environment)
    assert done.code == 0, done.stderr


def set_executor(workspace: Path, executor: str) -> None:
    kind, workers = executor.split()
    set_param("sampling", {"executor": kind, "workers": int(workers)})(workspace)


def kill_after_two_batches(workspace: Path, command: str) -> list[psutil.Process]:
    """Kills a stage, and returns what it had started."""
    stage = start_stage(workspace, ROLLOUT, command)
    while len(list(workspace.glob(f"{SCRATCH}/*/batch-*"))) < 2:
        assert stage.is_alive(), (workspace / "stderr.log").read_text()
        time.sleep(0.001)
    started = psutil.Process(stage.pid).children(recursive=True)
    stage.kill()
    stage.join()
    return started


def test_a_stage_killed_under_one_executor_goes_on_under_another_to_the_same_bytes(
    finished: Path, tmp_path: Path, ray_cluster: Any
):
    command = locked_stages(finished)[ROLLOUT]["cmd"]
    local, killed = (copy_for_stages(finished, tmp_path / name) for name in ("local", "killed"))
    for root in (local, killed):
        set_param("arms.uniform.sampling.rollouts_per_batch", 16)(root)  # eight batches
    draw(local, command, "local 1", {})
    set_executor(killed, "processes 2")
    workers = kill_after_two_batches(killed, command)
    assert len(workers) == 2
    assert psutil.wait_procs(workers, timeout=10)[1] == []
    assert list(killed.glob(f"{SCRATCH}/*/batch-*"))
    # The last one keeps Ray from looking for a loopback address on the machine's own.
    names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")
    known = {name: os.environ[name] for name in names}
    address = ray_cluster.ray.get_runtime_context().gcs_address
    draw(killed, command, "ray 1", {**known, "RAY_ADDRESS": address})
    rollouts = [contents(root / "artifacts" / "rollouts") for root in (local, killed)]
    assert rollouts[0] == rollouts[1] != contents(finished / "artifacts" / "rollouts")
    assert not (killed / SCRATCH).exists()
