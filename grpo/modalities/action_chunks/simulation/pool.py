"""A pool of simulator processes that tolerates exceptions, hangs and crashes."""

import base64
import json
import math
import time
import weakref
from collections.abc import Iterable, Mapping

import numpy as np

from grpo.modalities.action_chunks.simulation.base import Ending, Moment
from grpo.runtime.child import Process

START_SECONDS = 120.0  # for a process to import its simulator
Order = str | list[list[float]]  # a scene to start, or a chunk of actions


class EnvironmentPool:
    """Slots that run scenes, divided among processes.

    The answers of a slot depend on its orders alone, not on the number of processes or on their
    crashes. If the process of a scene crashes or times out, the pool replays the scene once in a
    new process. Time-outs are replayed because a loaded machine, like a kill, says nothing about
    the scene; a scene that always hangs costs one more time-out. The pool replays the other scenes
    of a lost process at their next order.
    """

    def __init__(
        self,
        simulator: str,
        *,
        processes: int,
        timeout_seconds: float,
        settings: Mapping[str, int] | None = None,
    ) -> None:
        """Args:
        simulator: The environments' class, as "module:class".
        timeout_seconds: Limit for one answer: the start of a scene or one chunk of actions.
        settings: Keyword arguments of the environments' constructor.
        """
        self._simulator = (simulator, json.dumps(settings or {}))
        self._timeout_seconds = timeout_seconds
        self._workers: list[_Worker | None] = [None] * processes
        self._played: dict[int, _SceneLog] = {}
        self.seconds = 0.0  # total time spent in `play`
        self._end = weakref.finalize(self, _stop, self._workers)

    def play(self, orders: Mapping[int, Order]) -> dict[int, Moment]:
        """Returns the answer of every slot; a failed slot must start a new scene."""
        began = time.perf_counter()
        for slot, order in orders.items():
            if isinstance(order, str):
                self._played[slot] = _SceneLog()
            self._played[slot].orders.append(order)
        moments: dict[int, Moment] = {}
        number = len(self._workers)
        shares = [[slot for slot in orders if slot % number == index] for index in range(number)]
        for index, share in enumerate(shares):
            self._send(index, share)
        for index, share in enumerate(shares):
            moments |= self._collect(index, share)
        for slot, moment in moments.items():
            if moment.ending is not None:
                self._played.pop(slot)
        self.seconds += time.perf_counter() - began
        return {slot: moments[slot] for slot in orders}

    def close(self) -> None:
        """Ends all processes; garbage collection of the pool does the same."""
        self._end()

    def __enter__(self) -> "EnvironmentPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, index: int, slots: Iterable[int]) -> None:
        """Sends a process the orders that it has not received; for a new scene, all of them."""
        scenes = {slot: self._played[slot] for slot in slots}
        if not scenes:
            return
        worker = self._workers[index]
        if worker is None:
            worker = self._workers[index] = _Worker(*self._simulator)
        worker.send(scenes)

    def _collect(self, index: int, share: Iterable[int]) -> dict[int, Moment]:
        """Returns the answers of one process; replaces the process whenever it is lost."""
        moments: dict[int, Moment] = {}
        waiting = list(share)
        while waiting:
            slot = waiting[0]  # a process answers in the order of its requests
            try:
                moments[slot] = self._receive(index, slot)
            except (TimeoutError, ConnectionError) as loss:
                self._stop_worker(index)
                if self._played[slot].was_lost:
                    is_late = isinstance(loss, TimeoutError)
                    moments[slot] = _lost(Ending.TIMED_OUT if is_late else Ending.FAILED)
                self._played[slot].was_lost = True
                waiting = [each for each in waiting if each not in moments]
                self._send(index, waiting)
            else:
                waiting.pop(0)
        return moments

    def _receive(self, index: int, slot: int) -> Moment:
        """Returns the answer to the last order of a slot.

        The answer is a failure if the scene was replayed and its answers differ from before.

        Raises:
          TimeoutError: If an answer takes too long.
          ConnectionError: If the process has crashed.
        """
        worker, played = self._workers[index], self._played[slot]
        assert worker is not None
        line, repeats = "", True
        while worker.answered[slot] < len(played.orders):
            number = worker.answered[slot]
            line = worker.receive(self._timeout_seconds)
            worker.answered[slot] += 1
            if number == len(played.answers):
                played.answers.append(hash(line))
            repeats &= played.answers[number] == hash(line)
        return _read(line) if repeats else _lost(Ending.FAILED)

    def _stop_worker(self, index: int) -> None:
        worker = self._workers[index]
        assert worker is not None
        worker.stop()
        self._workers[index] = None


class _SceneLog:
    """Orders to a slot since the start of its scene, and hashes of its answers."""

    def __init__(self) -> None:
        self.orders: list[Order] = []
        self.answers: list[int] = []
        self.was_lost = False  # whether a process was lost since the start of the scene


class _Worker:
    """The other end of `grpo.modalities.action_chunks.simulation.worker`."""

    def __init__(self, simulator: str, settings: str) -> None:
        self._process = Process(
            "grpo.modalities.action_chunks.simulation.worker", simulator, settings
        )
        self._has_started = False
        self._playing: dict[int, _SceneLog] = {}
        self.answered: dict[int, int] = {}  # slot -> number of answered orders of its scene

    def send(self, scenes: Mapping[int, _SceneLog]) -> None:
        """Sends new orders of some scenes; a failure to send shows up in `receive`."""
        asked: list[tuple[int, Order]] = []
        for slot, played in scenes.items():
            if self._playing.get(slot) is not played:
                self._playing[slot], self.answered[slot] = played, 0
            asked += [(slot, order) for order in played.orders[self.answered[slot] :]]
        self._process.send(json.dumps(asked), timeout_seconds=START_SECONDS)

    def receive(self, timeout_seconds: float) -> str:
        """Returns the next answer.

        Raises:
          TimeoutError: If the answer takes too long.
          ConnectionError: If the process has crashed.
        """
        if not self._has_started:
            self._process.read_line(START_SECONDS)
            self._has_started = True
        return self._process.read_line(timeout_seconds)

    def stop(self) -> None:
        """Ends the process."""
        self._process.stop()


def _stop(workers: "list[_Worker | None]") -> None:
    for worker in workers:
        if worker is not None:
            worker.stop()


def _read(line: str) -> Moment:
    """Parses the answer of a process."""
    _, observation, executed, ending, seen = json.loads(line)
    known = None if ending is None else Ending(ending)
    pixels = np.frombuffer(base64.b64decode(seen), np.uint8)
    side = math.isqrt(len(pixels) // 3)
    picture = pixels.reshape(3, side, side)
    return Moment(np.array(observation, np.float32), executed, known, picture)


def _lost(ending: Ending) -> Moment:
    """Returns the moment of a slot whose process gave no answer."""
    return Moment(np.zeros(0, np.float32), 0, ending)
