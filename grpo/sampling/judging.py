"""Judging: outcomes and failure statuses, and the process that judges texts."""

import inspect
import json
import math
import multiprocessing
import operator
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
from types import FrameType
from typing import Any, NamedTuple, SupportsFloat

import numpy as np
from numpy.typing import NDArray

from grpo.errors import RefusedError, RetryableError, brief, describe_error
from grpo.rewards.base import (
    ROLLOUTS_PER_CALL,
    AnswerJudge,
    Part,
    PartJudge,
    Reader,
    Scored,
    Task,
    Unjudged,
    View,
    Viewer,
)
from grpo.runtime.process import die_with_parent, discard_output, limit_resources

ALARM_AGAIN_SECONDS = 0.05  # interval of repeated alarms for a judge that catches the first
ScoreRange = tuple[float, float] | None  # raw scores that map to 0 and 1; None: 0 and 1
GRACE_SECONDS = 1.0  # time after the limit until the judging process is killed
MEMORY_GB = 4.0  # of a judging process, unless reward.memory_gb is stated
FILE_BYTES = 2**30  # of a file that a judging process writes
EXIT_OUT_OF_MEMORY = 77  # of a judging process


class Outcome(NamedTuple):
    """A judge's score in [0, 1] with its status."""

    score: float
    status: str  # scored | unparsable | timed_out | failed | unanswered
    detail: str = ""  # the judge's exception or invalid result, unless the status is "scored"
    parts: tuple[Part, ...] = ()  # scores in [0, 1] of the text's parts, if the judge scores them


class _TimeIsUp(BaseException):
    """Raised at the time limit; no subclass of Exception, so that few judges catch it."""


def judge_text(
    judge: AnswerJudge | PartJudge,
    text: str,
    task: Task,
    *,
    answer_pattern: str | None,
    timeout_seconds: float,
    score_range: ScoreRange = None,
    scores_parts: bool = False,
) -> Outcome:
    """Returns the outcome of one rollout's text; the time limit includes the search for the answer.

    A judge that catches BaseException in a loop or computes in C can exceed the limit here;
    `TextJudge` kills its process.

    A ValueError of the judge means that the answer cannot be parsed; any other exception means that
    the judge failed.

    Args:
      answer_pattern: Group 1 of its last match is the answer; None: the whole text is the answer.
      scores_parts: Whether the judge is a PartJudge.

    Raises:
      MemoryError: If the judge raises it. It may still hold the memory.
    """
    try:
        with _time_limit(timeout_seconds):
            answer = text if answer_pattern is None else find_answer(text, answer_pattern)
            if answer is None:
                return Outcome(0.0, "unparsable")
            try:
                score = judge(answer, task)
            except ValueError as error:  # e.g. of float("seven"): the answer cannot be parsed
                return Outcome(0.0, "unparsable", _said(error))
            if scores_parts:
                return _checked_parts(score, answer, score_range)
            return _checked(score, score_range)
    except _TimeIsUp:
        # Switched off again, because an alarm may have interrupted the code that does so.
        signal.setitimer(signal.ITIMER_REAL, 0)
        return Outcome(0.0, "timed_out")
    except MemoryError:
        raise
    except TimeoutError as error:  # e.g. of a server that the judge calls
        return Outcome(0.0, "timed_out", _said(error))
    except BaseException as error:  # noqa: BLE001  the rollout boundary; Ctrl-C ends the parent
        return Outcome(0.0, "failed", _said(error))


def find_answer(text: str, answer_pattern: str) -> str | None:
    """Returns group 1 of the pattern's last match, stripped; None if there is no match."""
    answers = re.findall(answer_pattern, text)
    return answers[-1].strip() if answers else None


