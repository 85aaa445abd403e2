"""Texts judged in a process of its own: a judge may raise, hang, exit or crash without harm."""

import json
import multiprocessing
import os
import signal
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess

from grpo.rewards.base import Judge, Outcome, ScoreRange, Task, judge_text
from grpo.runtime.process import die_with_parent

GRACE_SECONDS = 1.0  # behind its own limit, after which a judging process is killed
Asked = Callable[..., Outcome]


class TextJudge:
    """How the answer in a rollout's text is judged.

    The judge runs in a fork of this process, which lives from the first text on: what cannot be
    interrupted is killed, and the next text gets a new one.
    """

    def __init__(
        self,
        judge: Judge,
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
