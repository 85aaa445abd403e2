"""Replays of rollouts for display."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from grpo.modalities.action_chunks.simulation.base import Moment, act, begin
from grpo.modalities.action_chunks.simulation.camera import Camera, Frame
from grpo.modalities.action_chunks.simulation.metaworld import MetaWorld


class Replay(NamedTuple):
    """A replayed rollout."""

    frames: list[Frame]  # the requested frames
    moments: list[Moment]  # one after each chunk


def replay(
    scene: str, chunks: Sequence[Sequence[Sequence[float]]], *, shown: Collection[int]
) -> Replay:
    """Replays a rollout; frame k is before chunk k, the last frame after all chunks.

    Args:
      chunks: The executed actions.
      shown: Numbers of the frames to draw.
    """
    player, frames, moments = MetaWorld(), list[Frame](), list[Moment]()
    moment = begin(player, scene)
    camera = Camera(*player.scene)
    for number in range(len(chunks) + 1):
        if number in shown:
            frames.append(camera.draw(moment.observation[-3:].astype(np.float64)))
        if number < len(chunks):
            moment = act(player, chunks[number])
            moments.append(moment)
    return Replay(frames, moments)
