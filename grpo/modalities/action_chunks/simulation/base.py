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
    FAILED = 2  # the environment raised, died twice, or returned what cannot be stored
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

    @property
    def observations(self) -> int:
        """Numbers of an observation."""
        ...

    @property
    def pixels(self) -> int:
        """Of a picture's side; 0: it has no camera."""
        ...

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
    return Moment(observation, len(actions), None, _look(environment))


def begin(environment: Environment, scene: str) -> Moment:
    """Returns the first moment of a scene.

    Raises:
      ValueError: If an answer of the environment cannot be stored.
    """
    observation = _to_stored(environment, environment.start(scene))
    return Moment(observation, 0, None, _look(environment))


def _to_stored(environment: Environment, observation: object) -> NDArray[np.float32]:
    """Returns an observation as it is stored: what is finite in float64 may not be in float32."""
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


def _look(environment: Environment) -> NDArray[np.uint8]:
    picture = np.asarray(environment.look())
    shape = (3, environment.pixels, environment.pixels)
    if picture.dtype != np.uint8 or picture.shape != shape:
        raise ValueError(
            f"a picture must be uint8 of shape {list(shape)}, got {picture.dtype} of shape "
            f"{list(picture.shape)}"
        )
    return picture
