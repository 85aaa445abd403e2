"""The end of a round whose mean reward has stopped rising."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Plateau:
    """Mean rewards of two successive blocks of iterations, of which the later is not higher."""

    before: float
    after: float


def find_plateau(rewards: Sequence[float], *, iterations: int, tolerance: float) -> Plateau | None:
    """Returns the plateau at the end of a series of rewards, or None.

    With N = `iterations`, `after` is the mean of the last N rewards, and `before` that of the N
    rewards before them. There is a plateau if both exist and after - before <= tolerance.

    Args:
      rewards: Mean training reward of each iteration.
      tolerance: In units of the reward.
    """
    if len(rewards) < 2 * iterations:
        return None
    before = math.fsum(rewards[-2 * iterations : -iterations]) / iterations
    after = math.fsum(rewards[-iterations:]) / iterations
    return Plateau(before=before, after=after) if after - before <= tolerance else None
