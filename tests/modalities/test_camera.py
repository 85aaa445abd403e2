"""Laws of pictures of a scene: they show what moved and where, the same bytes each time."""

import numpy as np
import pytest

from grpo.modalities.action_chunks.simulation.camera import (
    GOAL_COLOR,
    GOAL_PIXELS,
    HEIGHT,
    WIDTH,
    Camera,
    Frame,
)
from grpo.modalities.action_chunks.simulation.metaworld import MetaWorld
from grpo.modalities.action_chunks.simulation.replay import replay

SCENE = "push | 0.05 0.62 0.02 -0.08 0.85 0.01"  # where the puck is, then its goal, in meters
PUCK, GOAL = np.array([0.05, 0.62, 0.02]), np.array([-0.08, 0.85, 0.01])
DOWN, LEFT = [0.0, 0.0, -1.0, 0.0], [-1.0, 0.0, 0.0, 0.0]
CHUNKS = [[DOWN] * 4, [LEFT] * 4, [LEFT] * 2]


def started() -> tuple[MetaWorld, Camera]:
    player = MetaWorld()
    player.start(SCENE)
    return player, Camera(*player.scene)


def distance_from(point: np.ndarray, camera: Camera) -> np.ndarray:
    """Returns how many pixels each pixel is away from where a point is seen."""
    column, row = camera.locate(point)
    return np.hypot(np.arange(WIDTH) - column, np.arange(HEIGHT)[:, None] - row)


def middle(where: np.ndarray) -> np.ndarray:
    """Returns the mean column and row of some pixels."""
    return np.argwhere(where)[:, ::-1].mean(axis=0)


def is_goal(frame: Frame) -> np.ndarray:
    return (frame == GOAL_COLOR).all(axis=-1)


def seen_goal(observation: np.ndarray) -> np.ndarray:
    return observation[-3:].astype(np.float32).astype(np.float64)


def test_a_hand_that_moves_changes_pixels_where_it_was_and_where_it_is():
    player, camera = started()
    before = camera.draw(GOAL)
    hands = [player.start(SCENE)[:3]]
    for action in [LEFT] * 20:
        observation, _ = player.step(action)
    hands.append(observation[:3])
    changed = (camera.draw(GOAL) != before).any(axis=-1)
    for hand in hands:
        assert changed[distance_from(hand, camera) < 8].mean() > 0.3
    # The right edge of the table is where neither the arm nor its shadow comes.
    assert not changed[-HEIGHT // 4 :, -WIDTH // 4 :].any()
    assert changed.mean() < 0.4


def test_a_point_is_seen_where_a_ray_hits_what_lies_there():
    _, camera = started()
    frame = camera.draw(GOAL)
    is_puck = (frame[..., 0] > 0) & (frame[..., 1:] == 0).all(axis=-1)  # nothing else is pure red
    assert is_puck.sum() > 10
    np.testing.assert_allclose(middle(is_puck), camera.locate(PUCK), atol=1.5)


def test_the_ring_is_around_where_the_goal_is():
    _, camera = started()
    for goal in (GOAL, PUCK, np.array([0.2, 0.5, 0.3])):
        ring = is_goal(camera.draw(goal))
        np.testing.assert_allclose(middle(ring), camera.locate(goal), atol=0.5)
        assert np.abs(distance_from(goal, camera)[ring] - GOAL_PIXELS).max() < 1
    without = camera.draw(np.array([0.0, 5.0, 0.0]))
    assert not is_goal(without).any()


def test_a_replay_ends_as_the_scene_does_when_it_is_acted_in_by_hand():
    shown = replay(SCENE, CHUNKS, shown=range(len(CHUNKS) + 1))
    player, camera = started()
    expected = [camera.draw(seen_goal(player.start(SCENE)))]
    for chunk in CHUNKS:
        for action in chunk:
            observation, is_solved = player.step(action)
        expected.append(camera.draw(seen_goal(observation)))
    assert len(shown.frames) == len(expected) == 4
    assert all(map(np.array_equal, shown.frames, expected))
    assert [each.executed for each in shown.moments] == [4, 4, 2]
    assert shown.moments[-1].ending is None
    assert not is_solved


@pytest.mark.parametrize("number", [0, 2, 3])
def test_a_frame_does_not_depend_on_which_others_are_shown(number: int):
    every = replay(SCENE, CHUNKS, shown=range(4))
    (alone,) = replay(SCENE, CHUNKS, shown=[number]).frames
    assert alone.shape == (HEIGHT, WIDTH, 3)
    assert alone.tobytes() == every.frames[number].tobytes()
