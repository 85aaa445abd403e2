"""Work that squares numbers and tells its environment, and jobs of it, that may fail or die."""

import atexit
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from grpo.errors import ArtifactError
from grpo.runtime.executors.base import Job, Work
from grpo.runtime.executors.processes import ProcessPool

MAKE = "tests.runtime.work:make"
DEADLINE_SECONDS = 60.0


def setup_of(folder: Path, what: str = "") -> str:
    return json.dumps({"marks": str(folder), "what": what})


def pool(folder: Path, *, workers: int = 2, what: str = "") -> ProcessPool:
    return ProcessPool(MAKE, setup_of(folder, what), [{}] * workers)


def jobs_of(folder: Path, what: dict[int, str] | None = None) -> list[Job]:
    """Returns six jobs, some of which misbehave."""
    return [
        Job("square", {"number": n, "what": (what or {}).get(n, "")}, folder / "out" / f"job-{n}")
        for n in range(6)
    ]


def make(line: str) -> Work:
    """Returns the work; the setup names a folder of marks, and what happens at the start."""
    setup = json.loads(line)
    marks = Path(setup["marks"])

    def square(order: dict[str, Any], out: Path) -> None:
        (out / "half.txt").write_text("of what is to be there")
        misbehave(order.get("what", ""), marks)
        (out / "square.txt").write_text(str(order["number"] ** 2))

    def tell(order: dict[str, Any], out: Path) -> None:
        misbehave(order["what"], marks)
        (out / "told.txt").write_text(os.environ[order["name"]])

    weights = ["first"]

    def load_weights(path: Path) -> None:
        weights[0] = path.read_text()

    def weigh(order: dict[str, Any], out: Path) -> None:
        misbehave(order["what"], marks)
        (out / "weights.txt").write_text(weights[0])

    def sleep() -> None:
        leave_mark(marks / "slept")

    misbehave(setup.get("what", ""), marks)
    skills = {"square": square, "tell": tell, "weigh": weigh}
    return Work(skills, lambda: {"load": 2.0}, load_weights, sleep)


def misbehave(what: str, marks: Path) -> None:
    """Does what is said, of which there is a mark: the numbers of the processes that were told."""
    what, _, other = what.partition(" ")
    is_first = not (marks / what).exists()
    if what:
        leave_mark(marks / what)
    match what:
        case "waits":  # for what another job writes
            deadline = time.monotonic() + DEADLINE_SECONDS
            while not Path(other).exists() and time.monotonic() < deadline:
                time.sleep(0.01)
        case "ends-in-order":
            atexit.register(leave_mark, marks / "ended")
        case "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        case "dies-once" if is_first:
            os.kill(os.getpid(), signal.SIGKILL)
        case "leaves-a-child" if is_first:
            if os.fork() == 0:  # it holds what its parent held
                leave_mark(marks / "child")
                time.sleep(DEADLINE_SECONDS)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        case "raises":
            raise ArtifactError("artifacts/a.parquet: row 3:\nmust be scored")
        case "fails":
            raise ZeroDivisionError("a bug")


def leave_mark(path: Path) -> None:
    with path.open("a") as file:
        file.write(f"{os.getpid()}\n")


def marked(path: Path) -> list[int]:
    """Returns the numbers of the processes that left a mark."""
    return [int(line) for line in path.read_text().splitlines()]
