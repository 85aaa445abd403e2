"""Phase labels of action chunks. No label depends on how or when the rollout ended."""

from collections.abc import Callable
from enum import IntEnum
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

GRIP_FRACTION = 0.5  # least fraction of closing actions in a chunk of a grip
SUSTAINED_FRACTION = 0.75  # fraction of closing actions that starts a grip
TOUCHED_FRACTION = 0.1  # least fraction of closing actions in a pre-grasp
NEAR_CHUNKS = 3  # longest distance of a release ramp from its grip
NO_PHASE = -1

Labeller = Callable[[Float[Tensor, "rollout step"]], Int[Tensor, "rollout step"]]


class GripPhase(IntEnum):
    """Phases of a grasp."""

    APPROACH = 0
    PRE_GRASP = 1
    ACTIVE_GRIP = 2
    RELEASE_RAMP = 3
    TAIL = 4


class TimePhase(IntEnum):
    """Fifths of the horizon, the largest number of chunks of a rollout."""

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
    """Returns the labeller of a name in `PHASE_NAMES`.

    A label depends on its own chunk and earlier ones only. Later chunks are unknown when the policy
    decides, and their number would reveal the outcome.
    """
    labellers: dict[str, Labeller] = {
        "gripper": label_by_gripper,
        "time": partial(label_by_time, max_steps=max_steps),
    }
    return labellers[name]


def label_by_gripper(closed: Float[Tensor, "rollout step"]) -> Int[Tensor, "rollout step"]:
    """Returns a GripPhase per chunk. [PCM, section 4.1]

    The first rule that holds gives the label. Active grip: at least half of the chunk's actions
    close the gripper, and the run of such chunks has reached three quarters. Release ramp: fewer
    than half, at most three chunks after a grip. Pre-grasp: at least a tenth. Tail: after a grip.
    Approach: before any grip.

    Unlike the paper: no label depends on whether a grip follows. The end of a rollout decides that,
    so such a label would depend on the outcome. The paper leaves the threshold of a sustained grip
    open; here it is 0.75.

    Args:
      closed: The fraction of a chunk's actions that close the gripper.
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
    """Returns a TimePhase per chunk; applies to any task.

    Args:
      max_steps: The horizon, in chunks; later chunks belong to the last fifth.
    """
    fifth = torch.arange(closed.shape[1]) * NUM_PHASES // max_steps
    return fifth.clamp(max=NUM_PHASES - 1).expand(closed.shape)
