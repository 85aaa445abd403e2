"""Process handling: children that answer lines over a socket, Ctrl-C, frozen imports."""

import ctypes
import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial

EXIT_INTERRUPTED = 128 + signal.SIGINT  # as shells call it
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 1.0  # between checks that a silent process is still alive


def stop_at_once(text: str) -> None:
    """Makes Ctrl-C print `text` and exit without a traceback, until `raise_interrupts`."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, partial(_stop, text))


def raise_interrupts() -> None:
    """Undoes `stop_at_once`: from now on Ctrl-C raises KeyboardInterrupt."""
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, partial) and handler.func is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _stop(text: str, number: int, frame: object) -> None:
    print(text, file=sys.stderr, flush=True)
    os._exit(EXIT_INTERRUPTED)


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


@contextmanager
def freezing_imports() -> Iterator[None]:
    """Excludes the modules that the block imports from garbage collection.

    The block should only import: other objects that it creates would never be freed.
    """
    gc.disable()
    try:
        yield
    finally:
        freeze_imports()


def freeze_imports() -> None:
    """Excludes all existing objects from garbage collection, then enables collection.

    Model libraries create half a million permanent objects; scanning them repeatedly takes seconds.
    """
    gc.freeze()
    gc.enable()


def die_with_parent(parent: int) -> None:
    """Asks the kernel to terminate this process when the thread that started it ends.

    Args:
      parent: Process id of the parent, read before this call.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent died before the call
            sys.exit(1)


def become_subreaper() -> None:
    """Makes this process the parent of descendants whose own parents have ended."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
