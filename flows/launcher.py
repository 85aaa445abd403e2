"""Runs one command as a subreaper: no process that the command started outlives this process.

Started by path, without site-packages, as `launcher.py PARENT GRACE_SECONDS HOW COMMAND...`.
It stops the command on SIGTERM or SIGINT, or when PARENT dies, even by SIGKILL:

* HOW = `finish`: the command (dvc) may finish; only its child processes (the stage) are
  terminated. If the stage is already done, dvc still updates dvc.lock, so no work is lost.
* HOW = `stop`: the command and all its child processes are terminated.

Processes left after the grace period are killed. Exits with the command's code, or 128 + signal.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.05
WATCHED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT}


class Launcher:
    """One command and its descendant processes."""

    def __init__(
        self, become: Callable[[], NoReturn], *, may_finish: bool, grace_seconds: float
    ) -> None:
        """Starts the command.

        Args:
          become: Turns a forked process into the command.
        """
        self.may_finish = may_finish
        self.grace_seconds = grace_seconds
        self.deadline: float | None = None  # set when stopping
        self.terminated: set[int] = set()  # processes that got SIGTERM
        self.code: int | None = None
        self.child = os.fork()
        if self.child == 0:
            become()

    def wait(self) -> int:
        """Returns the command's exit code once no process is left."""
        while self._reap():
            # Also if the command exited by itself: no background process may remain.
            if self.deadline is None and (self.code is not None or self._is_asked()):
                self.deadline = time.monotonic() + self.grace_seconds
            if self.deadline is not None:
                self._stop(kill=time.monotonic() > self.deadline)
                time.sleep(POLL_SECONDS)
        assert self.code is not None
        return self.code

    def _is_asked(self) -> bool:
        """Waits for a signal; returns whether it requests a stop."""
        return signal.sigwait(WATCHED) != signal.SIGCHLD

    def _reap(self) -> bool:
        """Reaps ended processes; returns whether any process is left."""
        try:
            while True:
                process, status = os.waitpid(-1, os.WNOHANG)
                if process == 0:
                    return True
                if process == self.child:
                    code = os.waitstatus_to_exitcode(status)
                    self.code = code if code >= 0 else 128 - code
        except ChildProcessError:
            return False

    def _stop(self, *, kill: bool) -> None:
        """Sends SIGTERM once, or SIGKILL, to every process that must exit."""
        for process in descendants(os.getpid()):
            is_spared = process == self.child and self.may_finish
            if kill:
                _send(process, signal.SIGKILL)
            elif process not in self.terminated and not is_spared:
                self.terminated.add(process)
                _send(process, signal.SIGTERM)


def descendants(root: int) -> list[int]:
    """Returns the running descendants of `root`, including orphans, which a subreaper adopts."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # State and parent follow the name, which may contain any character.
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if state != "Z":
                children.setdefault(int(parent), []).append(int(entry.name))
    found = list(children.get(root, []))
    for process in found:
        found += children.get(process, [])
    return found


def _send(process: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def main() -> int:
    if sys.argv[1:] in (["-h"], ["--help"]):  # argparse would slow down the start of each stage
        print(f"usage: launcher.py PARENT GRACE_SECONDS finish|stop COMMAND...\n\n{__doc__}")
        return 0
    parent, grace_seconds, how, *command = sys.argv[1:]
    return launch(
        partial(_become, command),
        parent=int(parent),
        may_finish=how == "finish",
        grace_seconds=float(grace_seconds),
    )


def launch(
    become: Callable[[], NoReturn], *, parent: int, may_finish: bool, grace_seconds: float
) -> int:
    """Makes this process the launcher of a command; returns the exit code.

    Args:
      become: Turns a forked process into the command.
    """
    kernel = ctypes.CDLL(None)
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    kernel.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    kernel.prctl(PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != parent:  # the parent died before prctl
        return 128 + signal.SIGTERM
    return Launcher(become, may_finish=may_finish, grace_seconds=grace_seconds).wait()


def prepare_command() -> None:
    """Prepares a forked process for the command; it is terminated if the launcher dies."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _become(command: list[str]) -> NoReturn:
    try:
        prepare_command()
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
    finally:
        os._exit(127)


if __name__ == "__main__":
    sys.exit(main())
