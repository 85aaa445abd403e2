"""An environment that counts, and that raises, hangs, dies or returns nonsense where told to."""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grpo.modalities.action_chunks.simulation.base import NO_PICTURE

BROKEN_OBSERVATIONS: dict[str, Any] = {
    "nan": np.array([np.nan]),
    "infinite": np.array([-np.inf]),
    "infinite in float32": np.array([1e39]),
    "long": np.zeros(2),
    "short": np.zeros(0),
    "nested": np.zeros((1, 1)),
    "a scalar": np.zeros(()),
    "text": np.array(["far"]),
    "complex": np.array([1j]),
    "nothing": None,
}
BROKEN_GOALS: dict[str, Any] = {"an unknown goal": np.nan, "no goal": None, "goals": np.ones(2)}
BROKEN_PICTURES: dict[str, Any] = {
    "a picture unasked": np.zeros((3, 2, 2), np.uint8),
    "a picture of floats": np.zeros((3, 0, 0)),
    "a picture of rows": np.zeros((0, 0, 3), np.uint8),
    "no picture": None,
}


class Faulty:
    """A scene is "what | at": "raises | 3" raises at its third step, "solves | 3" reaches its goal.

    "dies once" and "hangs once" do so where $FAULTY_ONCE names a file that is not there.

    What is observed is the sum of all that was done, so that a lost state would show.
    """

    observations = 1
    pixels = 0

    def __init__(self) -> None:
        self._sum = np.zeros(1)
        self._steps = 0
        self._what, self._at = "", 0

    def start(self, scene: str) -> NDArray[np.float64]:
        self._what, _, at = scene.partition(" | ")
        self._at, self._steps, self._sum = int(at), 0, np.zeros(1)
        self._misbehave()
        return self._answer(BROKEN_OBSERVATIONS, self._sum.copy())

    def step(self, action: Sequence[float]) -> tuple[NDArray[np.float64], bool]:
        self._steps += 1
        self._sum += np.sum(action) * self._steps
        self._misbehave()
        is_solved = self._answer(BROKEN_GOALS, self._what == "solves" and self._is_due)
        return self._answer(BROKEN_OBSERVATIONS, self._sum.copy()), is_solved

    def render(self) -> NDArray[np.uint8]:
        picture: NDArray[np.uint8] = self._answer(BROKEN_PICTURES, NO_PICTURE, at_least=True)
        return picture

    @property
    def _is_due(self) -> bool:
        return self._steps == self._at

    def _answer(self, broken: dict[str, Any], healthy: Any, *, at_least: bool = False) -> Any:
        is_due = self._is_due or (at_least and self._steps >= self._at)
        return broken.get(self._what, healthy) if is_due else healthy

    def _misbehave(self) -> None:
        if self._what == "differs between processes":
            self._sum += os.getpid()
        if not self._is_due:
            return
        if self._what.endswith(" once"):
            mark = Path(os.environ["FAULTY_ONCE"])
            if mark.exists():
                return
            mark.touch()
        match self._what.removesuffix(" once"):
            case "raises":
                raise ArithmeticError("the contact is unstable")
            case "hangs":
                time.sleep(3600)
            case "dies":
                os.kill(os.getpid(), signal.SIGKILL)
