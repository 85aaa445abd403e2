"""Sizes and names of Meta-World's environments, without its packages, which take seconds."""

VERSION = "-v3"  # ending of the names of families
ACTIONS = 4  # action dimensions: the hand's motion in three directions and the gripper
OBSERVATIONS = 39  # hand and two objects, now and one step before, and the goal
HAND = 4  # the first numbers of an observation: position and opening of the hand


def instruction_of(family: str) -> str:
    """Returns the instruction of a family: its name as words."""
    return family.removesuffix(VERSION).replace("-", " ")
