"""Workers that take jobs as they become free, and are replaced when they are lost."""

import json
import re
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import NamedTuple

from grpo.errors import ExecutorError, GrpoError, brief
from grpo.runtime.artifacts.files import remove_left_beside
from grpo.runtime.executors.base import Executor, Job, Seconds
from grpo.runtime.executors.worker import written

TRIES = 3  # of a job, each on a worker that was lost at it
GRACE_SECONDS = 5.0  # in which workers end in order, and their processes with them
START_SECONDS = 1800.0  # in which one of the workers must have started: a cluster may be busy


class Handle(ABC):
    """The near end of a worker."""

    lost: tuple[type[Exception], ...]  # what the answer raises if the worker is no more

    @abstractmethod
    def ask(self, line: str) -> Future[str]:
        """Sends a line; raises, in the answer, what `lost` says, or a bug of the worker's."""

    @abstractmethod
    def close_input(self) -> None:
        """Says that nothing more will be request."""

    @abstractmethod
    def stop(self, grace_seconds: float = 0.0) -> None:
        """Ends the worker; it may end by itself, and with it what it has started, in this time."""


class Request(NamedTuple):
    """What an answer is awaited of."""

    slot: int
    job: Job | None  # None: it is starting


class Pool(Executor):
    """Up to so many workers, started when there are jobs for them; they end with the block."""

    def __init__(self, start_worker: Callable[[int], Handle], *, workers: int, setup: str) -> None:
        """Args:
        start_worker: Starts the worker of a slot, 0 to `workers` - 1.
        setup: A worker's first line.
        """
        self._start_worker = start_worker
        self._slots = range(workers)
        self._setup = setup
        self._workers: dict[int, Handle] = {}
        self._pending: dict[Future[str], Request] = {}
        self._losses: Counter[Path | None] = Counter()  # by what jobs write; None: at their start
        self._seconds: dict[Handle, Seconds] = {}

    def run(self, jobs: Sequence[Job]) -> Iterator[Job]:
        """Does jobs as workers become free; one whose worker is lost is done by another.

        Raises:
          GrpoError: What a worker says that a person can mend.
          ExecutorError: If a job has lost its worker TRIES times, or no worker starts.
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

    def seconds(self) -> Seconds:
        """Returns the mean over all workers that have worked."""
        parts = {part for each in self._seconds.values() for part in each}
        return {
            part: sum(each.get(part, 0.0) for each in self._seconds.values()) / len(self._seconds)
            for part in sorted(parts)
        }

    def close(self, grace_seconds: float = 0.0) -> None:
        """Ends all workers: at once who is at work, and who is idle within a time."""
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
        """Starts workers for jobs that no idle or starting one is there for."""
        at_work = sum(request.job is not None for request in self._pending.values())
        for slot in self._slots:
            if slot not in self._workers and len(self._workers) - at_work < needed:
                self._workers[slot] = self._start_worker(slot)
                self._ask(slot, None)

    def _ask(self, slot: int, job: Job | None) -> None:
        line = self._setup if job is None else written(job)
        self._pending[self._workers[slot].ask(line)] = Request(slot, job)

    def _idle(self) -> list[int]:
        request = {request.slot for request in self._pending.values()}
        return [slot for slot in self._workers if slot not in request]

    def _await_answers(self) -> set[Future[str]]:
        """Returns the answers that have come, at least one."""
        is_starting = all(request.job is None for request in self._pending.values())
        timeout = START_SECONDS if is_starting else None
        come = wait(self._pending, timeout, FIRST_COMPLETED).done
        if not come:
            raise ExecutorError(
                f"no worker has started in {START_SECONDS:g} seconds; free the machines that are "
                "to work, or lower sampling.workers"
            )
        return come

    def _settle(self, future: Future[str], slot: int, job: Job | None) -> bool:
        """Returns whether a worker has done what it was request; if not, it was lost."""
        worker, what = self._workers[slot], job and job.out
        try:
            answer = json.loads(future.result())
        except worker.lost as error:
            # All that have nothing to do: they may have been lost, too, with their host.
            for each in self._idle():
                self._workers.pop(each).stop()
            self._losses[what] += 1
            if self._losses[what] == TRIES:
                raise ExecutorError(_describe_loss(what, error)) from None
            return False
        if "error" in answer:
            raise GrpoError(answer["error"])
        if self._losses.pop(what, 0) and what:
            remove_left_beside(what)  # the lost worker may have ended since another took over
        self._seconds[worker] = answer["seconds"]
        return True


def _describe_loss(out: Path | None, error: Exception) -> str:
    what = "no worker starts" if out is None else f"{out}: no worker survives it"
    # Ray first says what it knows of the actor, in lines after a tab, and then why it is lost.
    why = re.split(r"(?m)^\t.*$", str(error))[-1]
    return (
        f"{what}, {TRIES} were lost, the last: {brief(why)}; if memory is short, lower "
        "sampling.workers, else look for what ends them; finished batches are kept"
    )