@dataclass(frozen=True, kw_only=True)
class JointJudge:
    """Judges several rollouts together in this process: their media, or their whole texts."""

    view: Viewer | Reader
    reads_media: bool
    score_range: ScoreRange = None
    scores_parts: bool = False
    rollouts_per_call: int = ROLLOUTS_PER_CALL

    def judge(
        self, items: NDArray[np.uint8] | Sequence[str], tasks: Sequence[Task]
    ) -> Iterator[tuple[str, Outcome]]:
        """Yields the view's text and the outcome of each rollout.

        Raises:
          RefusedError, RetryableError: If the judge raises them, e.g. because its server is down.
        """
        for start in range(0, len(tasks), self.rollouts_per_call):
            rows = slice(start, start + self.rollouts_per_call)
            yield from self._judge_batch(items[rows], tasks[rows])

    def _judge_batch(
        self, items: NDArray[np.uint8] | Sequence[str], tasks: Sequence[Task]
    ) -> list[tuple[str, Outcome]]:
        """Returns the results of a batch; if the judge raises on it, its items are judged alone."""
        view: Any = self.view
        try:
            views = view(items, tasks)
            if len(views) != len(tasks):
                raise ValueError(f"must give {len(tasks)} views, gave {len(views)}")
            return [self._outcome(each, text=item) for each, item in zip(views, items)]
        except (RefusedError, RetryableError):
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001  the rollout boundary
            if len(tasks) == 1:
                return [("", Outcome(0.0, "failed", _said(error)))]
        alone = [slice(row, row + 1) for row in range(len(tasks))]
        return [each for row in alone for each in self._judge_batch(items[row], tasks[row])]

    def _outcome(self, view: View | Unjudged, *, text: Any) -> tuple[str, Outcome]:
        """Returns the text and the outcome of a view, of which a judge may leave out the parts."""
        if isinstance(view, Unjudged):
            return "", Outcome(0.0, view.status, _storable(view.detail))
        shown, score, parts = View(*view)
        if self.scores_parts:
            given: Any = score
            return shown, _checked_parts(Scored(given, parts), text, self.score_range)
        return shown, _checked(score, self.score_range)


def _said(error: BaseException) -> str:
    try:
        return _storable(describe_error(error))
    except BaseException:  # noqa: BLE001  the exception's __str__ may fail
        return _storable(type(error).__name__)


def _storable(text: str) -> str:
    """Returns a brief text without lone surrogates, which tables cannot store."""
    return brief(text).encode(errors="replace").decode()


def _checked(score: object, score_range: ScoreRange) -> Outcome:
    """Returns the outcome for a judge's return value, which may have any type."""
    if inspect.iscoroutine(score):
        score.close()  # avoids Python's warning about a coroutine that was never awaited
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
        detail = f"returned {raw!r}, not in [0, 1]; state in its score_range what counts as 0, 1"
        return Outcome(0.0, "failed", detail)
    return Outcome(raw, "scored")


