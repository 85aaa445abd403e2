"""Meta-World's robot arm: scenes as text, environments that share a model, scripted experts.

[Yu et al., 2019, Meta-World; McLean et al., 2025, Meta-World+]
"""

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grpo.errors import MissingExtraError, ParameterError
from grpo.modalities.action_chunks.simulation.base import SEPARATOR, UNSEEN
from grpo.modalities.action_chunks.simulation.camera import Camera
from grpo.schema import PARAMS

try:
    import mujoco
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS
    from metaworld.policies import ENV_POLICY_MAP
except ImportError:
    raise MissingExtraError(
        f"{PARAMS}: task.kind manipulation needs metaworld; run pip install -e '.[manipulation]'"
    ) from None

VERSION = "-v3"
DIGITS = 6  # of a coordinate in meters
ACTIONS = 4  # of a step: the hand's motion in three directions, and the gripper's
GRIPPER = 3  # the action that closes the gripper where it is positive
OBSERVATIONS = 39  # the hand, two objects, the same one step before, and the goal
HAND = 4  # of these, the first: where the hand is, and how far it is open


class MetaWorld:
    """An environment of the family that was asked for last: each holds a model of its own."""

    observations = OBSERVATIONS

    def __init__(self, pixels: int = 0) -> None:
        """Args:
        pixels: Of a picture's side; 0: it has no camera.
        """
        self._family = ""
        self._playing: Any = None
        self.pixels = pixels
        self._camera: Camera | None = None
        self._goal = np.zeros(3)

    def start(self, scene: str) -> NDArray[np.float64]:
        """Returns the first observation of a scene: "pick place | 0.1 0.6 ..." in meters."""
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
        """Returns the next observation, and whether the goal is reached."""
        observation, _, _, _, info = self._playing.step(np.asarray(action))
        success = float(info["success"])
        if not np.isfinite(success):
            raise FloatingPointError(f"success must be a number, got {success}")
        return np.asarray(observation, np.float64), success > 0

    def look(self) -> NDArray[np.uint8]:
        """Returns the scene with a ring around its goal, [color, row, column]."""
        if self._camera is None:
            return UNSEEN
        return np.ascontiguousarray(self._camera.draw(self._goal).transpose(2, 0, 1))

    @property
    def scene(self) -> tuple[Any, Any]:
        """The model and the state of the scene that is played, of MuJoCo."""
        return self._playing.model, self._playing.data


def split_scene(scene: str) -> tuple[str, list[float]]:
    """Returns what a scene's policy is told, and where things are, in meters."""
    instruction, _, numbers = scene.partition(SEPARATOR)
    return instruction, [float(each) for each in numbers.split()]


def instruction_of(family: str) -> str:
    """Returns what a family's policy is told: its name in words."""
    return family.removesuffix(VERSION).replace("-", " ")


def family_of(instruction: str) -> str:
    """Returns the family of an instruction."""
    return instruction.replace(" ", "-") + VERSION


def require_families(families: Sequence[str]) -> None:
    """Raises ParameterError unless Meta-World has all of them, with a scripted expert."""
    known = sorted(set(ALL_V3_ENVIRONMENTS) & set(ENV_POLICY_MAP))
    for each in families:
        if each not in known:
            raise ParameterError(
                f"{PARAMS}: task.families: {each!r} is no environment of Meta-World; "
                f"it has {', '.join(known)}"
            )


def draw_scene(environment: Any, family: str, seed: int) -> str:
    """Returns one scene of a family as text, drawn by the environment itself."""
    environment.seed(seed % 2**31)
    environment.seeded_rand_vec, environment._freeze_rand_vec = True, False
    environment.reset()
    numbers = " ".join(f"{each:.{DIGITS}f}" for each in environment._last_rand_vec)
    return f"{instruction_of(family)}{SEPARATOR}{numbers}"


def make_environment(family: str) -> Any:
    """Returns an environment whose goal is part of what is observed."""
    environment = _shared_class(family)()
    environment._set_task_called = True
    environment._partially_observable = False
    # Cached while the goal was hidden: it would cut the goal to 0.
    environment.__dict__.pop("sawyer_observation_space", None)
    return environment


def make_expert(family: str) -> Any:
    """Returns the scripted expert of a family: `get_action(observation)`."""
    expert: Any = ENV_POLICY_MAP[family]
    return expert()


@cache
def _shared_class(family: str) -> Any:
    """Returns the class of a family whose environments copy one model instead of reading files.

    Reading takes longer than copying, and a batch plays dozens of scenes at once.
    """
    original: Any = ALL_V3_ENVIRONMENTS[family]
    models: list[Any] = []

    def _initialize_simulation(self: Any) -> tuple[Any, Any]:
        if not models:
            models.append(mujoco.MjModel.from_xml_path(self.fullpath))
        model = copy.deepcopy(models[0])
        return model, mujoco.MjData(model)

    return type(original.__name__, (original,), {"_initialize_simulation": _initialize_simulation})
