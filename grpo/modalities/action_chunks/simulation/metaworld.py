"""Meta-World's robot arm: scenes as text, environments with a shared model, scripted experts.

[Yu et al., 2019, Meta-World; McLean et al., 2025, Meta-World+]
"""

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grpo.errors import MissingExtraError, ParameterError
from grpo.modalities.action_chunks.simulation.base import NO_PICTURE, SEPARATOR
from grpo.modalities.action_chunks.simulation.camera import Camera
from grpo.modalities.action_chunks.simulation.sizes import (
    OBSERVATIONS,
    VERSION,
    instruction_of,
)
from grpo.schema import PARAMS

try:
    import mujoco
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS
    from metaworld.policies import ENV_POLICY_MAP
except ImportError:
    raise MissingExtraError(
        f"{PARAMS}: task.kind manipulation needs metaworld; run pip install -e '.[manipulation]'"
    ) from None

DIGITS = 6  # decimals of a coordinate in meters
GRIPPER = 3  # index of the gripper's action; positive values close it


class MetaWorld:
    """An environment of the current scene's family; a change of family loads another model."""

    observations = OBSERVATIONS

    def __init__(self, pixels: int = 0) -> None:
        """Args:
        pixels: Side length of a picture; 0: no camera.
        """
        self._family = ""
        self._playing: Any = None
        self.pixels = pixels
        self._camera: Camera | None = None
        self._goal = np.zeros(3)

    def start(self, scene: str) -> NDArray[np.float64]:
        """Returns the first observation of a scene such as "pick place | 0.1 0.6 ..." (meters)."""
        instruction, numbers = split_scene(scene)
        if family_of(instruction) != self._family:
            self._family = family_of(instruction)
            self._playing = make_environment(self._family)
            if self.pixels:
                self._camera = Camera(*self.scene, width=self.pixels, height=self.pixels)
        self._playing._freeze_rand_vec = True
        self._playing._last_rand_vec = np.array(numbers)
        observation, _ = self._playing.reset()
        self._goal = np.array(observation[-3:], np.float64)
        return np.asarray(observation, np.float64)

    def step(self, action: Sequence[float]) -> tuple[NDArray[np.float64], bool]:
        """Returns the next observation and whether the goal is reached."""
        observation, _, _, _, info = self._playing.step(np.asarray(action))
        success = float(info["success"])
        if not np.isfinite(success):
            raise FloatingPointError(f"success must be a number, got {success}")
        return np.asarray(observation, np.float64), success > 0

    def render(self) -> NDArray[np.uint8]:
        """Returns a picture [color, row, column] of the scene with a ring around its goal."""
        if self._camera is None:
            return NO_PICTURE
        return np.ascontiguousarray(self._camera.draw(self._goal).transpose(2, 0, 1))

    @property
    def scene(self) -> tuple[Any, Any]:
        """MuJoCo's model and data of the current scene."""
        return self._playing.model, self._playing.data


def split_scene(scene: str) -> tuple[str, list[float]]:
    """Returns the instruction of a scene and its coordinates in meters."""
    instruction, _, numbers = scene.partition(SEPARATOR)
    return instruction, [float(each) for each in numbers.split()]


def family_of(instruction: str) -> str:
    """Returns the family of an instruction."""
    return instruction.replace(" ", "-") + VERSION


def require_families(families: Sequence[str]) -> None:
    """Raises ParameterError unless Meta-World has all families and their scripted experts."""
    known = sorted(set(ALL_V3_ENVIRONMENTS) & set(ENV_POLICY_MAP))
    for each in families:
        if each not in known:
            raise ParameterError(
                f"{PARAMS}: task.families must be environments of Meta-World, got {each!r}; "
                f"choose from {', '.join(known)}"
            )


def draw_scene(environment: Any, family: str, seed: int) -> str:
    """Returns a random scene of a family as text, drawn by the environment itself."""
    environment.seed(seed % 2**31)
    environment.seeded_rand_vec, environment._freeze_rand_vec = True, False
    environment.reset()
    numbers = " ".join(f"{each:.{DIGITS}f}" for each in environment._last_rand_vec)
    return f"{instruction_of(family)}{SEPARATOR}{numbers}"


def make_environment(family: str) -> Any:
    """Returns an environment whose observations include the goal."""
    environment = _shared_class(family)()
    environment._set_task_called = True
    environment._partially_observable = False
    # This cached space hides the goal and would clip it to 0.
    environment.__dict__.pop("sawyer_observation_space", None)
    return environment


def make_expert(family: str) -> Any:
    """Returns the scripted expert of a family: `get_action(observation)`."""
    expert: Any = ENV_POLICY_MAP[family]
    return expert()


@cache
def _shared_class(family: str) -> Any:
    """Returns a family's class whose environments copy one model instead of reading files.

    A batch runs dozens of scenes in parallel, and copying is faster than reading.
    """
    original: Any = ALL_V3_ENVIRONMENTS[family]
    models: list[Any] = []

    def _initialize_simulation(self: Any) -> tuple[Any, Any]:
        if not models:
            models.append(mujoco.MjModel.from_xml_path(self.fullpath))
        model = copy.deepcopy(models[0])
        return model, mujoco.MjData(model)

    return type(original.__name__, (original,), {"_initialize_simulation": _initialize_simulation})
