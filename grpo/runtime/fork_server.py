"""A preloaded process: imports modules once and runs each of them in forks of itself.

`python -m grpo.runtime.fork_server CONTROL LISTENER MODULE...` serves the socket LISTENER and
imports the modules while there is no request. It ends when the other side of the socket CONTROL is
closed; its forks end with it. It has no threads and no CUDA context, which would not survive a
fork. It refuses to run a module if the fork would differ from a fresh process: because of another
environment, or because a source file has changed since the start.
"""

import atexit
import gc
import importlib
import importlib.util
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

import psutil

from grpo.runtime import fork_client
from grpo.runtime.fork_client import ADDRESS, interpreter, receive_request
from grpo.runtime.process import become_subreaper, die_with_parent
from grpo.runtime.progress import CHANNEL

GRACE_SECONDS = 30.0  # between SIGTERM and SIGKILL, longer than that of flows
ANSWER_SECONDS = 5.0  # for a client to send its request
POLL_SECONDS = 0.2
STAGES = "stages"  # its modules read how their process was started, so forks import them again
# Variables that differ between stages and are not read by an import; CUDA reads its own later.
NOT_COMPARED = {
    *("PWD", "OLDPWD", "SHLVL", "_", "DVC_STAGE", "DVC_ROOT", "CUDA_VISIBLE_DEVICES"),
    *(ADDRESS, CHANNEL),
}
ARROW, NO_THREAD = "JE_ARROW_MALLOC_CONF", "background_thread:false"  # of Arrow's allocator
GPU_FILES = "/dev/nvidia"  # open in a process with a CUDA context

Request = dict[str, Any]


