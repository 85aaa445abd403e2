"""The interface of a simulator: environments, their answers, and endings of rollouts."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

SEPARATOR = " | "  # in a scene's text, between the instruction and the coordinates


class Ending(IntEnum):
    """How a rollout ended; stored with the rollout."""

    STEP_LIMIT = 0
    SUCCESS = 1
    FAILED = 2  # the environment raised, crashed twice, or returned a value that cannot be stored
    TIMED_OUT = 3  # the environment did not answer in time


NO_PICTURE = np.zeros((3, 0, 0), np.uint8)  # the picture of an environment without a camera


class Moment(NamedTuple):
    """An environment's answer to an order: the state after it."""

    observation: NDArray[np.float32]
    executed: int  # number of executed actions of the chunk; the rest came after the end
    ending: Ending | None  # None: the rollout continues
    picture: NDArray[np.uint8] = NO_PICTURE  # square, channels first; no pixels at the end


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """Observations of an expert and its actions for them, without the noise of execution."""

    instruction: str
    observation: NDArray[np.float64]  # shape [step, number]
    action: NDArray[np.float64]  # shape [step, dimension], in [-1, 1]
    picture: NDArray[np.uint8]  # shape [step, 3, pixels, pixels]
    is_solved: bool


@runtime_checkable
class Environment(Protocol):
    """A simulated scene."""

    @property
    def observations(self) -> int:
        """Size of an observation."""
        ...

    @property
    def pixels(self) -> int:
        """Side length of a picture; 0: no camera."""
        ...

    def start(self, scene: str) -> NDArray[np.float64]:
        """Returns the first observation of a scene; it is a function of the scene alone."""
        ...

    def step(self, action: Sequence[float]) -> tuple[NDArray[np.float64], bool]:
        """Returns the next observation and whether the goal is reached."""
        ...

    def render(self) -> NDArray[np.uint8]:
        """Returns a square picture of the scene, channels first; no pixels without a camera."""
        ...


def act(environment: Environment, actions: Sequence[Sequence[float]]) -> Moment:
    """Returns the moment after a chunk of actions; stops when the goal is reached.

    Raises:
      ValueError: If an answer of the environment cannot be stored.
    """
    observation = np.zeros(0, np.float32)
    for executed, action in enumerate(actions, start=1):
        answer, is_solved = environment.step(action)
        observation = _to_stored(environment, answer)
        if not isinstance(is_solved, bool | np.bool_):
            raise ValueError(f"whether the goal is reached must be a bool, got {is_solved!r}")
        if is_solved:
            return Moment(observation, executed, Ending.SUCCESS)
    return Moment(observation, len(actions), None, _render(environment))


def begin(environment: Environment, scene: str) -> Moment:
    """Returns the first moment of a scene.

    Raises:
      ValueError: If an answer of the environment cannot be stored.
    """
    observation = _to_stored(environment, environment.start(scene))
    return Moment(observation, 0, None, _render(environment))


def _to_stored(environment: Environment, observation: object) -> NDArray[np.float32]:
    """Returns an observation in float32, as it is stored; a finite float64 may overflow there."""
    numbers = np.asarray(observation)
    if numbers.dtype.kind not in "iuf" or numbers.shape != (environment.observations,):
        raise ValueError(
            f"an observation must have {environment.observations} numbers, got "
            f"{numbers.dtype} of shape {list(numbers.shape)}"
        )
    with np.errstate(over="ignore"):
        stored = numbers.astype(np.float32)
    if not np.isfinite(stored).all():
        raise ValueError("an observation must be finite in float32")
    return stored


def _render(environment: Environment) -> NDArray[np.uint8]:
    picture = np.asarray(environment.render())
    shape = (3, environment.pixels, environment.pixels)
    if picture.dtype != np.uint8 or picture.shape != shape:
        raise ValueError(
            f"a picture must be uint8 of shape {list(shape)}, got {picture.dtype} of shape "
            f"{list(picture.shape)}"
        )
    return picture
