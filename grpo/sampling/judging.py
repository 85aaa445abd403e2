"""Judges of texts one by one or together, and of media; their failures become statuses."""

import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grpo.errors import RefusedError, RetryableError
from grpo.rewards.base import (
    ROLLOUTS_PER_CALL,
    AnswerJudge,
    PartJudge,
    Reader,
    Scored,
    Task,
    Unjudged,
    View,
    Viewer,
)
from grpo.sampling.judge_process import MEMORY_GB, JudgeProcess
from grpo.sampling.outcomes import Outcome, ScoreRange, checked, checked_parts, said, storable

ALARM_AGAIN_SECONDS = 0.05  # interval of repeated alarms for a judge that catches the first


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
                return Outcome(0.0, "unparsable", said(error))
            if scores_parts:
                return checked_parts(score, answer, score_range)
            return checked(score, score_range)
    except _TimeIsUp:
        # Switched off again, because an alarm may have interrupted the code that does so.
        signal.setitimer(signal.ITIMER_REAL, 0)
        return Outcome(0.0, "timed_out")
    except MemoryError:
        raise
    except TimeoutError as error:  # e.g. of a server that the judge calls
        return Outcome(0.0, "timed_out", said(error))
    except BaseException as error:  # noqa: BLE001  the rollout boundary; Ctrl-C ends the parent
        return Outcome(0.0, "failed", said(error))


def find_answer(text: str, answer_pattern: str) -> str | None:
    """Returns group 1 of the pattern's last match, stripped; None if there is no match."""
    answers = re.findall(answer_pattern, text)
    return answers[-1].strip() if answers else None


Results = list[tuple[str, Outcome]]  # the text that was read, and the outcome


def _judge_or_alone(
    call: Callable[[Any, Sequence[Task]], Results | Outcome], items: Any, tasks: Sequence[Task]
) -> Results:
    """Returns the results of a call; if it fails, those of calls with one rollout each.

    Args:
      call: Returns the results, or the outcome of its failure.
    """
    found = call(items, tasks)
    if not isinstance(found, Outcome):
        return found
    if len(tasks) == 1:
        return [("", found)]
    alone = [slice(row, row + 1) for row in range(len(tasks))]
    return [each for row in alone for each in _judge_or_alone(call, items[row], tasks[row])]


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
            yield from _judge_or_alone(self._try_call, items[rows], tasks[rows])

    def judge_texts(self, texts: Sequence[str], tasks: Sequence[Task]) -> Iterator[Outcome]:
        """Yields the outcome of each rollout's text; see `judge`."""
        for _, outcome in self.judge(texts, tasks):
            yield outcome

    def _try_call(
        self, items: NDArray[np.uint8] | Sequence[str], tasks: Sequence[Task]
    ) -> Results | Outcome:
        """Returns the results of one call of the judge, or the outcome of its failure."""
        try:
            return self.judge_call(items, tasks)
        except (RefusedError, RetryableError):
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001  the rollout boundary
            return Outcome(0.0, "failed", said(error))

    def judge_call(
        self, items: NDArray[np.uint8] | Sequence[str], tasks: Sequence[Task]
    ) -> Results:
        """Returns the results of one call of the judge, and raises what it raises."""
        view: Any = self.view
        views = view(items, tasks)
        if len(views) != len(tasks):
            # No exception, after which each rollout would be judged alone: that may hide the fault.
            wrong = f"must return {len(tasks)} rewards, returned {len(views)}"
            return [("", Outcome(0.0, "failed", wrong)) for _ in tasks]
        return [self._outcome(each, text=item) for each, item in zip(views, items)]

    def _outcome(self, view: View | Unjudged, *, text: Any) -> tuple[str, Outcome]:
        """Returns the text and the outcome of a view, of which a judge may leave out the parts."""
        if isinstance(view, Unjudged):
            return "", Outcome(0.0, view.status, storable(view.detail))
        shown, score, parts = View(*view)
        if self.scores_parts:
            given: Any = score
            return shown, checked_parts(Scored(given, parts), text, self.score_range)
        return shown, checked(score, self.score_range)


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


