"""A worker: builds its `Work` from the first line that it reads, then runs one job per line.

`grpo.runtime.executors.processes` starts it as a process; Ray's actors use the class `Worker`.
"""

import importlib
import json
import os
import signal
import socket
import sys
from pathlib import Path

from grpo.errors import GrpoError, RetryableError
from grpo.runtime.artifacts.files import refused_by_the_system
from grpo.runtime.executors.base import Job, Weights, Work
from grpo.runtime.memory import MemoryFile
from grpo.runtime.process import die_with_parent, freezing_imports

PARENT = os.getppid()
SLEEP = "sleep"  # the line that makes a worker free its device's memory


class Worker:
    """Answers lines of JSON with lines of JSON."""

    def __init__(self, make: str) -> None:
        """Args:
        make: Function that builds a `Work` from the first line, as "module:function".
        """
        self._make = make
        self._work: Work | None = None
        self._version: int | None = None  # of the weights; None: those of the start

    def answer(self, line: str, weights: memoryview | None = None) -> str:
        """Returns the overhead so far or a user-facing error, as JSON; raises on a bug.

        Args:
          weights: The content of the file of weights that the line names, if it is on another host.
        """
        try:
            with refused_by_the_system():
                self._carry_out(line, weights)
        except GrpoError as error:
            return json.dumps(
                {"error": str(error), "is_retryable": isinstance(error, RetryableError)}
            )
        assert self._work is not None
        return json.dumps({"seconds": self._work.seconds()})

    def _carry_out(self, line: str, weights: memoryview | None) -> None:
        if self._work is None:
            module, _, name = self._make.partition(":")
            with freezing_imports():
                found = importlib.import_module(module)
            self._work = getattr(found, name)(line)
            return
        if line.strip() == SLEEP:
            if self._work.sleep is not None:
                self._work.sleep()
            return
        skill, order, out, version, paths = json.loads(line)
        if version != self._version:
            path = paths.get(socket.gethostname(), paths[""])
            self._load_weights(Path(path), weights)
            self._version = version
        self._work.do(Job(skill, order, Path(out)))

    def _load_weights(self, path: Path, content: memoryview | None) -> None:
        assert self._work is not None
        if self._work.load_weights is None:
            return
        if content is None:
            self._work.load_weights(path)
            return
        file = MemoryFile(lambda file: file.write(content))
        self._work.load_weights(file.path)
        file.close()


def written(job: Job, weights: Weights | None) -> str:
    """Returns a job, and the weights to use, as the line of JSON that a worker reads."""
    version, paths = None, dict[str, str]()
    if weights:
        version, paths = weights.version, {"": str(weights.path), **weights.paths}
    return json.dumps([job.skill, job.order, str(job.out), version, paths])


def main() -> None:
    """Serves the socket FD given as first argument; the second is `make` of `Worker`."""
    die_with_parent(PARENT)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the stage handles Ctrl-C and stops its workers
    worker = Worker(sys.argv[2])
    connection = socket.socket(fileno=int(sys.argv[1]))
    with connection, connection.makefile("rw", encoding="utf-8") as lines:
        for line in lines:
            lines.write(worker.answer(line) + "\n")
            lines.flush()


if __name__ == "__main__":
    main()
