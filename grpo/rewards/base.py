"""What judges give, how their failures become statuses, and processes in which texts are judged."""

import inspect
import json
import math
import multiprocessing
import os
import re
import signal
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import FrameType
from typing import Literal, NamedTuple, SupportsFloat

import numpy as np
from jaxtyping import UInt8
from numpy.typing import NDArray

from grpo.errors import brief, describe_error
from grpo.runtime.process import die_with_parent
from grpo.schema import DirectoryBase, HubBase, Machine, S3Base

ALARM_AGAIN_SECONDS = 0.05  # a judge that catches the alarm gets the next one
ScoreRange = tuple[float, float] | None  # raw scores that count as 0 and as 1; None: 0 and 1
GRACE_SECONDS = 1.0  # behind its own limit, after which a judging process is killed
FRAMES_PER_CLIP = 8


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


AnswerJudge = Callable[[str, Task], float]  # the answer's text -> raw score
# Of images [row, channel, height, width] or clips [row, channel, frame, height, width].
Viewer = Callable[[NDArray[np.uint8], Sequence[Task]], list[View]]


@dataclass(frozen=True, kw_only=True)
class JudgeInputs:
    """What a judge may be made of."""

    model: DirectoryBase | HubBase | S3Base | None  # reward.model
    data: Path  # where it is, if it is a directory
    machine: Machine


@dataclass(frozen=True, kw_only=True)
class Judge:
    """A judge as its file says of it; the file is named as `reward.judge` names it."""

    reads: Literal["text", "media", "simulation"]  # of a rollout
    # A simulator's verdict is a text, judged by an AnswerJudge.
    load: Callable[[JudgeInputs], AnswerJudge | Viewer]
    needs_model: bool = False  # reward.model
    needs_task: str | None = None  # task.kind; None: any whose rollouts it can read


class _TimeIsUp(BaseException):
    """No Exception: a judge that catches those would outlive its limit."""


def judge_text(
    judge: AnswerJudge,
    text: str,
    task: Task,
    *,
    answer_pattern: str | None,
    timeout_seconds: float,
    score_range: ScoreRange = None,
) -> Outcome:
    """Returns the outcome of one rollout's text; finding the answer counts towards the limit.

    A judge that catches every BaseException in a loop, or computes in C, outlives the limit here;
    in `grpo.rewards.base` its process is killed.

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
        return _storable(describe_error(error))
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


Asked = Callable[..., Outcome]


class TextJudge:
    """How the answer in a rollout's text is judged.

    The judge runs in a fork of this process, which lives from the first text on: what cannot be
    interrupted is killed, and the next text gets a new one.
    """

    def __init__(
        self,
        judge: AnswerJudge,
        *,
        answer_pattern: str,
        timeout_seconds: float,
        score_range: ScoreRange = None,
    ) -> None:
        """Args:
        answer_pattern: Group 1 of its last match is the answer.
        """
        self._judge = partial(
            judge_text, judge, timeout_seconds=timeout_seconds, score_range=score_range
        )
        self._answer_pattern = answer_pattern
        self._patience_seconds = timeout_seconds + GRACE_SECONDS
        self._children: list[_Child] = []  # one or none
        self._end = weakref.finalize(self, _end_all, self._children)

    def judge_texts(self, texts: Sequence[str], tasks: Sequence[Task]) -> Iterator[Outcome]:
        """Yields the outcome of each rollout's text, whatever the judge does."""
        return self._ask(texts, tasks, self._answer_pattern)

    def judge_answers(self, answers: Sequence[str], tasks: Sequence[Task]) -> Iterator[Outcome]:
        """Yields the outcome of each text, all of which is the answer."""
        return self._ask(answers, tasks, None)

    def _ask(
        self, texts: Sequence[str], tasks: Sequence[Task], answer_pattern: str | None
    ) -> Iterator[Outcome]:
        done = 0
        try:
            while done < len(texts):
                child = self._child()
                with suppress(ConnectionError):  # it has ended, which shows when an answer is read
                    child.send(texts[done:], tasks[done:], answer_pattern)
                outcome: Outcome | None = None
                while done < len(texts) and (outcome := child.receive(self._patience_seconds)):
                    done += 1
                    yield outcome
                if outcome is None:
                    done += 1
                    yield child.end()
        finally:
            if done < len(texts):  # the caller stopped early: what is left is not for the next
                _end_all(self._children)

    def _child(self) -> "_Child":
        """Returns a process to judge in."""
        if not self._children or not self._children[0].is_alive():
            _end_all(self._children)
            self._children.append(_Child(self._judge))
        return self._children[0]


class _Child:
    """A fork of this process that judges what it is sent, in order."""

    def __init__(self, judge: Asked) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # else both processes write what is waiting
        self.process: ForkProcess = context.Process(
            target=_serve, args=(theirs, self._pipe, judge, os.getpid()), daemon=True
        )
        self.process.start()
        theirs.close()

    def is_alive(self) -> bool:
        return not self._pipe.closed and self.process.is_alive()

    def send(self, texts: Sequence[str], tasks: Sequence[Task], answer_pattern: str | None) -> None:
        """Sends texts; each task once, for those of a group share it."""
        distinct = {id(task): task for task in tasks}
        rows = {each: row for row, each in enumerate(distinct)}
        order = {
            "texts": list(texts),
            "tasks": [asdict(task) for task in distinct.values()],
            "rows": [rows[id(task)] for task in tasks],
            "answer_pattern": answer_pattern,
        }
        self._pipe.send_bytes(json.dumps(order).encode())

    def receive(self, timeout_seconds: float) -> Outcome | None:
        """Returns the next outcome; None if it does not come."""
        try:
            if self._pipe.poll(timeout_seconds):
                return Outcome(*json.loads(self._pipe.recv_bytes()))
        except (EOFError, ConnectionError):
            self.process.join()
        return None

    def end(self) -> Outcome:
        """Ends the process; returns the outcome of a text that it gave no answer to."""
        code = self.process.exitcode
        self.process.kill()
        self.process.join()
        self._pipe.close()
        if code is None:
            return Outcome(0.0, "timed_out")
        return Outcome(0.0, "failed", f"ended its process, exit code {code}")


def _serve(pipe: Connection, parents: Connection, judge: Asked, parent: int) -> None:
    """Judges texts until the pipe closes."""
    parents.close()  # else the pipe never closes: this process would hold its other end
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, which ends this
    die_with_parent(parent)
    while True:
        try:
            order = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        tasks = [Task(**each) for each in order["tasks"]]
        for text, row in zip(order["texts"], order["rows"]):
            outcome = judge(text, tasks[row], answer_pattern=order["answer_pattern"])
            pipe.send_bytes(json.dumps(outcome).encode())


def _end_all(children: list[_Child]) -> None:
    while children:
        children.pop().end()


def take_frames(
    media: UInt8[np.ndarray, "row channel *shape"],
) -> UInt8[np.ndarray, "row frame channel height width"]:
    """Returns evenly spaced frames, the first and the last among them; an image is one frame.

    Args:
      media: Images [row, channel, height, width] or clips [row, channel, frame, height, width];
        of clips with fewer frames than FRAMES_PER_CLIP, all are taken.
    """
    if media.ndim == 4:
        return media[:, None]
    frames = media.shape[2]
    chosen = np.linspace(0, frames - 1, min(frames, FRAMES_PER_CLIP)).round().astype(int)
    return media[:, :, chosen].swapaxes(1, 2)
