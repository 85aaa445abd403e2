"""What an executor is: it does a stage's jobs, in whatever process and order."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grpo.runtime.artifacts.files import atomic_path

Skill = Callable[[dict[str, Any], Path], None]  # fills the directory that an order asks for
Seconds = dict[str, float]  # by part of `grpo.runtime.artifacts.usage.Usage`


class Job(NamedTuple):
    """A part of a stage's work. Its bytes depend on the order alone, not on who does it or when."""

    skill: str
    order: dict[str, Any]  # plain data
    out: Path  # a directory; whole if it is there


class Work(NamedTuple):
    """What a stage has to do, ready to be done in this process."""

    skills: Mapping[str, Skill]
    seconds: Callable[[], Seconds] = dict  # so far, that were no work proper

    def do(self, job: Job) -> None:
        """Writes what the job asks for: whole, or not at all."""
        with atomic_path(job.out) as temporary:
            temporary.mkdir()
            self.skills[job.skill](job.order, temporary)


class Executor(ABC):
    """Does a stage's jobs."""

    @abstractmethod
    def run(self, jobs: Sequence[Job]) -> Iterator[Job]:
        """Does jobs, and yields each when it is done."""

    @abstractmethod
    def seconds(self) -> Seconds:
        """Returns what a worker, on average, has spent so far on what is no work proper."""

    def finish(
        self,
        jobs: Sequence[Job],
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Does the jobs whose directories are not there yet.

        Args:
          progress: Called with the jobs done and their number.
        """
        left = [job for job in jobs if not job.out.exists()]
        done = len(jobs) - len(left)
        progress(done, len(jobs))
        for number, _ in enumerate(self.run(left), start=done + 1):
            progress(number, len(jobs))


class Local(Executor):
    """Does jobs in this process, one by one."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def run(self, jobs: Sequence[Job]) -> Iterator[Job]:
        """Does jobs in their order."""
        for job in jobs:
            self._work.do(job)
            yield job

    def seconds(self) -> Seconds:
        """Returns the seconds of this process."""
        return self._work.seconds()