class ForkServer:
    """Forks a child for each request and reports how it ended.

    Args:
      listener: Socket on which clients connect.
      control: Socket whose end ends the server.
      run: Called in the child with the request, its descriptors and the client's connection.
      refuse: Returns why a request must not run in a fork, or None.
      lost: Signal for a child whose client has ended.
    """

    def __init__(
        self,
        listener: socket.socket,
        control: socket.socket,
        *,
        run: Callable[[Request, list[int], socket.socket], NoReturn],
        refuse: Callable[[Request], str | None],
        lost: signal.Signals,
    ) -> None:
        self.listener, self.control = listener, control
        self.run, self.refuse, self.lost = run, refuse, lost
        self.children: dict[int, socket.socket | None] = {}  # the client's connection, if it lives
        self.ended: set[int] = set()
        self.is_stopping = False
        self.deadline = float("inf")
        self.woken, self.waker = socket.socketpair()
        for each in (self.listener, self.woken, self.waker):
            each.setblocking(False)
        signal.set_wakeup_fd(self.waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop_soon)
        become_subreaper()  # so that it can end what a child leaves behind

    def serve(self, work: Iterable[None] = ()) -> None:
        """Serves until the control socket is closed and no child is left.

        Args:
          work: Steps to do while nobody asks.
        """
        steps, has_work = iter(work), True
        while self.children or not self.is_stopping:
            ready = self._ready(0.0 if has_work and not self.is_stopping else POLL_SECONDS)
            for each in ready:
                self._handle(each)
            self._reap()
            if self.deadline < time.monotonic():
                self._stop()
            if not ready and has_work and not self.is_stopping:
                has_work = next(steps, self) is None
        self._kill_adopted()

    def _ready(self, seconds: float) -> list[socket.socket]:
        sockets = [self.woken, *(each for each in self.children.values() if each)]
        if not self.is_stopping:
            sockets += [self.listener, self.control]
        ready: list[socket.socket] = select.select(sockets, [], [], seconds)[0]
        return ready

    def _handle(self, ready: socket.socket) -> None:
        if ready is self.listener:
            with suppress(OSError):  # the client has ended
                self._accept()
        elif ready is self.control:
            self.deadline = 0.0
        elif ready is self.woken:
            with suppress(BlockingIOError):
                ready.recv(1 << 12)
        else:
            self._pass_on(ready)

    def _accept(self) -> None:
        connection, _ = self.listener.accept()
        connection.settimeout(ANSWER_SECONDS)
        request, descriptors = receive_request(connection)
        reason = self.refuse(request)
        if reason is None:
            self._fork(request, descriptors, connection)
        else:
            print(f"{request['module']} in a fresh process: {reason}", file=sys.stderr, flush=True)
            _answer(connection, {"refused": reason})
        for each in descriptors:
            os.close(each)

    def _fork(self, request: Request, descriptors: list[int], connection: socket.socket) -> None:
        # A signal for the child must not be handled as one for the server.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        child = os.fork()
        if child == 0:
            try:
                self._leave()
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                self.run(request, descriptors, connection)
            except BaseException:  # noqa: BLE001
                traceback.print_exc()
            finally:
                os._exit(1)
        self.children[child] = connection
        self.ended.discard(child)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        _answer(connection, {"pid": child})

    def _leave(self) -> None:
        """Makes a forked child independent of the server's sockets and signals."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        others = [each for each in self.children.values() if each]
        for each in (self.listener, self.control, self.woken, self.waker, *others):
            each.close()

    def _pass_on(self, connection: socket.socket) -> None:
        """Sends a child the signals that its client got, or `lost` if the client has ended."""
        (child,) = [each for each, its in self.children.items() if its is connection]
        numbers = b""
        with suppress(OSError):
            numbers = connection.recv(64)
        for number in numbers or [self.lost]:
            _send(child, number)
        if not numbers:
            connection.close()
            self.children[child] = None

    def _reap(self) -> None:
        """Reports the children that have ended, and ends what they left behind."""
        has_reaped = False
        with suppress(ChildProcessError):
            while True:
                process, status = os.waitpid(-1, os.WNOHANG)
                if process == 0:
                    break
                has_reaped = True
                if process in self.children:
                    self.ended.add(process)
                connection = self.children.pop(process, None)
                if connection:
                    _answer(connection, {"status": status})
                    connection.close()
        if has_reaped:
            self._kill_adopted()

    def _kill_adopted(self) -> None:
        """Kills what was left behind by children that have ended.

        Each child has a session of its own. Processes of other sessions are killed once no child
        is left: they may belong to any.
        """
        for process in psutil.Process().children():
            with suppress(ProcessLookupError):
                is_left = not self.children or os.getsid(process.pid) in self.ended
                if process.pid not in self.children and is_left:
                    os.kill(process.pid, signal.SIGKILL)

    def _stop_soon(self, number: int, frame: object) -> None:
        self.deadline = 0.0

    def _stop(self) -> None:
        """Terminates the children; kills them if they were terminated before."""
        for child in self.children:
            _send(child, signal.SIGKILL if self.is_stopping else signal.SIGTERM)
        self.is_stopping = True
        self.deadline = time.monotonic() + GRACE_SECONDS


class Imports:
    """The modules that a preloaded process has imported, and whether they are still the same."""

    def __init__(self, names: Sequence[str]) -> None:
        self.pending = list(names)
        self.environment = _compared(os.environ)
        self.interpreter = interpreter()
        self.own = [Path(each) for each in _folders({"grpo", STAGES})]
        self.seen = self._files()
        self.others: dict[Path, tuple[int, ...] | None] = {}  # of modules that are not installed
        gc.disable()  # imports create many objects and no garbage

    def one_by_one(self) -> Iterator[None]:
        """Imports the pending modules."""
        while self.pending:
            self.load(self.pending[0])
            yield

    def load(self, name: str) -> None:
        """Imports a module; its objects are then left out of garbage collections."""
        if name in self.pending:
            self.pending.remove(name)
        before = dict(os.environ)
        os.environ.setdefault(ARROW, NO_THREAD)
        try:
            importlib.import_module(name)
        except BaseException:  # noqa: BLE001
            traceback.print_exc()  # the stage itself will fail in the same way
        for each, value in os.environ.items():
            if each != ARROW and value != before.get(each):
                set_by_imports[each] = value
        replace_environment(before)
        for path in map(Path, _sources()):
            if path not in self.others and not self._is_own(path):
                self.others[path] = _state(path)
        gc.freeze()

    def refuse(self, request: Request) -> str | None:
        """Returns why a module must run in a fresh process, or None."""
        own = {name: request[name] for name in self.interpreter}
        given = _compared(request["environment"])
        names = {
            name
            for name in {*given, *self.environment}
            if given.get(name) != self.environment.get(name)
        }
        if own != self.interpreter or names:
            differing = [name for name in own if own[name] != self.interpreter[name]]
            return f"{', '.join([*differing, *sorted(names)])}: differs from the preloaded process"
        self.load(request["module"])
        now = self._files()
        changed = [each for each in {*now, *self.seen} if now.get(each) != self.seen.get(each)]
        changed += [path for path, state in self.others.items() if _state(path) != state]
        if changed:
            return f"{min(changed)}: changed since the preloaded process started"
        return _unsafe_to_fork()

    def _files(self) -> dict[Path, tuple[int, ...] | None]:
        """Returns the states of the project's source files and of the directories of packages."""
        files = [file for folder in self.own for file in folder.rglob("*.py")]
        folders = [Path(each) for each in sys.path if each.startswith(sys.prefix)]
        return {each: _state(each) for each in [*files, *folders]}

    def _is_own(self, path: Path) -> bool:
        return any(path.is_relative_to(each) for each in self.own)


