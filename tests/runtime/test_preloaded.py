"""A module run in a fork of a preloaded process behaves like one in a fresh process."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from flows.preloaded import Preloaded
from grpo.runtime.fork_client import ADDRESS
from tests.pipeline.processes import is_alive, until

ROOT = Path(__file__).parents[2]
OTHERS = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
MODULE = "stages.small"
# Notes whether it runs in a fork, then does what it is told.
SMALL = '''\
"""A small stage."""

import atexit
import os
import signal
import sys
import threading
import time
from pathlib import Path

import stages
from grpo.runtime import fork_client
from grpo.runtime.artifacts.usage import measured

WORD = "first"
os.environ["SET_BY_IMPORT"] = "yes"


def told() -> object:
    match sys.argv[1]:
        case "say":
            print(WORD, sys.argv[2:], Path.cwd(), os.environ.get("DVC_STAGE"), stages.PARENT > 1)
            print(__name__, sys.argv[0], sys.orig_argv[1:], sys.path, file=sys.stderr)
            print(oct(os.umask(0)), sorted(set(os.environ) - {"GRPO_PRELOADED"}))
            print(signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGPIPE))
            print(signal.pthread_sigmask(signal.SIG_BLOCK, []), os.isatty(1), sys.stdin.read())
        case "exit":
            sys.exit(int(sys.argv[2]))
        case "explain":
            sys.exit("a reason")
        case "fail":
            raise ValueError("a bug")
        case "at the end":
            atexit.register(print, "at exit")
            threading.Thread(target=lambda: (time.sleep(0.2), print("in a thread"))).start()
        case "interrupt":
            raise KeyboardInterrupt
        case "die":
            os.kill(os.getpid(), int(sys.argv[2]))
            time.sleep(60)
        case "measure":
            time.sleep(0.2)
            with measured("small") as usage:
                own = time.process_time()
            print(usage.seconds_by_part["start"], usage.seconds, usage.cpu_seconds, own)
        case "hash":
            print(hash("text"))
        case "leave":
            if os.fork() == 0:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                os.dup2(1, 2)
                Path("left").write_text(str(os.getpid()))
                time.sleep(60)
                os._exit(0)
            while not Path("left").exists():
                time.sleep(0.01)
        case "wait":
            Path("process").write_text(f"{os.getpid()}\\n")
            time.sleep(60)


if __name__ == "__main__":
    Path("is_forked").write_text(str(fork_client.client is not None))
    told()
'''


@pytest.fixture(autouse=True, scope="module")
def _hangups_end_processes() -> Iterator[None]:
    """As in a terminal; under nohup, processes inherit that they are ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workspace = tmp_path_factory.mktemp("preloaded")
    (workspace / "stages").mkdir()
    shutil.copyfile(ROOT / "stages/__init__.py", workspace / "stages/__init__.py")
    (workspace / "stages/small.py").write_text(SMALL)
    return workspace


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    kept = {each: os.environ[each] for each in ("HOME", "LANG", "TMPDIR") if each in os.environ}
    return {**kept, **OTHERS, "PATH": path, "PYTHONPATH": str(ROOT)}


@contextmanager
def opened(workspace: Path) -> Iterator[Preloaded]:
    processes = Preloaded(workspace, environment(), [MODULE])
    try:
        yield processes
    finally:
        processes.close()


@pytest.fixture(scope="module")
def shared(workspace: Path) -> Iterator[Preloaded]:
    with opened(workspace) as processes:
        yield processes


