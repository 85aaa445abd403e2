"""Phases of a rollout in a simulator, a label per action chunk; none reads how or when it ended."""

from collections.abc import Callable
from enum import IntEnum
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

GRIP_FRACTION = 0.5  # of a chunk's actions that close the gripper
SUSTAINED_FRACTION = 0.75  # which a grip must reach
TOUCHED_FRACTION = 0.1
NEAR_CHUNKS = 3
NO_PHASE = -1

Labeller = Callable[[Float[Tensor, "rollout step"]], Int[Tensor, "rollout step"]]


class GripPhase(IntEnum):
    """What the gripper does."""

    APPROACH = 0
    PRE_GRASP = 1
    ACTIVE_GRIP = 2
    RELEASE_RAMP = 3
    TAIL = 4


class TimePhase(IntEnum):
    """Fifths of the horizon, the most chunks that a rollout may have."""

    FIRST = 0
    SECOND = 1
    THIRD = 2
    FOURTH = 3
    FIFTH = 4


NUM_PHASES = len(GripPhase)
PHASE_NAMES: dict[str, list[str]] = {
    "gripper": [each.name.lower().replace("_", "-") for each in GripPhase],
    "time": [f"{each.name.lower()} fifth" for each in TimePhase],
}


def choose_labeller(name: str, max_steps: int) -> Labeller:
    """Returns what labels chunks, by a name of `PHASE_NAMES`.

    A label reads its own chunk and those before it. What follows is not known when a policy
    decides, and whether anything follows is the outcome.
    """
    labellers: dict[str, Labeller] = {
        "gripper": label_by_gripper,
        "time": partial(label_by_time, max_steps=max_steps),
    }
    return labellers[name]


def label_by_gripper(closed: Float[Tensor, "rollout step"]) -> Int[Tensor, "rollout step"]:
    """Returns a GripPhase per chunk. [PCM, section 4.1]

    Active grip: at least half of the chunk's actions close the gripper, and three quarters did
    since it closed. Release ramp: fewer than half, at most three chunks after a grip. Pre-grasp: at
    least a tenth. Tail: after a grip. Approach: before any. In this order.

    Unlike the paper: a chunk is no pre-grasp because a grip follows, and none of the tail because
    no grip follows; a rollout that ends has neither, so such labels would read the outcome. The
    threshold of 0.75, which the paper leaves open, is what makes a run of closing chunks a grip.

    Args:
      closed: The share of a chunk's actions that close the gripper.
    """
    labels = [_label_rollout(fractions) for fractions in closed.tolist()]
    return torch.tensor(labels, dtype=torch.long).view(closed.shape)


def _label_rollout(fractions: list[float]) -> list[GripPhase]:
    """Returns the labels of one rollout, chunk by chunk."""
    labels: list[GripPhase] = []
    is_gripping = False
    last_grip: int | None = None
    for step, fraction in enumerate(fractions):
        is_closing = fraction >= GRIP_FRACTION
        is_gripping = is_closing and (is_gripping or fraction >= SUSTAINED_FRACTION)
        if is_gripping:
            last_grip = step
            labels.append(GripPhase.ACTIVE_GRIP)
        elif last_grip is not None and step - last_grip <= NEAR_CHUNKS and not is_closing:
            labels.append(GripPhase.RELEASE_RAMP)
        elif fraction >= TOUCHED_FRACTION:
            labels.append(GripPhase.PRE_GRASP)
        else:
            labels.append(GripPhase.APPROACH if last_grip is None else GripPhase.TAIL)
    return labels


def label_by_time(
    closed: Float[Tensor, "rollout step"], *, max_steps: int
) -> Int[Tensor, "rollout step"]:
    """Returns a TimePhase per chunk, for any task.

    Args:
      max_steps: The horizon, in chunks; what lies beyond is in the last fifth.
    """
    fifth = torch.arange(closed.shape[1]) * NUM_PHASES // max_steps
    return fifth.clamp(max=NUM_PHASES - 1).expand(closed.shape)
