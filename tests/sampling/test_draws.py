"""How rounds draw, from parameters."""

from pathlib import Path

import pytest

from grpo.modalities.denoising.modality import Scope
from grpo.params.parameters import Parameters, RoundParams, read_params
from grpo.wiring.allocation import inputs_of_selection
from grpo.wiring.policies import draws_of_round

ROOT = Path(__file__).parents[2]
FLOW = ROOT / "recipes" / "glyphs.yaml"
ROUNDS = {
    "a-1": RoundParams(arm="flow", start="base", phase=1),
    "b-1": RoundParams(arm="flash", start="a-1", phase=1),
    "b-2": RoundParams(arm="flash", start="b-1", phase=1),
    "b-3": RoundParams(arm="flash", start="b-2", phase=1),
    "b-4": RoundParams(arm="flash", start="b-3", phase=1),
}


def params_of(window: tuple[int, int], stride: int) -> Parameters:
    """Returns four rounds of an arm behind one of another, of ten steps."""
    params = read_params(FLOW)
    sampling = params.arms["flow"].sampling.model_copy(
        update={"window": window, "window_stride": stride}
    )
    arms = {
        name: each.model_copy(update={"sampling": sampling}) for name, each in params.arms.items()
    }
    return params.model_copy(update={"arms": arms, "rounds": ROUNDS})


@pytest.mark.parametrize(
    ("window", "stride", "windows"),
    [
        ((0, 3), 3, [(0, 3), (3, 6), (6, 9), (2, 5)]),
        ((0, 4), 1, [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ((5, 9), 1, [(5, 9), (0, 4), (1, 5), (2, 6)]),  # it was at the last position
        ((2, 10), 1, [(2, 9), (0, 7), (1, 8), (2, 9)]),  # the last step never has noise
        ((0, 3), 0, [(0, 3)] * 4),
    ],
)
def test_a_window_moves_on_every_round_of_its_arm(
    window: tuple[int, int], stride: int, windows: list[tuple[int, int]]
):
    params = params_of(window, stride)
    found = [draws_of_round(params, f"b-{number}").window for number in range(1, 5)]
    assert found == windows


def test_rollouts_depend_on_the_reward_if_pilots_are_judged():
    """A scope looks at scores while rollouts are drawn: another reward, other windows."""
    params = read_params(FLOW)
    scope = Scope(
        pilots=1,
        steps_per_look=1,
        smoothing=0.3,
        structure_tolerance=0.1,
        preference_tolerance=0.1,
        patience=2,
        first_look=1,
        fallback=(0.1, 0.64),
    )
    sampling = params.arms["flow"].sampling.model_copy(update={"scope": scope})
    scoped = params.arms["flow"].model_copy(update={"sampling": sampling})
    looking = params.model_copy(update={"arms": {**params.arms, "flow": scoped}})
    assert inputs_of_selection(params, "flow", Path("none")) == {}
    reward = inputs_of_selection(looking, "flow", Path("none"))["reward"]
    assert reward["judges"][0]["judge"] == "ocr"
