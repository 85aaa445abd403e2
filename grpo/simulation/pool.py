"""Environments in processes of their own, which may raise, hang or die without harm."""

import base64
import json
import math
import time
import weakref
from collections.abc import Mapping

import numpy as np

from grpo.errors import GrpoError
from grpo.process import Process
from grpo.simulation.base import Ending, Moment

START_SECONDS = 120.0  # for a process to import its simulator, beside the time of an answer
Order = str | list[list[float]]  # a scene to start, or a chunk of actions


class EnvironmentPool:
    """Slots in which scenes are played, divided among processes.

    What a slot answers depends on its orders alone: not on how many processes there are, nor on
    what becomes of the others. When a process dies or does not answer, the slot it was at ends,
    and a new process repeats what its other slots were asked, to the same state.
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
        simulator: The class of its environments, as "module:class".
        timeout_seconds: For one answer: a scene started, or a chunk of actions carried out.
        settings: What environments are made with.
        """
        self._simulator = (simulator, json.dumps(settings or {}))
        self._timeout_seconds = timeout_seconds
        self._workers: list[_Worker | None] = [None] * processes
        self._history: dict[int, list[Order]] = {}
        self.seconds = 0.0  # that the pool was waited for
        self._end = weakref.finalize(self, _stop, self._workers)

    def play(self, orders: Mapping[int, Order]) -> dict[int, Moment]:
        """Returns what every slot answers; a slot that failed must be started anew."""
        began = time.perf_counter()
        for slot, order in orders.items():
            self._history[slot] = [*([] if isinstance(order, str) else self._history[slot]), order]
        moments: dict[int, Moment] = {}
        number = len(self._workers)
        shares = [{s: orders[s] for s in orders if s % number == index} for index in range(number)]
        for index, share in enumerate(shares):
            if share:
                self._worker(index).send(share)
        for index, share in enumerate(shares):
            moments |= self._collect(index, share)
        for slot, moment in moments.items():
            if moment.ending is not None:
                self._history.pop(slot)
        self.seconds += time.perf_counter() - began
        return {slot: moments[slot] for slot in orders}

    def close(self) -> None:
        """Ends all processes; so does the end of the pool itself."""
        self._end()

    def __enter__(self) -> "EnvironmentPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _worker(self, index: int) -> "_Worker":
        worker = self._workers[index]
        if worker is None:
            worker = self._workers[index] = _Worker(*self._simulator)
        return worker

    def _collect(self, index: int, share: Mapping[int, Order]) -> dict[int, Moment]:
        """Returns the answers of one process, which is replaced as often as it is lost."""
        moments: dict[int, Moment] = {}
        while waiting := [slot for slot in share if slot not in moments]:
            try:
                slot, moment = self._worker(index).receive(self._timeout_seconds)
                moments[slot] = moment
            except TimeoutError:
                moments[waiting[0]] = _lost(Ending.TIMED_OUT)
                self._replace(index, share, moments)
            except ConnectionError:
                moments[waiting[0]] = _lost(Ending.FAILED)
                self._replace(index, share, moments)
        return moments

    def _replace(self, index: int, share: Mapping[int, Order], moments: dict[int, Moment]) -> None:
        """Starts a process again, brings its slots to where they were, and goes on with `share`.

        A slot whose environment raises on the way there is lost too.

        Raises:
          GrpoError: If the new process dies or does not answer on the way there.
        """
        lost = self._workers[index]
        assert lost is not None
        lost.stop()
        worker = self._workers[index] = _Worker(*self._simulator)
        for slot, past in self._history.items():
            is_over = slot in moments and moments[slot].ending is not None
            if slot % len(self._workers) != index or is_over:
                continue
            answered = past if slot in moments or slot not in share else past[:-1]
            for order in answered:
                worker.send({slot: order})
                try:
                    worker.receive(self._timeout_seconds)
                except (TimeoutError, ConnectionError):
                    raise GrpoError(
                        "a lost process of the simulator could not be brought back to where it was "
                        f"in {self._timeout_seconds:g} seconds per answer; raise "
                        "policy.scenes.timeout_seconds or rerun"
                    ) from None
        worker.send({slot: order for slot, order in share.items() if slot not in moments})


class _Worker:
    """The other end of `grpo.simulation.worker`."""

    def __init__(self, simulator: str, settings: str) -> None:
        self._process = Process("grpo.simulation.worker", simulator, settings)
        self._has_answered = False

    def send(self, orders: Mapping[int, Order]) -> None:
        """Sends orders; what became of them shows when answers are received."""
        self._process.send(json.dumps(list(orders.items())))

    def receive(self, timeout_seconds: float) -> tuple[int, Moment]:
        """Returns the next answer and its slot.

        Raises:
          TimeoutError: If it does not come in time.
          ConnectionError: If the process has died.
        """
        start = 0.0 if self._has_answered else START_SECONDS
        line = self._process.read_line(timeout_seconds + start)
        self._has_answered = True
        slot, observation, executed, ending, seen = json.loads(line)
        known = None if ending is None else Ending(ending)
        pixels = np.frombuffer(base64.b64decode(seen), np.uint8)
        side = math.isqrt(len(pixels) // 3)
        picture = pixels.reshape(3, side, side)
        return slot, Moment(np.array(observation, np.float32), executed, known, picture)

    def stop(self) -> None:
        """Ends the process."""
        self._process.stop()


def _stop(workers: "list[_Worker | None]") -> None:
    for worker in workers:
        if worker is not None:
            worker.stop()


def _lost(ending: Ending) -> Moment:
    """Returns the moment of a slot whose process gave no answer."""
    return Moment(np.zeros(0, np.float32), 0, ending)
