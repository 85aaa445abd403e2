"""Phases of a rollout in a simulator, a label per action chunk; none reads how it ended."""

from collections.abc import Callable
from enum import IntEnum

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

GRIP_FRACTION = 0.5  # of a chunk's actions that close the gripper
SUSTAINED_FRACTION = 0.75  # from which on a grip counts as meant
TOUCHED_FRACTION = 0.1
NEAR_CHUNKS = 3
NO_PHASE = -1

Labeller = Callable[
    [Float[Tensor, "rollout step"], Bool[Tensor, "rollout step"]], Int[Tensor, "rollout step"]
]


class GripPhase(IntEnum):
    """What the hand is about."""

    APPROACH = 0
    PRE_GRASP = 1
    ACTIVE_GRIP = 2
    RELEASE_RAMP = 3
    TAIL = 4


class ProgressPhase(IntEnum):
    """Fifths of a rollout."""

    FIRST = 0
    SECOND = 1
    THIRD = 2
    FOURTH = 3
    FIFTH = 4


NUM_PHASES = len(GripPhase)


def label_by_gripper(
    closed: Float[Tensor, "rollout step"], mask: Bool[Tensor, "rollout step"]
) -> Int[Tensor, "rollout step"]:
    """Returns a GripPhase per chunk, -1 off the mask. [PCM, section 4.1]

    Active grip: at least half of the chunk's actions close the gripper. Pre-grasp: some do
    (0.1 <= fraction < 0.5), at most three chunks before a grip. Release ramp: fewer than half,
    at most three chunks after a grip. Tail: after the last grip, fewer than a tenth. Approach: the
    rest. In this order: grip, pre-grasp, release, approach (before any grip), tail.

    Unlike the paper, which leaves it open: the threshold of 0.75 is read as what makes a run of
    gripping chunks a grip at all: one of them must reach it; a chunk after some grip that is
    neither near one nor the tail is approach again.

    Args:
      closed: The share of a chunk's actions that close the gripper.
    """
    labels = torch.full(mask.shape, NO_PHASE)
    for row, (fractions, used) in enumerate(zip(closed.tolist(), mask.tolist(), strict=True)):
        count = sum(used)
        grips = _find_grips(fractions[:count])
        for step in range(count):
            labels[row, step] = _label(step, fractions[step], grips)
    return labels


def _find_grips(fractions: list[float]) -> list[int]:
    """Returns the gripping chunks of runs in which one is sustained."""
    grips: list[int] = []
    run: list[int] = []
    for step, fraction in enumerate([*fractions, 0.0]):
        if fraction >= GRIP_FRACTION:
            run.append(step)
            continue
        if any(fractions[each] >= SUSTAINED_FRACTION for each in run):
            grips += run
        run = []
    return grips


def _label(step: int, fraction: float, grips: list[int]) -> GripPhase:
    if step in grips:
        return GripPhase.ACTIVE_GRIP
    ahead = [each - step for each in grips if each > step]
    behind = [step - each for each in grips if each < step]
    is_touching = TOUCHED_FRACTION <= fraction < GRIP_FRACTION
    if is_touching and ahead and min(ahead) <= NEAR_CHUNKS:
        return GripPhase.PRE_GRASP
    if fraction < GRIP_FRACTION and behind and min(behind) <= NEAR_CHUNKS:
        return GripPhase.RELEASE_RAMP
    if behind and not ahead and fraction < TOUCHED_FRACTION:
        return GripPhase.TAIL
    return GripPhase.APPROACH


def label_by_progress(
    closed: Float[Tensor, "rollout step"], mask: Bool[Tensor, "rollout step"]
) -> Int[Tensor, "rollout step"]:
    """Returns which fifth of its rollout a chunk is in, -1 off the mask; for any task."""
    count = mask.sum(dim=1, keepdim=True)
    fifth = torch.arange(mask.shape[1])[None] * NUM_PHASES // count.clamp(min=1)
    return torch.where(mask, fifth, NO_PHASE)


LABELLERS: dict[str, Labeller] = {"gripper": label_by_gripper, "progress": label_by_progress}
PHASE_NAMES: dict[str, list[str]] = {
    "gripper": [each.name.lower().replace("_", "-") for each in GripPhase],
    "progress": [f"{each.name.lower()} fifth" for each in ProgressPhase],
}
