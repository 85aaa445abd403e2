"""What a simulator shows of a scene, and how a rollout in it ends."""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

SEPARATOR = " | "  # in a scene's text, behind what the policy is told


class Ending(IntEnum):
    """How a rollout ended; stored with it."""

    STEP_LIMIT = 0
    SUCCESS = 1
    FAILED = 2  # the environment raised, died or returned what is no number
    TIMED_OUT = 3  # the environment did not answer in time


UNSEEN = np.zeros((3, 0, 0), np.uint8)  # the picture of who does not look


class Moment(NamedTuple):
    """What an environment answers: the state after what was asked of it."""

    observation: NDArray[np.float32]
    executed: int  # actions of the chunk that were carried out; the others came after the end
    ending: Ending | None  # None: it goes on
    picture: NDArray[np.uint8] = UNSEEN  # square, color by color; no pixels at the end


@runtime_checkable
class Environment(Protocol):
    """One scene that can be acted in."""

    def start(self, scene: str) -> NDArray[np.float64]:
        """Returns the first observation of a scene, the same for the same scene."""
        ...

    def step(self, action: Sequence[float]) -> tuple[NDArray[np.float64], bool]:
        """Returns the next observation, and whether the goal is reached."""
        ...

    def look(self) -> NDArray[np.uint8]:
        """Returns a square picture of the scene, color by color; no pixels if it has no camera."""
        ...


def act(environment: Environment, actions: Sequence[Sequence[float]]) -> Moment:
    """Returns the moment after a chunk of actions; those behind the goal are not carried out.

    Raises:
      FloatingPointError: If an observation is no number.
    """
    observation = np.zeros(0)
    for executed, action in enumerate(actions, start=1):
        observation, is_solved = environment.step(action)
        _require_numbers(observation)
        if is_solved:
            return Moment(observation.astype(np.float32), executed, Ending.SUCCESS)
    return Moment(observation.astype(np.float32), len(actions), None, environment.look())


def begin(environment: Environment, scene: str) -> Moment:
    """Returns the first moment of a scene.

    Raises:
      FloatingPointError: If the observation is no number.
    """
    observation = environment.start(scene)
    _require_numbers(observation)
    return Moment(observation.astype(np.float32), 0, None, environment.look())


def _require_numbers(observation: NDArray[np.float64]) -> None:
    if not np.isfinite(observation).all():
        raise FloatingPointError("an observation must be finite")
