"""The executor interface: runs a stage's jobs, in any process and in any order."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grpo.runtime.artifacts.files import atomic_path

Skill = Callable[[dict[str, Any], Path], None]  # writes an order's results to a directory
Seconds = dict[str, float]  # by part of `grpo.runtime.artifacts.usage.Usage`


class Weights(NamedTuple):
    """Trained weights that replace those with which workers started."""

    version: int  # different for different weights
    path: Path  # a safetensors file; it may lie in the memory of the stage's process
    paths: Mapping[str, str] = {}  # of the same content, by host: ranks that offer it there


class Job(NamedTuple):
    """One unit of a stage's work. Its output bytes depend only on its order."""

    skill: str  # key of Work.skills
    order: dict[str, Any]  # arguments, JSON-serializable
    out: Path  # output directory; complete if it exists


class Work(NamedTuple):
    """The functions that run a stage's jobs in this process, with their models loaded."""

    skills: Mapping[str, Skill]
    seconds: Callable[[], Seconds] = dict  # overhead so far, e.g. loading
    load_weights: Callable[[Path], None] | None = None  # None: no skill uses a policy
    sleep: Callable[[], None] | None = None  # frees device memory until new weights are loaded

    def do(self, job: Job) -> None:
        """Writes the job's output directory atomically."""
        with atomic_path(job.out) as temporary:
            temporary.mkdir()
            self.skills[job.skill](job.order, temporary)


class Executor(ABC):
    """Runs a stage's jobs."""

    @abstractmethod
    def run(self, jobs: Sequence[Job]) -> Iterator[Job]:
        """Runs jobs and yields each job when it is done."""

    @abstractmethod
    def load_weights(self, weights: Weights) -> None:
        """Makes all later jobs use these weights, also on workers that start later.

        The file must exist until the next call, and its content stay until all jobs by it are done.
        """

    @abstractmethod
    def sleep(self) -> None:
        """Frees the device memory that policies need to sample; `load_weights` must follow."""

    @abstractmethod
    def abandon(self) -> None:
        """Makes `run` raise WorkerError at once in the thread that waits in it, and from now on."""

    @abstractmethod
    def seconds(self) -> Seconds:
        """Returns the mean overhead per worker so far, e.g. for loading, by part."""

    def finish(
        self,
        jobs: Sequence[Job],
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Runs the jobs whose output directories do not exist yet.

        Args:
          progress: Called with the number of finished jobs and of all jobs.
        """
        left = [job for job in jobs if not job.out.exists()]
        done = len(jobs) - len(left)
        progress(done, len(jobs))
        for number, _ in enumerate(self.run(left), start=done + 1):
            progress(number, len(jobs))


class Local(Executor):
    """Runs jobs in this process, one after the other."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def run(self, jobs: Sequence[Job]) -> Iterator[Job]:
        """Runs jobs in the given order."""
        for job in jobs:
            self._work.do(job)
            yield job

    def load_weights(self, weights: Weights) -> None:
        """Loads the weights at once."""
        if self._work.load_weights is not None:
            self._work.load_weights(weights.path)

    def sleep(self) -> None:
        """Frees the memory of this process's device."""
        if self._work.sleep is not None:
            self._work.sleep()

    def abandon(self) -> None:
        """Does nothing: jobs run in the thread that calls this."""

    def seconds(self) -> Seconds:
        """Returns the overhead of this process."""
        return self._work.seconds()
