"""Child processes that answer lines over a socket."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress

POLL_SECONDS = 1.0  # between checks that a silent process is still alive


class Process:
    """A child process `python -m MODULE FD ARGUMENTS...` that serves the socket FD."""

    def __init__(
        self, module: str, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> None:
        """Args:
        environment: Environment variables in addition to those of this process.
        """
        self._socket, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno()), *arguments],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            # The child finds the same modules as this process, e.g. a user's simulator.
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(sys.path),
                **(environment or {}),
            },
        )
        theirs.close()
        self._received = b""

    def send(self, line: str, timeout_seconds: float | None = None) -> None:
        """Sends a line; a failure to send shows when the answer is read.

        Args:
          timeout_seconds: Gives up after this time if the process does not read.
        """
        self._socket.settimeout(timeout_seconds)  # overrides the timeout of the last read
        with suppress(ConnectionError, TimeoutError):
            self._socket.sendall(line.encode() + b"\n")

    def read_line(self, timeout_seconds: float) -> str:
        """Returns the next line that the process writes.

        Raises:
          TimeoutError: If no line arrives in time.
          ConnectionError: If the process has exited.
        """
        deadline = time.monotonic() + timeout_seconds
        while b"\n" not in self._received:
            # The socket alone does not tell: a forked child may keep its other end open.
            has_ended = self._process.poll() is not None
            left = deadline - time.monotonic()
            self._socket.settimeout(max(min(left, POLL_SECONDS), 1e-3))
            try:
                part = self._socket.recv(1 << 16)
            except TimeoutError:
                if has_ended:
                    raise ConnectionResetError from None
                if left <= 0:
                    raise
                continue
            if not part:
                raise ConnectionResetError
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        return line.decode()

    def close_input(self) -> None:
        """Signals the end of input, after which the process exits by itself."""
        with suppress(OSError):  # the process has exited
            self._socket.shutdown(socket.SHUT_WR)

    def stop(self, grace_seconds: float = 0.0) -> int:
        """Stops the process and returns its exit code, -N for signal N.

        Args:
          grace_seconds: Time to exit by itself. The processor seconds of its children are
            counted only in that case.
        """
        if grace_seconds:
            self.close_input()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_seconds)
        self._process.kill()
        code = self._process.wait()
        self._socket.close()
        return code
