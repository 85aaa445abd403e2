"""The preloaded processes of a run: one forks `dvc repro`, the other the stages.

Both have imported what they run, which takes longer than most stages. A run starts them and ends
them: code that changes between two runs is never used in the second.
"""

import math
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from grpo.runtime.preloaded import ADDRESS, read_answer, send_request

LOG = Path(".work/logs/preloaded.log")
LONGEST_PATH = 60  # of the directory of the sockets; the kernel allows 107 characters with the name
STOP_SECONDS = 60.0
POLL_SECONDS = 0.1
# Modules that the stages' own would import at first use.
LATE_MODULES = (
    "pyarrow.parquet",
    "torch.utils.flop_counter",
    "transformers.conversion_mapping",
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
)


class ForkedStage:
    """A launcher with `dvc repro` below it, forked for one stage; used like a `Popen`."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.answers = connection.makefile("rb")
        self.pid = int(read_answer(self.answers).get("pid", 0))
        self.returncode: int | None = None
        self.guard = threading.Lock()  # one thread follows a stage, another stops it

    def poll(self) -> int | None:
        """Returns the exit code, or None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the exit code.

        Raises:
          TimeoutExpired: If it runs on.
        """
        deadline = time.monotonic() + (math.inf if timeout is None else timeout)
        while self.returncode is None:
            left = deadline - time.monotonic()
            with self.guard:
                self._read_status(max(0.0, min(left, POLL_SECONDS)))
            if self.returncode is None and left <= 0:
                raise subprocess.TimeoutExpired("dvc", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal if it still runs."""
        with suppress(OSError):
            self.connection.send(bytes([number]))

    def _read_status(self, timeout: float) -> None:
        if self.returncode is None and select.select([self.connection], [], [], timeout)[0]:
            # Without a status, somebody has killed the process that forks.
            status = read_answer(self.answers).get("status", signal.SIGTERM)
            self.returncode = os.waitstatus_to_exitcode(status)
            self.answers.close()
            self.connection.close()


class Preloaded:
    """The two processes of a run.

    Args:
      environment: Environment of stages.
      modules: Modules of the stages that will run; without any, only DVC is imported.
    """

    def __init__(
        self, workspace: Path, environment: Mapping[str, str], modules: Sequence[str]
    ) -> None:
        self.workspace = workspace
        place = tempfile.gettempdir()
        self.directory = tempfile.mkdtemp(
            prefix="grpo-", dir=place if len(place) < LONGEST_PATH else "/tmp"
        )
        self.processes: list[subprocess.Popen[bytes]] = []
        self.controls: list[socket.socket] = []
        self.dvc, self.stages = f"{self.directory}/dvc", f"{self.directory}/stages"
        self._start("flows.dvc_server", [self.dvc], environment)
        if modules:
            names = [*modules, *LATE_MODULES]
            self._start("grpo.runtime.fork_server", [self.stages, *names], environment)

    def start(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: int,
        held: Sequence[int],
        grace_seconds: float,
    ) -> ForkedStage | None:
        """Starts `dvc ARGUMENTS...` below a launcher; None if the preloaded process has ended.

        Args:
          log: Descriptor of the file for the output.
          held: Descriptors that stay open until all processes of the stage have ended.
        """
        request: dict[str, Any] = {
            "module": "dvc",
            "arguments": list(arguments),
            "cwd": str(self.workspace),
            "environment": {**environment, ADDRESS: self.stages},
            "grace_seconds": grace_seconds,
        }
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(self.dvc)
            send_request(connection, request, [log, *held])
            stage = ForkedStage(connection)
        except OSError:
            connection.close()
            return None
        return stage if stage.pid else None

    def close(self) -> None:
        """Ends both processes and all that they have forked."""
        for each in self.controls:
            each.close()
        for process in self.processes:
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _start(self, module: str, arguments: list[str], environment: Mapping[str, str]) -> None:
        log = self.workspace / LOG
        log.parent.mkdir(parents=True, exist_ok=True)
        control, its = socket.socketpair()
        with log.open("ab") as output, its:
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", module, str(its.fileno()), *arguments],
                    cwd=self.workspace,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[its.fileno()],
                    start_new_session=True,
                )
            )
        self.controls.append(control)


_running: dict[Path, Preloaded] = {}


@contextmanager
def preloaded(
    workspace: Path, environment: Mapping[str, str], modules: Sequence[str]
) -> Iterator[Preloaded]:
    """Yields the preloaded processes of a workspace; starts and ends them if there are none."""
    if workspace in _running:
        yield _running[workspace]
        return
    processes = _running[workspace] = Preloaded(workspace, environment, modules)
    try:
        yield processes
    finally:
        del _running[workspace]
        processes.close()
