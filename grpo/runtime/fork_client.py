"""The client of a preloaded process: `python -m MODULE` lets it run the module in a fork.

The variable GRPO_PRELOADED names the socket of such a process (`grpo/runtime/fork_server.py`),
which has imported what the module imports. The client sends it the command line, the environment
and its standard streams, passes on signals, and ends as the fork ends. Without the variable, or if
the preloaded process refuses, the client imports and runs the module itself.
"""

import array
import json
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from typing import Any, NoReturn

from grpo.runtime.process import die_with_parent

ADDRESS = "GRPO_PRELOADED"  # path of the socket
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
SIZE = struct.Struct("!I")
MAX_DESCRIPTORS = 64

client: int | None = None  # set in a fork: the process that it runs for


def main_process() -> int:
    """Returns the process that was started to do this process's work: its client, or itself."""
    return client or os.getpid()


def run_in_preloaded(parent: int) -> None:
    """Runs this `python -m MODULE` in a preloaded process and exits as the module does.

    Returns if there is no preloaded process, or if it refuses: the caller then runs the module.

    Args:
      parent: Process whose death ends this one.
    """
    path = os.environ.get(ADDRESS)
    if client is not None or not path or sys.orig_argv[1:2] != ["-m"]:
        return
    with closing(socket.socket(socket.AF_UNIX)) as line:
        try:
            line.connect(path)
            die_with_parent(parent)
            send_request(line, _request(), (0, 1, 2))
            answers = line.makefile("rb")
            if "pid" not in read_answer(answers):
                return
        except OSError:  # the preloaded process has ended
            return
        for number in PASSED_ON:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, _: _pass_on(line, number))
        status = read_answer(answers).get("status")
    # Without a status, somebody has killed the preloaded process, and with it the fork.
    _end_like(-signal.SIGTERM if status is None else os.waitstatus_to_exitcode(status))


def send_request(line: socket.socket, request: dict[str, Any], descriptors: Sequence[int]) -> None:
    """Sends a request and open files."""
    content = json.dumps(request).encode()
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
    line.sendmsg([SIZE.pack(len(content))], [rights])
    line.sendall(content)


def receive_request(line: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Returns a request and the open files that were sent with it.

    Raises:
      OSError: If the other side has ended.
    """
    start, descriptors, _, _ = socket.recv_fds(line, SIZE.size, MAX_DESCRIPTORS)
    try:
        content = bytearray()
        (size,) = SIZE.unpack(start) if len(start) == SIZE.size else (1,)
        while len(content) < size:
            part = line.recv(size - len(content))
            if not part:
                raise ConnectionResetError
            content += part
        return json.loads(content), descriptors
    except (OSError, ValueError) as error:
        for each in descriptors:
            os.close(each)
        raise OSError(str(error)) from None


def read_answer(answers: Any) -> dict[str, Any]:
    """Returns the next answer of a preloaded process, or {} if it has ended."""
    try:
        content = answers.readline()
    except OSError:
        return {}
    return dict(json.loads(content)) if content.endswith(b"\n") else {}


def _request() -> dict[str, Any]:
    return {
        "module": sys.orig_argv[2],
        "arguments": sys.argv[1:],
        "client": os.getpid(),
        "environment": dict(os.environ),
        "ignored": [each for each in PASSED_ON if signal.getsignal(each) is signal.SIG_IGN],
        "umask": _umask(),
        **interpreter(),
    }


def interpreter() -> dict[str, Any]:
    """Returns what must be the same in a preloaded process, apart from the environment."""
    return {
        "cwd": os.getcwd(),
        "prefix": sys.prefix,
        "version": sys.version,
        "flags": list(sys.flags),
        "options": [sys.warnoptions, sorted(sys._xoptions)],
        "path": list(dict.fromkeys(sys.path)),
        "cores": sorted(os.sched_getaffinity(0)),
        "files": list(resource.getrlimit(resource.RLIMIT_NOFILE)),
    }


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _pass_on(line: socket.socket, number: int) -> None:
    with suppress(OSError):  # the fork has ended
        line.send(bytes([number]))


def _end_like(code: int) -> NoReturn:
    """Ends this process with an exit code, or by signal -code."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the fork has written its own
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)
