"""A pool of workers: idle workers take the next job, lost workers are replaced."""

import json
import re
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any, NamedTuple

from grpo.errors import GrpoError, RetryableError, WorkerError, brief
from grpo.runtime.artifacts.files import remove_left_beside
from grpo.runtime.executors.base import Executor, Job, Seconds, Weights
from grpo.runtime.executors.worker import SLEEP, written

TRIES = 3  # number of workers that a job may lose
GRACE_SECONDS = 5.0  # for idle workers and their child processes to exit by themselves
START_SECONDS = 1800.0  # until at least one worker has started; a cluster may be busy


class Handle(ABC):
    """Controls one worker from the stage's process."""

    lost: tuple[type[Exception], ...]  # exceptions of the answer that mean a lost worker

    @abstractmethod
    def ask(self, line: str) -> Future[str]:
        """Sends a line and returns its answer, which raises an error in `lost` or a bug."""

    @abstractmethod
    def close_input(self) -> None:
        """Signals that no further line follows."""

    @abstractmethod
    def stop(self, grace_seconds: float = 0.0) -> None:
        """Stops the worker; kills it and its children if they do not exit within the grace time."""


class Request(NamedTuple):
    """A request that a worker has not answered yet."""

    slot: int
    job: Job | None  # None: the setup line of a starting worker, or the line SLEEP


class Pool(Executor):
    """Runs jobs on up to `workers` workers, started on demand and stopped with the block."""

    def __init__(self, start_worker: Callable[[int], Handle], *, workers: int, setup: str) -> None:
        """Args:
        start_worker: Starts the worker of a slot, 0 to `workers` - 1.
        setup: The first line that a worker receives.
        """
        self._start_worker = start_worker
        self._slots = range(workers)
        self._setup = setup
        self._workers: dict[int, Handle] = {}
        self._pending: dict[Future[str], Request] = {}
        self._losses: Counter[Path | None] = Counter()  # by job output; None: while starting
        self._seconds: dict[Handle, Seconds] = {}
        self._weights: Weights | None = None  # None: those with which workers start
        self._abandoned: Future[None] = Future()  # done: nobody needs the jobs

    def run(self, jobs: Sequence[Job]) -> Iterator[Job]:
        """Runs jobs on idle workers; a job whose worker is lost goes to another worker.

        Raises:
          GrpoError: A user-facing error that a worker reports; a RetryableError stays one.
          WorkerError: If a job lost its worker TRIES times, no worker starts, or `abandon` was
            called.
        """
        waiting = deque(jobs)
        while waiting or any(request.job for request in self._pending.values()):
            self._start(len(waiting))
            for slot in self._idle():
                if waiting:
                    self._ask(slot, waiting.popleft())
            for future in self._await_answers():
                slot, job = self._pending.pop(future)
                is_done = self._settle(future, slot, job)
                if job and is_done:
                    yield job
                elif job:
                    waiting.appendleft(job)

    def load_weights(self, weights: Weights) -> None:
        """Makes all later jobs use these weights; a worker loads them with its next job."""
        self._weights = weights

    def sleep(self) -> None:
        """Frees the device memory of all workers, and waits for them.

        A worker that is still starting has loaded no policy.
        """
        for slot in self._idle():
            self._pending[self._workers[slot].ask(SLEEP)] = Request(slot, None)
        while self._pending:
            for future in self._await_answers():
                self._settle(future, *self._pending.pop(future))

    def abandon(self) -> None:
        """Makes `run` raise WorkerError; `close` must follow, which kills busy workers."""
        if not self._abandoned.done():
            self._abandoned.set_result(None)

    def seconds(self) -> Seconds:
        """Returns the mean overhead over all workers that have answered, by part."""
        parts = {part for each in self._seconds.values() for part in each}
        return {
            part: sum(each.get(part, 0.0) for each in self._seconds.values()) / len(self._seconds)
            for part in sorted(parts)
        }

    def close(self, grace_seconds: float = 0.0) -> None:
        """Stops all workers: busy ones immediately, idle ones after up to `grace_seconds`."""
        idle = self._idle() if grace_seconds else []
        for slot in idle:
            self._workers[slot].close_input()
        deadline = time.monotonic() + grace_seconds
        for slot, worker in self._workers.items():
            worker.stop(max(deadline - time.monotonic(), 0.0) if slot in idle else 0.0)
        self._workers.clear()
        self._pending.clear()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.close(0.0 if error else GRACE_SECONDS)

    def _start(self, needed: int) -> None:
        """Starts workers for the jobs that exceed the number of idle and starting workers."""
        at_work = sum(request.job is not None for request in self._pending.values())
        for slot in self._slots:
            if slot not in self._workers and len(self._workers) - at_work < needed:
                self._workers[slot] = self._start_worker(slot)
                self._ask(slot, None)

    def _ask(self, slot: int, job: Job | None) -> None:
        line = self._setup if job is None else written(job, self._weights)
        self._pending[self._workers[slot].ask(line)] = Request(slot, job)

    def _idle(self) -> list[int]:
        request = {request.slot for request in self._pending.values()}
        return [slot for slot in self._workers if slot not in request]

    def _await_answers(self) -> set[Future[str]]:
        """Waits for at least one answer; returns all that have arrived."""
        is_starting = all(request.job is None for request in self._pending.values())
        timeout = START_SECONDS if is_starting else None
        futures: list[Future[Any]] = [self._abandoned, *self._pending]
        come = wait(futures, timeout, FIRST_COMPLETED).done
        if self._abandoned.done():
            raise WorkerError("the stage has ended before its samplers; rerun it")
        if not come:
            raise WorkerError(
                f"at least one worker must start within {START_SECONDS:g} seconds, got none; free "
                "resources on the workers' hosts, or lower sampling.workers"
            )
        return {each for each in self._pending if each in come}

    def _settle(self, future: Future[str], slot: int, job: Job | None) -> bool:
        """Returns True if the worker has answered a request, False if the worker was lost."""
        worker, what = self._workers[slot], job and job.out
        try:
            answer = json.loads(future.result())
        except worker.lost as error:
            # Stop all idle workers: they may have been lost together with the host.
            for each in self._idle():
                self._workers.pop(each).stop()
            self._losses[what] += 1
            if self._losses[what] == TRIES:
                raise WorkerError(_describe_loss(what, error)) from None
            return False
        if "error" in answer:
            raise (RetryableError if answer["is_retryable"] else GrpoError)(answer["error"])
        if self._losses.pop(what, 0) and what:
            remove_left_beside(what)  # the lost worker may have exited late
        self._seconds[worker] = answer["seconds"]
        return True


def _describe_loss(out: Path | None, error: Exception) -> str:
    what = "no worker starts" if out is None else f"{out}: no worker survives it"
    # Ray's message lists facts about the actor in tab-indented lines before the cause.
    why = re.split(r"(?m)^\t.*$", str(error))[-1]
    return (
        f"{what}, {TRIES} were lost, the last: {brief(why)}; if memory is short, lower "
        "sampling.workers, otherwise find out what kills them; finished batches are kept"
    )
