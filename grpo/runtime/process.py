"""Processes of this machine: children that answer lines over a socket, interrupts, imports."""

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
POLL_SECONDS = 1.0  # between looks at whether a silent process is still there


def stop_at_once(text: str) -> None:
    """Makes Ctrl-C one line, without a traceback, until `raise_interrupts`; nothing is lost yet."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, partial(_stop, text))


def raise_interrupts() -> None:
    """Ends `stop_at_once`: from here on Ctrl-C is a KeyboardInterrupt."""
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, partial) and handler.func is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _stop(text: str, number: int, frame: object) -> None:
    print(text, file=sys.stderr, flush=True)
    os._exit(EXIT_INTERRUPTED)


class Process:
    """`python -m MODULE FD ARGUMENTS...`; the module serves the socket FD until it closes."""

    def __init__(
        self, module: str, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> None:
        """Args:
        environment: What the process has beside this one's.
        """
        self._socket, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno()), *arguments],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            # It finds what this process would find: a simulator may be anyone's.
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
        """Sends a line; what became of it shows when an answer is read.

        Args:
          timeout_seconds: After which a process that reads nothing is given up.
        """
        self._socket.settimeout(timeout_seconds)  # not what the last answer was given
        with suppress(ConnectionError, TimeoutError):
            self._socket.sendall(line.encode() + b"\n")

    def read_line(self, timeout_seconds: float) -> str:
        """Returns the next line of the process.

        Raises:
          TimeoutError: If it does not come in time.
          ConnectionError: If the process has died.
        """
        deadline = time.monotonic() + timeout_seconds
        while b"\n" not in self._received:
            # Looked at, too: a process that it forked may hold its end of the socket open.
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
        """Says that no more lines will be sent, after which the process ends by itself."""
        with suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_WR)

    def stop(self, grace_seconds: float = 0.0) -> int:
        """Ends the process and returns its exit code; -N: by signal N.

        Args:
          grace_seconds: In which it may end by itself: of what it had started, the processor
            seconds are counted only then.
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
    """Leaves what the block imports out of garbage collection; it should do nothing else.

    What else it leaves behind would never be freed.
    """
    gc.disable()
    try:
        yield
    finally:
        freeze_imports()


def freeze_imports() -> None:
    """Leaves what is there out of garbage collection, and enables it for what follows.

    Models' packages make half a million objects that stay: to look at them again and again takes
    seconds.
    """
    gc.freeze()
    gc.enable()


def die_with_parent(parent: int) -> None:
    """Asks the kernel to end this process when the thread that started it ends.

    Args:
      parent: The process of that thread, read before this call.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the call
            sys.exit(1)
