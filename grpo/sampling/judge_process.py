"""The process that judges texts: a fork with limits, replaced when it ends or hangs."""

import json
import multiprocessing
import os
import signal
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess

from grpo.rewards.base import Part, Task
from grpo.runtime.artifacts.files import leave_locks
from grpo.runtime.process import die_with_parent, discard_output, limit_resources
from grpo.sampling.outcomes import Outcome

GRACE_SECONDS = 1.0  # time after the limit until the process is killed
MEMORY_GB = 4.0  # unless reward.memory_gb is stated
FILE_BYTES = 2**30  # of a file that the process writes
EXIT_OUT_OF_MEMORY = 77

# Judges the texts of one call within their time limit: (texts, tasks, answer pattern) -> outcomes.
Call = Callable[[Sequence[str], Sequence[Task], str | None], list[Outcome]]


class JudgeProcess:
    """Judges texts in a fork of this process, which starts with the first text or with `start`.

    Its memory is limited, and what it prints is dropped. A fork that cannot be interrupted is
    killed with the processes it started, and the next text gets a new one. If the fork ends in a
    call with several texts, each of them is judged alone. A text at which it ends is judged once
    more by a new fork if the old one has judged others: what they left behind, such as a cache that
    fills the memory, does not decide about it.
    """

    def __init__(
        self, judge: Call, *, timeout_seconds: float, memory_gb: float, texts_per_call: int = 1
    ) -> None:
        """Args:
        timeout_seconds: Per text of a call.
        memory_gb: In addition to what this process has when the fork starts.
        """
        self.memory_gb = memory_gb
        self._judge = judge
        self._timeout_seconds = timeout_seconds
        self._texts_per_call = texts_per_call
        self._children: list[_Child] = []  # one or none
        self._end = weakref.finalize(self, _end_all, self._children)

    def start(self) -> None:
        """Starts the fork before this process loads what the fork would keep a copy of."""
        self._child()

    def ask(
        self, texts: Sequence[str], tasks: Sequence[Task], answer_pattern: str | None
    ) -> Iterator[Outcome]:
        """Yields the outcome of each text."""
        done = alone = 0  # texts before `alone` are judged one by one
        try:
            while done < len(texts):
                child = self._child()
                size = 1 if done < alone else self._texts_per_call
                end = alone if done < alone else len(texts)
                with suppress(ConnectionError):  # the process has ended; `receive` notices
                    child.send(texts[done:end], tasks[done:end], answer_pattern, size)
                patience_seconds = size * self._timeout_seconds + GRACE_SECONDS
                outcomes: list[Outcome] | None = None
                while done < end and (outcomes := child.receive(patience_seconds)):
                    done += len(outcomes)
                    yield from outcomes
                if outcomes is not None:
                    continue
                outcome = child.end()
                if size > 1:
                    alone = min(done + size, len(texts))
                elif outcome.status == "timed_out" or child.is_fresh:
                    done += 1
                    yield outcome
        finally:
            if done < len(texts):  # the caller stopped early, and outcomes are left in the pipe
                _end_all(self._children)

    def _child(self) -> "_Child":
        """Returns a live judging process."""
        if not self._children or not self._children[0].is_alive():
            _end_all(self._children)
            self._children.append(_Child(self._judge, self.memory_gb))
        return self._children[0]


class _Child:
    """A fork of this process that judges texts in order."""

    def __init__(self, judge: Call, memory_gb: float) -> None:
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

    def send(
        self,
        texts: Sequence[str],
        tasks: Sequence[Task],
        answer_pattern: str | None,
        texts_per_call: int,
    ) -> None:
        """Sends texts, with each task once, because the rollouts of a group share it."""
        distinct = {id(task): task for task in tasks}
        rows = {each: row for row, each in enumerate(distinct)}
        order = {
            "texts": list(texts),
            "tasks": [asdict(task) for task in distinct.values()],
            "rows": [rows[id(task)] for task in tasks],
            "answer_pattern": answer_pattern,
            "texts_per_call": texts_per_call,
        }
        self._pipe.send_bytes(json.dumps(order).encode())

    def receive(self, timeout_seconds: float) -> list[Outcome] | None:
        """Returns the outcomes of a call; None if the process has ended or takes too long."""
        try:
            if self._pipe.poll(timeout_seconds):
                rows = json.loads(self._pipe.recv_bytes())
                self.is_fresh = False
                return [
                    Outcome(score, status, detail, tuple(Part(*each) for each in parts))
                    for score, status, detail, parts in rows
                ]
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
    pipe: Connection, parents: Connection, judge: Call, parent: int, memory_bytes: int
) -> None:
    """Judges texts until the pipe closes."""
    os.setpgrp()  # what the judge starts is killed with it
    parents.close()  # otherwise this process holds the other end of the pipe open
    leave_locks()  # what the judge starts may live on after the stage
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
        texts, size = order["texts"], order["texts_per_call"]
        distinct = [Task(**each) for each in order["tasks"]]
        tasks = [distinct[row] for row in order["rows"]]
        for start in range(0, len(texts), size):
            call = slice(start, start + size)
            try:
                outcomes = judge(texts[call], tasks[call], order["answer_pattern"])
            except MemoryError:
                os._exit(EXIT_OUT_OF_MEMORY)
            if os.getpid() != own:  # a fork that the judge made has come here, too
                os._exit(1)
            pipe.send_bytes(json.dumps(outcomes).encode())


def _end_all(children: list[_Child]) -> None:
    while children:
        children.pop().end()
