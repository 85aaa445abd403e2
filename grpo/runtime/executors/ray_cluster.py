"""Workers as actors on a Ray cluster; needs the extra `ray` (pip install -e '.[ray]').

The cluster is the one at RAY_ADDRESS, or a local one on loopback that stops with the stage.
"""

import logging
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from grpo.errors import MissingExtraError, WorkerError, brief
from grpo.runtime.artifacts.files import temporary_beside
from grpo.runtime.executors import ray_guard
from grpo.runtime.executors.base import Weights
from grpo.runtime.executors.pool import Handle, Pool
from grpo.runtime.executors.worker import Worker
from grpo.schema import PARAMS

ADDRESS = os.environ.get("RAY_ADDRESS")
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # no telemetry
if ADDRESS is None:  # Ray reads these when it is imported
    os.environ |= {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # servers listen on loopback on every system
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # otherwise Ray writes one to the home directory
    }
try:
    import ray
except ImportError:
    raise MissingExtraError(
        f"{PARAMS}: sampling.executor ray needs ray; run pip install -e '.[ray]'"
    ) from None

FOLDERS = Path("/tmp")  # short: the names of Ray's sockets must fit into 104 bytes
PATIENCE_SECONDS = 10.0  # timeout for processes to exit and for addresses to accept a connection
STORE_BYTES = 80 * 2**20  # close to Ray's minimum; weights beyond it go to a file of Ray's
LOST = (
    ray.exceptions.LocalRayletDiedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.ObjectLostError,
    ray.exceptions.OutOfMemoryError,
    ray.exceptions.RayActorError,
    ray.exceptions.WorkerCrashedError,
)


@contextmanager
def connected(*, processors: int, gpus: int) -> Iterator[int]:
    """Connects to the cluster, or starts a local one; yields its number of hosts.

    Args:
      processors: Number of processors of a local cluster; `gpus` is its number of GPUs.

    Raises:
      WorkerError: If no cluster answers at RAY_ADDRESS, or no local cluster starts.
    """
    options: dict[str, Any] = {"logging_level": logging.WARNING, "log_to_driver": False}
    if ADDRESS is None:
        with _started(num_cpus=processors, num_gpus=gpus, **options):
            yield 1
        return
    with _refused(
        f"RAY_ADDRESS {ADDRESS}: no Ray cluster answers there", "start it or unset RAY_ADDRESS"
    ):
        _check_listening(ADDRESS)
        ray.init(ADDRESS, **options)
    try:
        yield len(_hosts())
    finally:
        ray.shutdown()


@contextmanager
def _refused(what: str, remedy: str) -> Iterator[None]:
    """Converts Ray's connection and start-up errors to WorkerError."""
    try:
        yield
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise WorkerError(f"{what}, {brief(error)}; {remedy}") from None


@contextmanager
def _started(**options: Any) -> Iterator[None]:
    """Starts a local cluster; removes its processes and files after the block."""
    with temporary_beside(FOLDERS / f"grpo-ray-{os.getuid()}") as folder, _guard() as has_started:
        before = set(psutil.Process().children())
        folder.mkdir(mode=0o700)
        servers: set[psutil.Process] = set()
        try:
            with _refused(
                "no Ray cluster starts here", "make room, or set sampling.executor to processes"
            ):
                try:
                    ray.init(
                        "local",
                        include_dashboard=False,
                        object_store_memory=STORE_BYTES,
                        _temp_dir=str(folder),
                        **options,
                    )
                finally:
                    servers = set(psutil.Process().children()) - before
            has_started()
            yield
        finally:
            processes = [*servers, *_descendants(servers)]
            ray.shutdown()
            _end(processes)


@contextmanager
def _guard() -> Iterator[Callable[[], None]]:
    """Kills what this process has started within the block, if it is killed.

    Yields:
      A function to call when the cluster has started all its processes.
    """
    with subprocess.Popen(
        [sys.executable, "-E", ray_guard.__file__, str(os.getpid())],
        stdin=subprocess.PIPE,
        start_new_session=True,  # a signal of the terminal ends the stage, and then the guard
    ) as guard:
        pipe = guard.stdin
        assert pipe is not None

        def has_started() -> None:
            pipe.write(b".")
            pipe.flush()

        try:
            yield has_started
        finally:
            guard.kill()


def _end(processes: list[psutil.Process]) -> None:
    """Waits for processes to exit and kills those that take too long."""
    late = psutil.wait_procs(processes, PATIENCE_SECONDS)[1]
    for process in late:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(late, PATIENCE_SECONDS)


def _check_listening(address: str) -> None:
    """Raises OSError if no server listens at "HOST:PORT"; Ray would retry for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), PATIENCE_SECONDS).close()


def _hosts() -> set[str]:
    """Returns the names of the cluster's hosts."""
    nodes: Any = ray.nodes  # untyped
    return {node["NodeManagerHostname"] for node in nodes() if node["Alive"]}


def _descendants(processes: set[psutil.Process]) -> Iterator[psutil.Process]:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            yield from process.children(recursive=True)


class RayPool(Pool):
    """Actors, spread over the hosts of a connected cluster; all must see this directory."""

    def __init__(
        self,
        make: str,
        setup: str,
        *,
        workers: int,
        needs: Mapping[str, int],
        environment: Mapping[str, str],
    ) -> None:
        """Args:
        make: What turns `setup` into a worker's `Work`, as "module:function".
        needs: What Ray is to keep free for each worker, by its own names: num_cpus, num_gpus.
        environment: What a worker has beside what its host gives it.
        """
        actor: Any = ray.remote(_Actor).options(
            **needs,
            max_restarts=0,
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": dict(environment)},
        )
        here = str(Path.cwd())

        def start_worker(slot: int) -> Handle:
            if not _hosts():
                raise WorkerError("Ray's last host is lost; rerun: finished batches are kept")
            return _ActorHandle(actor.remote(make, here), self)

        super().__init__(start_worker, workers=workers, setup=setup)
        self.stored: Any = None  # the current weights in the object store of the cluster

    def load_weights(self, weights: Weights) -> None:
        """Makes a worker load the weights with its next job.

        They go through Ray's object store only if a host has no rank that offers them.
        """
        is_offered = _hosts() <= weights.paths.keys()
        self.stored = None if is_offered else ray.put(np.fromfile(weights.path, np.uint8))
        super().load_weights(weights)


class _Actor:
    """A worker in one of Ray's processes."""

    def __init__(self, make: str, workspace: str) -> None:
        os.chdir(workspace)
        self._worker = Worker(make)

    def answer(self, line: str, weights: NDArray[np.uint8] | None) -> str:
        return self._worker.answer(line, None if weights is None else weights.data)


class _ActorHandle(Handle):
    lost = LOST

    def __init__(self, actor: Any, pool: RayPool) -> None:
        self._actor, self._pool = actor, pool

    def ask(self, line: str) -> Future[str]:
        """Sends a line and returns the future answer of the actor, which may still be pending."""
        answer: Future[str] = self._actor.answer.remote(line, self._pool.stored).future()
        return answer

    def close_input(self) -> None:
        """Does nothing: an actor has no children whose processor seconds the stage would count."""

    def stop(self, grace_seconds: float = 0.0) -> None:
        """Kills the actor's process."""
        ray.kill(self._actor)
