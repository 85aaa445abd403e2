"""Workers that are processes on this host."""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from grpo.runtime.executors.pool import Handle, Pool
from grpo.runtime.process import Process

GRACE_SECONDS = 5.0  # for a process that has closed its socket to say why, by its exit code


class ProcessPool(Pool):
    """Processes that each make their work anew; they inherit the environment."""

    def __init__(self, make: str, setup: str, environments: Sequence[Mapping[str, str]]) -> None:
        """Args:
        make: What turns `setup` into a worker's `Work`, as "module:function".
        environments: What each worker has beside what it inherits.
        """
        threads = ThreadPoolExecutor(len(environments))  # one waits for each worker
        super().__init__(
            lambda slot: _ProcessHandle(make, environments[slot], threads),
            workers=len(environments),
            setup=setup,
        )
        self._threads = threads

    def close(self, grace_seconds: float = 0.0) -> None:
        """Ends all workers, and who waits for them."""
        super().close(grace_seconds)
        self._threads.shutdown()


class _ProcessHandle(Handle):
    lost = (ConnectionError,)

    def __init__(
        self, make: str, environment: Mapping[str, str], threads: ThreadPoolExecutor
    ) -> None:
        # Not in one of the threads: the process ends with the thread that has started it.
        self._process = Process("grpo.runtime.executors.worker", make, environment=environment)
        self._threads = threads

    def ask(self, line: str) -> Future[str]:
        """Returns what the process will answer."""
        return self._threads.submit(self._exchange, line)

    def close_input(self) -> None:
        """Lets the process end when it has read all."""
        self._process.close_input()

    def stop(self, grace_seconds: float = 0.0) -> None:
        """Kills the process if it does not end by itself in this time."""
        self._process.stop(grace_seconds)

    def _exchange(self, line: str) -> str:
        """Raises ConnectionError if a signal has ended the process; an error is a bug."""
        self._process.send(line)
        try:
            return self._process.read_line(math.inf)
        except ConnectionError:
            code = self._process.stop(GRACE_SECONDS)
        if code > 0:
            raise RuntimeError(f"a worker has failed with exit code {code}, its traceback is above")
        raise ConnectionError(f"ended by signal {-code}")