def _checked_parts(found: object, text: str, score_range: ScoreRange) -> Outcome:
    """Returns the outcome for the return value of a judge that scores parts of a text."""
    if not isinstance(found, Scored):
        kind = type(found).__name__
        detail = f"returned {kind} {found!r}; with scores_parts it must be a Scored"
        return Outcome(0.0, "failed", _storable(detail))
    outcome, parts = _checked(found.score, score_range), list[Part]()
    for end, score in found.parts:
        last = parts[-1].end if parts else 0
        if not last < operator.index(end) <= len(text):
            detail = (
                f"returned a part that ends at {end}; ends must rise from 1 to at most {len(text)},"
                " the characters of the text"
            )
            return Outcome(0.0, "failed", detail)
        part = _checked(score, score_range)
        if part.status != "scored":
            return part
        parts.append(Part(operator.index(end), part.score))
    return outcome._replace(parts=tuple(parts)) if outcome.status == "scored" else outcome


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raises _TimeIsUp in the block after `seconds`, repeatedly; works only in the main thread."""
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
    """Judges the answers in rollouts' texts.

    The judge runs in a fork of this process, which starts with the first text or with `start`. Its
    memory is limited, and what it prints is dropped. A fork that cannot be interrupted is killed
    with the processes it started, and the next text gets a new one. A text at which the fork ends
    is judged once more by a new one if the fork has judged others: what they left behind, such as
    a cache that fills the memory, does not decide about it.
    """

    def __init__(
        self,
        judge: AnswerJudge | PartJudge,
        *,
        answer_pattern: str | None,
        timeout_seconds: float,
        score_range: ScoreRange = None,
        scores_parts: bool = False,
        memory_gb: float = MEMORY_GB,
    ) -> None:
        """Args:
        answer_pattern: Group 1 of its last match is the answer; None: the whole text is.
        scores_parts: Whether the judge is a PartJudge.
        memory_gb: In addition to what this process has when the fork starts.
        """
        self._judge = partial(
            judge_text,
            judge,
            timeout_seconds=timeout_seconds,
            score_range=score_range,
            scores_parts=scores_parts,
        )
        self.scores_parts = scores_parts
        self._answer_pattern = answer_pattern
        self._memory_gb = memory_gb
        self._patience_seconds = timeout_seconds + GRACE_SECONDS
        self._children: list[_Child] = []  # one or none
        self._end = weakref.finalize(self, _end_all, self._children)

    def start(self) -> None:
        """Starts the fork before this process loads what the fork would keep a copy of."""
        self._child()

    def judge_texts(self, texts: Sequence[str], tasks: Sequence[Task]) -> Iterator[Outcome]:
        """Yields the outcome of each rollout's text; failures of the judge become statuses.

        Equal texts of a task are judged once: many rollouts of a group end with the same text.
        """
        asked = {(text, id(task)): (text, task) for text, task in zip(texts, tasks)}
        distinct = [text for text, _ in asked.values()], [task for _, task in asked.values()]
        outcomes = zip(asked, self._ask(*distinct, self._answer_pattern))
        known = dict[tuple[str, int], Outcome]()
        for text, task in zip(texts, tasks):
            while (text, id(task)) not in known:
                known.update([next(outcomes)])
            yield known[text, id(task)]

    def judge_answers(self, answers: Sequence[str], tasks: Sequence[Task]) -> Iterator[Outcome]:
        """Yields the outcome of each answer."""
        return self._ask([each.strip() for each in answers], tasks, None)

    def _ask(
        self, texts: Sequence[str], tasks: Sequence[Task], answer_pattern: str | None
    ) -> Iterator[Outcome]:
        done = 0
        try:
            while done < len(texts):
                child = self._child()
                with suppress(ConnectionError):  # the process has ended; `receive` notices
                    child.send(texts[done:], tasks[done:], answer_pattern)
                outcome: Outcome | None = None
                while done < len(texts) and (outcome := child.receive(self._patience_seconds)):
                    done += 1
                    yield outcome
                if outcome is not None:
                    continue
                outcome = child.end()
                if outcome.status == "timed_out" or child.is_fresh:
                    done += 1
                    yield outcome
        finally:
            if done < len(texts):  # the caller stopped early, and outcomes are left in the pipe
                _end_all(self._children)

    def _child(self) -> "_Child":
        """Returns a live judging process."""
        if not self._children or not self._children[0].is_alive():
            _end_all(self._children)
            self._children.append(_Child(self._judge, self._memory_gb))
        return self._children[0]


class _Child:
    """A fork of this process that judges texts in order."""

    def __init__(self, judge: Asked, memory_gb: float) -> None:
        self.is_fresh = True  # whether it has judged no text yet
        self._memory_gb = memory_gb
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # otherwise both processes write the buffered output
        self.process: ForkProcess = context.Process(
            target=_serve,
            args=(theirs, self._pipe, judge, os.getpid(), int(memory_gb * 1e9)),
            daemon=True,
        )
        self.process.start()
        theirs.close()

    def is_alive(self) -> bool:
        return not self._pipe.closed and self.process.is_alive()

    def send(self, texts: Sequence[str], tasks: Sequence[Task], answer_pattern: str | None) -> None:
        """Sends texts, with each task once, because the rollouts of a group share it."""
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
        """Returns the next outcome; None if the process has ended or takes too long."""
        try:
            if self._pipe.poll(timeout_seconds):
                score, status, detail, parts = json.loads(self._pipe.recv_bytes())
                self.is_fresh = False
                return Outcome(score, status, detail, tuple(Part(*each) for each in parts))
        except (EOFError, ConnectionError):
            self.process.join()
        return None

    def end(self) -> Outcome:
        """Ends the process and those it started; returns the outcome of its unanswered text."""
        code = self.process.exitcode
        assert self.process.pid is not None
        with suppress(ProcessLookupError):  # no process of its group is left
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self._pipe.close()
        if code is None:
            return Outcome(0.0, "timed_out")
        if code == EXIT_OUT_OF_MEMORY:
            detail = f"needs more than {self._memory_gb:g} GB of memory; raise reward.memory_gb"
            return Outcome(0.0, "failed", detail)
        return Outcome(0.0, "failed", f"ended its process, exit code {code}")


def _serve(
    pipe: Connection, parents: Connection, judge: Asked, parent: int, memory_bytes: int
) -> None:
    """Judges texts until the pipe closes."""
    os.setpgrp()  # what the judge starts is killed with it
    parents.close()  # otherwise this process holds the other end of the pipe open
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, which ends this process
    die_with_parent(parent)
    discard_output()
    limit_resources(memory_bytes=memory_bytes, file_bytes=FILE_BYTES)
    own = os.getpid()
    while True:
        try:
            order = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        tasks = [Task(**each) for each in order["tasks"]]
        for text, row in zip(order["texts"], order["rows"]):
            try:
                outcome = judge(text, tasks[row], answer_pattern=order["answer_pattern"])
            except MemoryError:
                os._exit(EXIT_OUT_OF_MEMORY)
            if os.getpid() != own:  # a fork that the judge made has come here, too
                os._exit(1)
            pipe.send_bytes(json.dumps(outcome).encode())


def _end_all(children: list[_Child]) -> None:
    while children:
        children.pop().end()
