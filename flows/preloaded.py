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

from grpo.modalities import MODALITIES
from grpo.params.recipes import read_content
from grpo.runtime.fork_client import ADDRESS, read_answer, send_request
from grpo.schema import PARAMS

LOG = Path(".work/logs/preloaded.log")
LONGEST_PATH = 60  # of the directory of the sockets; the kernel allows 107 characters with the name
STOP_SECONDS = 60.0
WAITING_REQUESTS = 64
POLL_SECONDS = 0.1
LATER_ROLLOUTS = "grpo.wiring.later_rollouts"
FIRST_USES = "grpo.runtime.first_uses"
# Stages that load a policy, and stages that judge; these import the libraries of judges.
USE_POLICIES = {f"stages.{each}" for each in ("base", "profile", "rollout", "train", "evaluate")}
JUDGING = {f"stages.{each}" for each in ("prepare", "profile", "score", "train", "evaluate")}
LIBRARIES = {"math": "math_verify", "reasoning_gym": "reasoning_gym"}
OF_POLICIES = ("policy", "bases")  # modules of a modality


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
            self.close()

    def close(self) -> None:
        """Closes the connection; a launcher that still runs then stops."""
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
        names = [*modules, *_late_modules(modules, workspace / PARAMS)]
        place = tempfile.gettempdir()
        self.directory = tempfile.mkdtemp(
            prefix="grpo-", dir=place if len(place) < LONGEST_PATH else "/tmp"
        )
        self.processes: list[subprocess.Popen[bytes]] = []
        self.controls: list[socket.socket] = []
        self.dvc, self.stages = f"{self.directory}/dvc", f"{self.directory}/stages"
        self._start("flows.dvc_server", self.dvc, [], environment)
        if modules:
            self._start("grpo.runtime.fork_server", self.stages, names, environment)

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
        if not stage.pid:
            stage.close()
            return None
        return stage

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

    def _start(
        self, module: str, path: str, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        log = self.workspace / LOG
        log.parent.mkdir(parents=True, exist_ok=True)
        control, its = socket.socketpair()
        # Created here, so that requests wait while the process imports.
        listener = socket.socket(socket.AF_UNIX)
        with listener, its, log.open("ab") as output:
            listener.bind(path)
            listener.listen(WAITING_REQUESTS)
            descriptors = [its.fileno(), listener.fileno()]
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", module, *map(str, descriptors), *arguments],
                    cwd=self.workspace,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=descriptors,
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


def _late_modules(modules: Sequence[str], file: Path) -> list[str]:
    """Returns what stages with the parameters of a file import when they need it."""
    late: list[str] = []
    match read_content(file) if file.exists() else {}:
        case {"policy": {"kind": str(kind)}, "reward": {"judges": [*judges]}}:
            if not JUDGING.isdisjoint(modules):
                names = [each["judge"] for each in judges if isinstance(each, dict)]
                late += [LIBRARIES[each] for each in names if each in LIBRARIES]
            if not USE_POLICIES.isdisjoint(modules):
                late.append(FIRST_USES)
                package = _package_of(kind)
                if "stages.train" in modules:
                    late.append(LATER_ROLLOUTS)
                if package:
                    late += [f"{package}.{each}" for each in OF_POLICIES]
    return late


def _package_of(kind: str) -> str:
    """Returns the package of a modality; empty if there is none for the kind."""
    found = MODALITIES.get(kind, "")
    # The name of its module, until something in this process has imported it.
    module = found.partition(":")[0] if isinstance(found, str) else type(found).__module__
    return module.rpartition(".")[0]
