"""Workers as processes on this host."""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from grpo.runtime.child import Process
from grpo.runtime.executors.pool import Handle, Pool

GRACE_SECONDS = 5.0  # for a process that has closed its socket to exit with its exit code


class ProcessPool(Pool):
    """A pool of processes that inherit the environment; each builds its own `Work`."""

    def __init__(self, make: str, setup: str, environments: Sequence[Mapping[str, str]]) -> None:
        """Args:
        make: Function that builds a worker's `Work` from `setup`, as "module:function".
        environments: Additional environment variables, one mapping per worker.
        """
        threads = ThreadPoolExecutor(len(environments))  # one thread per worker waits for answers
        super().__init__(
            lambda slot: _ProcessHandle(make, environments[slot], threads),
            workers=len(environments),
            setup=setup,
        )
        self._threads = threads

    def close(self, grace_seconds: float = 0.0) -> None:
        """Stops all workers and the threads that wait for them."""
        super().close(grace_seconds)
        self._threads.shutdown()


class _ProcessHandle(Handle):
    lost = (ConnectionError,)

    def __init__(
        self, make: str, environment: Mapping[str, str], threads: ThreadPoolExecutor
    ) -> None:
        # Not started in one of the threads: the process dies with the thread that started it.
        self._process = Process("grpo.runtime.executors.worker", make, environment=environment)
        self._threads = threads

    def ask(self, line: str) -> Future[str]:
        """Sends a line and returns the future answer of the process."""
        return self._threads.submit(self._exchange, line)

    def close_input(self) -> None:
        """Closes the input; the process exits once it has read everything."""
        self._process.close_input()

    def stop(self, grace_seconds: float = 0.0) -> None:
        """Kills the process if it does not exit within the grace time."""
        self._process.stop(grace_seconds)

    def _exchange(self, line: str) -> str:
        """Returns the answer to a line; raises ConnectionError if a signal killed the process."""
        self._process.send(line)
        try:
            return self._process.read_line(math.inf)
        except ConnectionError:
            code = self._process.stop(GRACE_SECONDS)
        if code > 0:
            raise RuntimeError(f"a worker has failed with exit code {code}, its traceback is above")
        raise ConnectionError(f"ended by signal {-code}")
