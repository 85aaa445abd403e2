"""What a judge gives, and the one place where a failing judge becomes a status."""

import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a judge may know of a prompt: family, text, the answer, and the task's own entry."""

    family: str
    prompt: str
    answer: str
    entry: dict[str, object]


class Outcome(NamedTuple):
    """A judge's score in [0, 1], and how it came about."""

    score: float
    status: str  # scored | unparsable | timed_out | failed


class View(NamedTuple):
    """What a judge of media saw in one image or clip."""

    text: str  # shown to people: what was read, or the raw score
    score: float  # in [0, 1]


Judge = Callable[[str, Task], float]  # the answer's text -> score in [0, 1]
# Of images [row, channel, height, width] or clips [row, channel, frame, height, width].
Viewer = Callable[[NDArray[np.uint8], Sequence[Task]], list[View]]


def judge_text(
    judge: Judge, text: str, task: Task, *, answer_pattern: str, timeout_seconds: float
) -> Outcome:
    """Returns the outcome of one rollout's text, whatever the judge does.

    Args:
      answer_pattern: Group 1 of its last match is the answer.
    """
    answers = re.findall(answer_pattern, text)
    if not answers:
        return Outcome(0.0, "unparsable")
    try:
        with _time_limit(timeout_seconds):
            score = judge(answers[-1].strip(), task)
    except TimeoutError:
        return Outcome(0.0, "timed_out")
    except Exception:  # noqa: BLE001  the rollout boundary: some judges raise on what a policy writes
        return Outcome(0.0, "failed")
    return _checked(score)


def judge_media(
    view: Viewer, media: NDArray[np.uint8], tasks: Sequence[Task]
) -> list[tuple[str, Outcome]]:
    """Returns what was seen of each rollout and its outcome, whatever the viewer does.

    A batch on which it raises is shown again item by item.
    """
    try:
        views = view(media, tasks)
        if len(views) != len(tasks):
            raise ValueError(f"must give {len(tasks)} views, gave {len(views)}")
        return [(text, _checked(float(score))) for text, score in views]
    except Exception:  # noqa: BLE001  the rollout boundary: what a policy draws may be anything
        if len(tasks) == 1:
            return [("", Outcome(0.0, "failed"))]
    rows = range(len(tasks))
    return [each for row in rows for each in judge_media(view, media[row : row + 1], [tasks[row]])]


def _checked(score: float) -> Outcome:
    """Returns the outcome of a score; some judges return NaN or leave [0, 1]."""
    return Outcome(score, "scored") if 0 <= score <= 1 else Outcome(0.0, "failed")


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the block after `seconds`; works in the main thread only."""
    before = signal.signal(signal.SIGALRM, _expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _expire(signum: int, frame: FrameType | None) -> None:
    raise TimeoutError
