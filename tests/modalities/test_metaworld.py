"""Meta-World's scenes: the same text gives the same rollout, to the bit, wherever it is played."""

import numpy as np
import pytest

from grpo.errors import ParameterError
from grpo.modalities.action_chunks.simulation.experts import demonstrate
from grpo.modalities.action_chunks.simulation.metaworld import (
    GRIPPER,
    MetaWorld,
    draw_scene,
    family_of,
    make_environment,
    require_families,
)
from grpo.modalities.action_chunks.simulation.pool import EnvironmentPool, Order
from grpo.modalities.action_chunks.simulation.sizes import ACTIONS, OBSERVATIONS, instruction_of

FAMILIES = ("push-v3", "drawer-open-v3", "peg-insert-side-v3")
ACTION_SEED = 3


def scenes(count: int) -> list[str]:
    return [
        draw_scene(make_environment(family), family, seed)
        for family in FAMILIES
        for seed in range(count)
    ]


def random_chunks(number: int) -> np.ndarray:
    generator = np.random.default_rng(ACTION_SEED + number)
    return generator.uniform(-1, 1, (3, 8, ACTIONS))


def test_a_scene_shows_its_goal_and_where_things_are():
    player = MetaWorld()
    for scene in scenes(1):
        observation = player.start(scene)
        assert observation.shape == (OBSERVATIONS,)
        assert np.isfinite(observation).all()
    # The puck of push-v3 lies where its scene says, and the goal is seen.
    numbers = [float(each) for each in scenes(1)[0].split(" | ")[1].split()]
    observation = player.start(scenes(1)[0])
    np.testing.assert_allclose(observation[4:6], numbers[:2], atol=1e-4)
    np.testing.assert_allclose(observation[36:38], numbers[3:5], atol=1e-4)


def test_a_rollout_does_not_depend_on_what_was_played_before():
    first, second = scenes(1)[:2]
    fresh, used = MetaWorld(), MetaWorld()
    used.start(second)
    for action in random_chunks(9)[0].tolist():
        used.step(action)
    used.start(first)
    seen = [np.array_equal(fresh.start(first), used.start(first))]
    for chunk in random_chunks(1).tolist():
        for action in chunk:
            a, b = fresh.step(action), used.step(action)
            seen.append(np.array_equal(a[0], b[0]) and a[1] == b[1])
    assert all(seen)


@pytest.mark.long  # test_action_chunks.py has the same with smaller environments
def test_rollouts_are_the_same_for_any_number_of_processes():
    played = scenes(2)
    results = []
    for processes in (1, 3):
        with EnvironmentPool(
            "grpo.modalities.action_chunks.simulation.metaworld:MetaWorld",
            processes=processes,
            timeout_seconds=60.0,
        ) as pool:
            pool.play(dict(enumerate(played)))
            for step in range(3):
                orders: dict[int, Order] = {
                    slot: random_chunks(slot)[step].tolist() for slot in range(len(played))
                }
                moments = pool.play(orders)
            results.append(np.stack([moments[slot].observation for slot in range(len(played))]))
    assert np.array_equal(*results)


@pytest.mark.parametrize(
    "family", [FAMILIES[0], *(pytest.param(each, marks=pytest.mark.long) for each in FAMILIES[1:])]
)
def test_experts_solve_most_scenes_with_a_shaking_hand(family: str):
    environment = make_environment(family)
    shown = [
        demonstrate(draw_scene(environment, family, seed), noise=0.1, seed=seed)
        for seed in range(5)
    ]
    assert sum(each.is_solved for each in shown) >= 3
    for each in shown:
        assert each.instruction == instruction_of(family)
        assert each.observation.shape == (len(each.action), OBSERVATIONS)
        assert np.abs(each.action).max() <= 1
    again = demonstrate(draw_scene(environment, family, 0), noise=0.1, seed=0)
    assert np.array_equal(again.observation, shown[0].observation)


def test_only_a_grasping_expert_closes_the_gripper():
    closed = {}
    for family in ("push-v3", "drawer-open-v3"):
        scene = draw_scene(make_environment(family), family, 0)
        closed[family] = (demonstrate(scene, noise=0.0, seed=0).action[:, GRIPPER] > 0).any()
    assert closed == {"push-v3": True, "drawer-open-v3": False}


def test_names_of_families_and_instructions_are_one_another():
    assert family_of(instruction_of("peg-insert-side-v3")) == "peg-insert-side-v3"
    with pytest.raises(ParameterError, match=r"task.families must be .*, got 'juggle-v3'"):
        require_families(["push-v3", "juggle-v3"])
