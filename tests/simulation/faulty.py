"""An environment that counts, and that raises, hangs, dies or returns NaN where its scene says."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from grpo.simulation.base import UNSEEN


class Faulty:
    """A scene is "what | at": "raises | 3" raises at its third step, "solves | 3" reaches its goal.

    What is observed is the sum of all that was done, so that a lost state would show.
    """

    def __init__(self) -> None:
        self._sum = np.zeros(1)
        self._steps = 0
        self._what, self._at = "", 0

    def start(self, scene: str) -> NDArray[np.float64]:
        self._what, _, at = scene.partition(" | ")
        self._at, self._steps, self._sum = int(at), 0, np.zeros(1)
        self._misbehave()
        return self._sum.copy()

    def step(self, action: Sequence[float]) -> tuple[NDArray[np.float64], bool]:
        self._steps += 1
        self._sum += np.sum(action) * self._steps
        is_due = self._steps == self._at
        self._misbehave()
        return self._sum.copy(), is_due and self._what == "solves"

    def look(self) -> NDArray[np.uint8]:
        return UNSEEN

    def _misbehave(self) -> None:
        if self._steps != self._at:
            return
        match self._what:
            case "raises":
                raise ArithmeticError("the contact is unstable")
            case "hangs":
                time.sleep(3600)
            case "dies":
                os._exit(1)
            case "starts once":
                mark = Path(os.environ["STARTED_ONCE"])
                if mark.exists():
                    os._exit(1)
                mark.touch()
            case "nan":
                self._sum[:] = np.nan
