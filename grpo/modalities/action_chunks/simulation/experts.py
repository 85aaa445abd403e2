"""Demonstrations by Meta-World's scripted experts with noise on executed actions."""

import warnings

import numpy as np

from grpo.modalities.action_chunks.simulation.base import Demonstration
from grpo.modalities.action_chunks.simulation.metaworld import (
    MetaWorld,
    family_of,
    make_expert,
    split_scene,
)
from grpo.modalities.action_chunks.simulation.sizes import ACTIONS, instruction_of

LONGEST = 250  # maximum steps of a demonstration
STEPS_AFTER_GOAL = 8  # steps recorded after the goal is reached


def demonstrate(scene: str, *, noise: float, seed: int, pixels: int = 0) -> Demonstration:
    """Returns an expert's demonstration in a scene.

    Args:
      noise: Deviation of Gaussian noise on executed actions, so that demonstrations include
        recoveries from mistakes. [Laskey et al., 2017, DART]
      pixels: Side length of pictures; 0: no pictures.
    """
    instruction, _ = split_scene(scene)
    expert, player = make_expert(family_of(instruction)), MetaWorld(pixels)
    generator = np.random.default_rng(seed)
    observation, seen, looked, done = player.start(scene), [], [], []
    left = LONGEST
    is_solved = False
    while left:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the expert warns about every action to be clipped
            action = np.clip(expert.get_action(observation), -1, 1)
        seen.append(observation)
        looked.append(player.render())
        done.append(action)
        shaken = np.clip(action + noise * generator.standard_normal(ACTIONS), -1, 1)
        observation, reached = player.step(shaken.tolist())
        left = min(left - 1, STEPS_AFTER_GOAL) if reached or is_solved else left - 1
        is_solved = is_solved or reached
    return Demonstration(
        instruction=instruction_of(family_of(instruction)),
        observation=np.array(seen),
        action=np.array(done, np.float64),
        picture=np.array(looked),
        is_solved=is_solved,
    )
