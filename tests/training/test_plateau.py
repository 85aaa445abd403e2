"""A plateau of the mean reward: two successive means of N iterations, of which none is higher."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.errors import ParameterError
from grpo.params.parameters import read_params
from grpo.params.yaml import dump_yaml
from grpo.training.plateau import Plateau, find_plateau
from tests.pipeline.workspaces import two_arms


@pytest.mark.parametrize(
    ("rewards", "iterations", "tolerance", "found"),
    [
        ([], 1, 0.0, None),
        ([0.5], 1, 9.0, None),
        ([0.25, 0.5], 1, 0.25, (0.25, 0.5)),  # it rises by the tolerance and not by more
        ([0.25, 0.75], 1, 0.25, None),
        ([0.75, 0.25], 1, 0.0, (0.75, 0.25)),
        ([0.0, 1.0, 1.0], 2, 0.0, None),  # three are too few for two means of two
        ([9.0, 0.0, 1.0, 1.0, 0.0], 2, 0.0, (0.5, 0.5)),  # the first one is in neither
        ([0.0, 0.0, 1.0, 1.0], 2, 0.5, None),
    ],
)
def test_the_rule_by_hand(
    rewards: list[float], iterations: int, tolerance: float, found: tuple[float, float] | None
):
    plateau = find_plateau(rewards, iterations=iterations, tolerance=tolerance)
    assert plateau == (found and Plateau(before=found[0], after=found[1]))


@given(
    numbers=st.lists(st.integers(-8, 8), max_size=12),
    iterations=st.integers(1, 4),
    tolerance=st.integers(0, 4),
    shift=st.integers(-64, 64),
)
@settings(max_examples=200, deadline=None)
def test_it_depends_on_the_last_2_n_rewards_and_not_on_their_level(
    numbers: list[int], iterations: int, tolerance: int, shift: int
):
    rewards = [each / 8 * iterations for each in numbers]  # their means have no rounding

    def is_found(series: list[float]) -> bool:
        return find_plateau(series, iterations=iterations, tolerance=tolerance / 8) is not None

    last = numbers[-2 * iterations :]
    rise = sum(last[iterations:]) - sum(last[:iterations])
    assert is_found(rewards) == (len(last) == 2 * iterations and rise <= tolerance)
    assert is_found([each + shift for each in rewards]) == is_found(rewards)
    if len(last) == 2 * iterations:
        assert is_found([7.0, *rewards]) == is_found(rewards)


@pytest.mark.parametrize("iterations", [2, 3])
def test_a_plateau_that_cannot_end_a_round_is_refused(tmp_path: Path, iterations: int):
    """Two means of two iterations end a round of five at the fourth; two of three never."""
    content: dict[str, Any] = two_arms()
    arm, path = content["arms"]["uniform"], tmp_path / "params.yaml"
    stop = {"iterations": iterations, "tolerance": 0.0}
    arm["training"] = {**arm["training"], "iterations_per_round": 5, "stop_on_plateau": stop}
    path.write_text(dump_yaml(content))
    if iterations == 2:
        training = read_params(path).arms["uniform"].training
        assert training.stop_on_plateau is not None
        return
    with pytest.raises(
        ParameterError,
        match=r"arms.uniform.training must have more iterations_per_round than two times "
        r"stop_on_plateau.iterations, got",
    ):
        read_params(path)
