"""What a judge gives, and the one place where a failing judge becomes a status."""

import inspect
import math
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import NamedTuple, SupportsFloat

import numpy as np
from numpy.typing import NDArray

from grpo.errors import brief, said_by

ALARM_AGAIN_SECONDS = 0.05  # a judge that catches the alarm gets the next one


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
    detail: str = ""  # what the judge raised or returned, where it is not "scored"


class View(NamedTuple):
    """What a judge of media saw in one image or clip."""

    text: str  # shown to people: what was read, or the raw score
    score: float  # raw, as the judge gives it


Judge = Callable[[str, Task], float]  # the answer's text -> raw score
# Of images [row, channel, height, width] or clips [row, channel, frame, height, width].
Viewer = Callable[[NDArray[np.uint8], Sequence[Task]], list[View]]
ScoreRange = tuple[float, float] | None  # raw scores that count as 0 and as 1; None: 0 and 1


class _TimeIsUp(BaseException):
    """No Exception: a judge that catches those would outlive its limit."""


def judge_text(
    judge: Judge,
    text: str,
    task: Task,
    *,
    answer_pattern: str | None,
    timeout_seconds: float,
    score_range: ScoreRange = None,
) -> Outcome:
    """Returns the outcome of one rollout's text; finding the answer counts towards the limit.

    A judge that catches every BaseException in a loop, or computes in C, outlives the limit here;
    in `grpo.rewards.texts` its process is killed.

    A ValueError of the judge says that the answer cannot be read, every other error that the
    judge has failed.

    Args:
      answer_pattern: Group 1 of its last match is the answer; None: the text is.
    """
    try:
        with _time_limit(timeout_seconds):
            answers = [text] if answer_pattern is None else re.findall(answer_pattern, text)
            if not answers:
                return Outcome(0.0, "unparsable")
            try:
                score = judge(answers[-1].strip(), task)
            except ValueError as error:  # what float("seven") raises: the answer is at fault
                return Outcome(0.0, "unparsable", _said(error))
            return _checked(score, score_range)
    except _TimeIsUp:
        # Again: an alarm may have interrupted what switches it off; the next one is not so near.
        signal.setitimer(signal.ITIMER_REAL, 0)
        return Outcome(0.0, "timed_out")
    except TimeoutError as error:  # of what the judge has asked
        return Outcome(0.0, "timed_out", _said(error))
    except BaseException as error:  # noqa: BLE001  the rollout boundary; Ctrl-C ends the parent
        return Outcome(0.0, "failed", _said(error))


def judge_media(
    view: Viewer,
    media: NDArray[np.uint8],
    tasks: Sequence[Task],
    *,
    score_range: ScoreRange = None,
) -> list[tuple[str, Outcome]]:
    """Returns what was seen of each rollout and its outcome, whatever the viewer does.

    A batch on which it raises is shown again item by item.
    """
    try:
        views = view(media, tasks)
        if len(views) != len(tasks):
            raise ValueError(f"must give {len(tasks)} views, gave {len(views)}")
        return [(text, _checked(score, score_range)) for text, score in views]
    except (Exception, SystemExit) as error:  # noqa: BLE001  the rollout boundary
        if len(tasks) == 1:
            return [("", Outcome(0.0, "failed", _said(error)))]
    return [
        each
        for row, task in enumerate(tasks)
        for each in judge_media(view, media[row : row + 1], [task], score_range=score_range)
    ]


def _said(error: BaseException) -> str:
    try:
        return _storable(said_by(error))
    except BaseException:  # noqa: BLE001  its own __str__ fails
        return _storable(type(error).__name__)


def _storable(text: str) -> str:
    """Returns a brief text without halves of characters, which no table can hold."""
    return brief(text).encode(errors="replace").decode()


def _checked(score: object, score_range: ScoreRange) -> Outcome:
    """Returns the outcome of what a judge returned, which may be anything."""
    if inspect.iscoroutine(score):
        score.close()  # else Python warns later that nobody has awaited it
        return Outcome(0.0, "failed", "returned a coroutine; a judge must not be async")
    if isinstance(score, str | bytes) or not isinstance(score, SupportsFloat):
        kind = type(score).__name__
        return Outcome(0.0, "failed", _storable(f"returned {kind} {score!r}; it must be a number"))
    raw = float(score)
    if not math.isfinite(raw):
        return Outcome(0.0, "failed", f"returned {raw}; it must be finite")
    if score_range is not None:
        low, high = score_range
        return Outcome(min(max((raw - low) / (high - low), 0.0), 1.0), "scored")
    if not 0 <= raw <= 1:
        detail = f"returned {raw!r}, not in [0, 1]; state in reward.score_range what counts as 0, 1"
        return Outcome(0.0, "failed", detail)
    return Outcome(raw, "scored")


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raises _TimeIsUp in the block after `seconds`, again and again; in the main thread only."""
    before = signal.signal(signal.SIGALRM, _expire)
    signal.setitimer(signal.ITIMER_REAL, seconds, ALARM_AGAIN_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _expire(signum: int, frame: FrameType | None) -> None:
    raise _TimeIsUp