def start(
    workspace: Path, arguments: Sequence[str], socket: str | None, **more: str
) -> "subprocess.Popen[str]":
    """Starts the module as DVC does, or in a fork if there is a socket."""
    given = {ADDRESS: socket} if socket else {}
    return subprocess.Popen(
        ["python", "-m", MODULE, *arguments],
        cwd=workspace,
        env={**environment(), "DVC_STAGE": "small", **given, **more},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ran(
    workspace: Path, arguments: Sequence[str], socket: str | None, **more: str
) -> tuple[int, str, str]:
    """Returns exit code and output."""
    process = start(workspace, arguments, socket, **more)
    said = process.communicate(timeout=60)
    return process.returncode, *said


def is_forked(workspace: Path) -> bool:
    return (workspace / "is_forked").read_text() == "True"


@pytest.mark.parametrize(
    "arguments",
    [
        ["say", "a b", ""],
        ["exit", "3"],
        *(pytest.param(["exit", code], marks=pytest.mark.long) for code in ("0", "300")),
        ["explain"],
        ["fail"],
        ["at the end"],
        ["interrupt"],
        ["die", str(int(signal.SIGKILL))],
        *(
            pytest.param(["die", str(int(number))], marks=pytest.mark.long)
            for number in (signal.SIGTERM, signal.SIGHUP)
        ),
    ],
    ids="-".join,
)
def test_exit_code_and_output_are_those_of_a_fresh_process(
    workspace: Path, shared: Preloaded, arguments: list[str]
) -> None:
    fresh = ran(workspace, arguments, None)
    assert not is_forked(workspace)
    assert ran(workspace, arguments, shared.stages) == fresh
    assert is_forked(workspace)


@pytest.mark.parametrize(
    "number",
    [
        *(signal.SIGTERM, signal.SIGKILL),
        *(
            pytest.param(each, marks=pytest.mark.long)
            for each in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
        ),
    ],
)
def test_a_signal_ends_it_as_a_fresh_process(
    workspace: Path, shared: Preloaded, number: signal.Signals
) -> None:
    ends = []
    for socket in (None, shared.stages):
        process = start(workspace, ["wait"], socket)
        working = int(noted(workspace))
        assert (working != process.pid) == bool(socket)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
        until(lambda working=working: not is_alive(working))
        ends.append((process.returncode, said))
    assert ends[0] == ends[1]


def noted(workspace: Path) -> str:
    """Returns what a waiting module has written, once."""
    file = workspace / "process"
    until(lambda: file.exists() and file.read_text().endswith("\n"))
    content = file.read_text()
    file.unlink()
    return content


def test_a_killed_fork_kills_its_client(workspace: Path, shared: Preloaded) -> None:
    process = start(workspace, ["wait"], shared.stages)
    os.kill(int(noted(workspace)), signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
    process.communicate()


def test_the_end_of_what_started_the_client_ends_the_fork(
    workspace: Path, shared: Preloaded
) -> None:
    code = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen(['python', '-m', '{MODULE}', 'wait']); time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=workspace,
        env={**environment(), ADDRESS: shared.stages},
    )
    working = int(noted(workspace))
    parent.kill()
    parent.wait()
    until(lambda: not is_alive(working))


def test_what_a_module_leaves_behind_ends(workspace: Path, shared: Preloaded) -> None:
    assert ran(workspace, ["leave"], shared.stages)[0] == 0
    left = int((workspace / "left").read_text())
    until(lambda: not is_alive(left))


@pytest.mark.parametrize(
    "more",
    [
        {"PYTHONHASHSEED": "7"},
        {"PYTHONPATH": f"{ROOT}{os.pathsep}/other"},
        *(
            pytest.param(more, marks=pytest.mark.long)
            for more in ({"OMP_NUM_THREADS": "2"}, {"PYTHONWARNINGS": "error"}, {"ANY": "thing"})
        ),
    ],
    ids=lambda more: next(iter(more)),
)
def test_another_environment_gets_a_fresh_process(
    workspace: Path, shared: Preloaded, more: dict[str, str]
) -> None:
    """An import may have read it."""
    code, _, said = ran(workspace, ["hash"], shared.stages, **more)
    assert (code, said, is_forked(workspace)) == (0, "", False)


def test_an_interpreter_with_options_gets_a_fresh_process(
    workspace: Path, shared: Preloaded
) -> None:
    command = ["python", "-X", "dev", "-m", MODULE, "exit", "0"]
    given = {**environment(), ADDRESS: shared.stages}
    subprocess.run(command, cwd=workspace, env=given, check=True, capture_output=True)
    assert not is_forked(workspace)


@pytest.mark.parametrize("change", ["content", "new file"])
def test_changed_code_is_seen(tmp_path: Path, workspace: Path, change: str) -> None:
    copy = Path(shutil.copytree(workspace, tmp_path / "copy"))
    with opened(copy) as processes:
        assert ran(copy, ["say"], processes.stages)[1].startswith("first")
        assert is_forked(copy)
        if change == "content":
            (copy / "stages/small.py").write_text(SMALL.replace("first", "other"))
        else:
            (copy / "stages/more.py").write_text("")
        word = "other" if change == "content" else "first"
        assert ran(copy, ["say"], processes.stages)[1].startswith(word)
        assert not is_forked(copy)


def test_without_the_preloaded_process_the_module_still_runs(
    tmp_path: Path, workspace: Path
) -> None:
    copy = Path(shutil.copytree(workspace, tmp_path / "copy"))
    with opened(copy) as processes:
        for each in processes.processes:
            each.kill()
            each.wait()
        assert ran(copy, ["exit", "3"], processes.stages) == (3, "", "")
        assert not is_forked(copy)
    assert ran(copy, ["exit", "3"], processes.stages) == (3, "", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_the_preloaded_process_ends_fork_and_client(
    tmp_path: Path, workspace: Path, number: signal.Signals
) -> None:
    copy = Path(shutil.copytree(workspace, tmp_path / "copy"))
    with opened(copy) as processes:
        process = start(copy, ["wait"], processes.stages)
        working = int(noted(copy))
        processes.processes[1].send_signal(number)
        assert process.wait(60) == -signal.SIGTERM
        process.communicate()
        until(lambda: not is_alive(working))


@pytest.mark.parametrize("is_server_killed", [False, True])
def test_the_end_of_the_run_ends_everything(
    tmp_path: Path, workspace: Path, is_server_killed: bool
) -> None:
    """Also if it was killed: then the kernel closes its sockets."""
    copy = Path(shutil.copytree(workspace, tmp_path / "copy"))
    code = (
        "import os, time; from pathlib import Path; from flows.preloaded import Preloaded\n"
        f"p = Preloaded(Path.cwd(), dict(os.environ), ['{MODULE}'])\n"
        "Path('socket').write_text(f'{p.stages}\\n'); time.sleep(60)"
    )
    run = subprocess.Popen([sys.executable, "-c", code], cwd=copy, env=environment())
    until(lambda: (copy / "socket").exists() and (copy / "socket").read_text().endswith("\n"))
    socket = (copy / "socket").read_text().strip()
    process = start(copy, ["wait"], socket)
    below = [each.pid for each in psutil.Process(run.pid).children(recursive=True)]
    working = int(noted(copy))
    assert len(below) >= 2
    if is_server_killed:
        os.kill(psutil.Process(working).ppid(), signal.SIGKILL)
    run.kill()
    run.wait()
    assert process.wait(60) == -signal.SIGTERM
    process.communicate()
    until(lambda: not any(map(is_alive, [*below, working])))
    until(lambda: not Path(socket).parent.exists())


def test_only_its_owner_can_reach_it(shared: Preloaded) -> None:
    assert os.stat(shared.directory).st_mode & 0o777 == 0o700


def test_its_usage_includes_that_of_the_client(workspace: Path, shared: Preloaded) -> None:
    """Its start is that of the process that DVC started, in seconds by any clock."""
    before = time.monotonic()
    process = start(workspace, ["measure"], shared.stages)
    said, _ = process.communicate(timeout=60)
    elapsed = time.monotonic() - before
    started, seconds, cpu, own = map(float, said.split())
    assert is_forked(workspace)
    assert 0.2 < started < seconds < elapsed + 0.01  # the kernel counts in hundredths
    assert own < cpu < elapsed