class TextJudge:
    """Judges the answers in rollouts' texts.

    The judge runs in a process of its own, see `JudgeProcess`.
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
        judge_one = partial(
            judge_text,
            judge,
            timeout_seconds=timeout_seconds,
            score_range=score_range,
            scores_parts=scores_parts,
        )
        self.scores_parts = scores_parts
        self.process = JudgeProcess(
            lambda texts, tasks, answer_pattern: [
                judge_one(text, task, answer_pattern=answer_pattern)
                for text, task in zip(texts, tasks)
            ],
            timeout_seconds=timeout_seconds,
            memory_gb=memory_gb,
        )
        self._answer_pattern = answer_pattern

    def judge_texts(self, texts: Sequence[str], tasks: Sequence[Task]) -> Iterator[Outcome]:
        """Yields the outcome of each rollout's text; failures of the judge become statuses.

        Equal texts of a task are judged once: many rollouts of a group end with the same text.
        """
        asked = {(text, id(task)): (text, task) for text, task in zip(texts, tasks)}
        distinct = [text for text, _ in asked.values()], [task for _, task in asked.values()]
        outcomes = zip(asked, self.process.ask(*distinct, self._answer_pattern))
        known = dict[tuple[str, int], Outcome]()
        for text, task in zip(texts, tasks):
            while (text, id(task)) not in known:
                known.update([next(outcomes)])
            yield known[text, id(task)]

    def judge_answers(self, answers: Sequence[str], tasks: Sequence[Task]) -> Iterator[Outcome]:
        """Yields the outcome of each answer."""
        return self.process.ask([each.strip() for each in answers], tasks, None)


class LimitedJudge:
    """Judges the whole texts of several rollouts together, in a process of its own with limits."""

    def __init__(
        self, joint: JointJudge, *, timeout_seconds: float, memory_gb: float = MEMORY_GB
    ) -> None:
        """Args:
        timeout_seconds: Per rollout of a call.
        memory_gb: In addition to what this process has when the fork starts.
        """
        self.scores_parts = joint.scores_parts

        def judge_call(
            texts: Sequence[str], tasks: Sequence[Task], answer_pattern: str | None
        ) -> list[Outcome]:
            limited = partial(_try_call_within, joint, timeout_seconds=timeout_seconds)
            return [outcome for _, outcome in _judge_or_alone(limited, texts, tasks)]

        self.process = JudgeProcess(
            judge_call,
            timeout_seconds=timeout_seconds,
            memory_gb=memory_gb,
            texts_per_call=joint.rollouts_per_call,
        )

    def judge_texts(self, texts: Sequence[str], tasks: Sequence[Task]) -> Iterator[Outcome]:
        """Yields the outcome of each rollout's text; failures of the judge become statuses."""
        return self.process.ask(texts, tasks, None)


def _try_call_within(
    joint: JointJudge, texts: Sequence[str], tasks: Sequence[Task], *, timeout_seconds: float
) -> Results | Outcome:
    """Returns the results of one call of the judge, or the outcome of its failure.

    Args:
      timeout_seconds: Per rollout.

    Raises:
      MemoryError: If the judge raises it. It may still hold the memory.
    """
    try:
        with _time_limit(timeout_seconds * len(texts)):
            return joint.judge_call(texts, tasks)
    except _TimeIsUp:
        # Switched off again, because an alarm may have interrupted the code that does so.
        signal.setitimer(signal.ITIMER_REAL, 0)
        return Outcome(0.0, "timed_out")
    except MemoryError:
        raise
    except BaseException as error:  # noqa: BLE001  the rollout boundary; Ctrl-C ends the parent
        return Outcome(0.0, "failed", said(error))
