"""A temperature that rises when the reward does not."""

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from grpo.modalities.modality import TokenSampling
from grpo.modalities.shared.logits import draw
from grpo.modalities.shared.temperature import RisingTemperature, Statistics, raises_of

SETTINGS = {
    "first": 1.2,
    "last": 1.3,
    "step": 0.05,
    "iterations": 2,
    "tolerance": 0.1,
    "cooldown": 0,
    "scored_at": None,
}


def rising(**changes: object) -> RisingTemperature:
    """Returns a controller with blocks of two iterations."""
    return TypeAdapter(RisingTemperature).validate_python({**SETTINGS, **changes})


def raises_after(controller: RisingTemperature, rewards: list[float]) -> list[int]:
    """Returns the number of raises after each iteration."""
    statistics: Statistics = {}
    found = []
    for reward in rewards:
        statistics = controller.learn(statistics, reward)
        found.append(raises_of(statistics))
    return found


def test_it_rises_after_a_block_that_is_not_above_the_block_before():
    """Blocks (0, 1), (1, 1), (1, 1.05), (2, 2): means .5, 1, 1.025, 2."""
    rewards = [0.0, 1.0, 1.0, 1.0, 1.0, 1.05, 2.0, 2.0]
    assert raises_after(rising(), rewards) == [0, 0, 0, 0, 0, 1, 1, 1]


def test_it_rises_at_equal_rewards_if_any_gain_would_do():
    assert raises_after(rising(tolerance=0.0), [0.5] * 4) == [0, 0, 0, 1]


def test_the_first_block_has_none_to_be_compared_with():
    assert raises_after(rising(), [0.0, 0.0]) == [0, 0]


def test_after_a_raise_it_waits_and_at_the_last_temperature_it_stays():
    """Without a rise, blocks end after iterations 2, 4, 6, ...; two raises reach the last."""
    flat = [0.0] * 12
    assert raises_after(rising(), flat) == [0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 2, 2]
    assert raises_after(rising(cooldown=3), flat) == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2]


def test_every_raise_adds_a_step_up_to_the_last_temperature():
    found = [rising(last=1.32).after(raises) for raises in range(5)]
    assert found == pytest.approx([1.2, 1.25, 1.3, 1.32, 1.32])
    assert rising(last=1.32).most_raises == 3
    assert rising().most_raises == 2


def test_the_statistics_of_a_selection_are_kept():
    before: Statistics = {"visits": {"a": 1}}
    assert rising().learn(before, 0.0)["visits"] == {"a": 1}
    assert before == {"visits": {"a": 1}}


def test_the_last_temperature_is_not_below_the_first():
    with pytest.raises(ValidationError, match=r"must be at least 1\.2, the first temperature"):
        rising(last=1.0)


def test_the_number_of_raises_is_bounded():
    with pytest.raises(ValidationError, match="in at most 1000 raises"):
        rising(step=1e-9)


def sampling(temperature: object) -> TokenSampling:
    values = {"temperature": temperature, "top_p": 1.0, "rollouts_per_batch": 8}
    return TypeAdapter(TokenSampling).validate_python(values)


def test_an_arm_samples_and_scores_at_the_temperature_of_its_level():
    matched, published = sampling(SETTINGS), sampling({**SETTINGS, "scored_at": 1.0})
    for level, now in enumerate((1.2, 1.25, 1.3)):
        assert matched.sampled(level).first_temperature == pytest.approx(now)
        assert matched.scored(level).first_temperature == pytest.approx(now)
        assert published.sampled(level).first_temperature == pytest.approx(now)
        assert published.scored(level).first_temperature == 1.0
    assert not matched.has_other_density
    assert published.has_other_density


def test_a_number_has_one_level_and_learns_nothing():
    constant = sampling(0.7)
    assert constant.num_levels == 1
    assert constant.sampled(0) is constant.scored(0) is constant
    assert constant.learn({}, 1.0) == {}
    assert constant.describe(0) == {}
    assert not constant.has_other_density


def test_a_level_beyond_the_arms_own_is_its_last():
    """A round may start from one of another arm, whose temperature has risen more often."""
    assert sampling(SETTINGS).level({"temperature": {"raises": 9}}) == 2
    assert sampling(1.0).level({"temperature": {"raises": 9}}) == 0


def test_sampled_log_probs_are_those_of_logits_divided_by_the_temperature():
    logits = torch.tensor([[0.0, 1.0, 3.0]])
    for temperature in (1.0, 1.2, 1.6):
        chosen, logp = draw(logits, torch.tensor([0.5], dtype=torch.float64), temperature)
        expected = (logits / temperature).log_softmax(1)[0, int(chosen)]
        assert float(logp) == pytest.approx(float(expected))