def run_module(request: Request, descriptors: list[int], connection: socket.socket) -> NoReturn:
    """Runs a module in this forked process as `python -m` does in a fresh one."""
    connection.close()
    die_with_parent(preloaded_process)
    os.setsid()
    for target, each in enumerate(descriptors):
        os.dup2(each, target)
        os.close(each)
    os.chdir(request["cwd"])
    os.umask(request["umask"])
    replace_environment({**request["environment"], **set_by_imports})
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    fork_client.client = request["client"]
    name = request["module"]
    sys.argv = ["-m", *request["arguments"]]
    sys.orig_argv = [sys.executable, "-m", name, *request["arguments"]]
    for module in list(sys.modules):
        if module.partition(".")[0] == STAGES or module == name:
            del sys.modules[module]
    sys.modules["__main__"] = ModuleType("__main__")
    end(lambda: runpy._run_module_as_main(name))  # type: ignore[attr-defined]


def replace_environment(environment: Mapping[str, str]) -> None:
    """Replaces the environment of this process."""
    os.environ.clear()
    os.environ.update(environment)


def end(main: Callable[[], object]) -> NoReturn:
    """Calls `main` and exits as the interpreter does when a script ends."""
    code: object = None
    number: int | None = None
    try:
        main()
    except SystemExit as error:
        code = error.code
    except BaseException as error:  # noqa: BLE001
        trace = _below(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code = 1
        if isinstance(error, KeyboardInterrupt):
            number = signal.SIGINT
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if number is not None:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit((code or 0) & 0xFF)


def serve(
    control: int,
    listener: int,
    run: Callable[[Request, list[int], socket.socket], NoReturn],
    refuse: Callable[[Request], str | None],
    *,
    lost: signal.Signals,
    work: Iterable[None] = (),
) -> None:
    """Serves requests on the socket `listener` until the socket `control` is closed."""
    global preloaded_process
    preloaded_process = os.getpid()
    requests, end_of_run = (socket.socket(fileno=each) for each in (listener, control))
    path = requests.getsockname()
    try:
        ForkServer(requests, end_of_run, run=run, refuse=refuse, lost=lost).serve(work)
    finally:
        requests.close()
        _remove_unused(Path(path).parent)


preloaded_process = 0  # the process id of this server, also in its forks
set_by_imports: dict[str, str] = {}  # variables of the environment


def _remove_unused(directory: Path) -> None:
    """Removes the sockets on which nobody listens, and their directory if none is left."""
    for path in directory.glob("*"):
        with socket.socket(socket.AF_UNIX) as line:
            try:
                line.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:  # removed meanwhile
                continue
    with suppress(OSError):  # the other preloaded process uses it
        directory.rmdir()


def _below(trace: TracebackType | None) -> TracebackType | None:
    """Returns a traceback without the frames of this file, which a fresh process does not have."""
    while trace and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _compared(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: each for name, each in environment.items() if name not in NOT_COMPARED}


def _folders(names: set[str]) -> Iterator[str]:
    """Yields the folders of packages."""
    for name in names:
        found = importlib.util.find_spec(name)
        yield from (found and found.submodule_search_locations) or []


def _sources() -> Iterator[str]:
    """Yields the source files of imported modules that are neither installed nor of Python."""
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and not file.startswith((sys.prefix, sys.base_prefix)):
            yield file


def _state(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


def _unsafe_to_fork() -> str | None:
    """Returns what this process has that would not survive a fork."""
    if _has_threads():
        child = os.fork()  # math libraries end their threads before a fork
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    if _has_threads():
        return "the preloaded process has threads"
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if os.readlink(each).startswith(GPU_FILES):
                return "the preloaded process has opened a GPU"
    return None


def _has_threads() -> bool:
    return len(os.listdir("/proc/self/task")) > 1


def _answer(connection: socket.socket, answer: dict[str, Any]) -> None:
    with suppress(OSError):  # the client has ended
        connection.sendall(json.dumps(answer).encode() + b"\n")


def _send(process: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, number)


def main() -> None:
    """Serves the modules of the command line."""
    control, listener, *names = sys.argv[1:]
    imports = Imports(names)
    serve(
        int(control),
        int(listener),
        run_module,
        imports.refuse,
        lost=signal.SIGKILL,
        work=imports.one_by_one(),
    )


if __name__ == "__main__":
    main()
