"""Laws of cost-to-same-reward and of the paired bootstrap."""

import pandas as pd
import pytest

from grpo.report.comparison import (
    Curve,
    compare,
    cost_to_reach,
    difference,
    draw_resamples,
    resample_means,
    saving_fraction,
)

CURVE = Curve(arm="a", policies=("base", "a-1", "a-2"), costs=(10.0, 20.0, 40.0))
REFERENCE = Curve(arm="r", policies=("base", "r-1"), costs=(0.0, 100.0))


@pytest.mark.parametrize(
    ("target", "cost"),
    [
        (0.1, 10.0),  # the start is already above
        (0.2, 10.0),  # the start is at it
        (0.3, 15.0),  # half of the first segment
        (0.4, 20.0),  # a point itself
        (0.7, 35.0),  # 0.4 -> 0.8 over 20: three quarters
        (0.8, 40.0),  # the end itself
        (0.81, None),  # never
    ],
)
def test_cost_to_reach_is_linear_between_points(target: float, cost: float | None) -> None:
    reached = cost_to_reach(CURVE, {"base": 0.2, "a-1": 0.4, "a-2": 0.8}, target)
    assert reached == pytest.approx(cost)


def test_a_curve_that_sinks_again_is_charged_for_its_first_crossing() -> None:
    # 0.2 -> 0.6 over 10: at 0.4 after half of it, whatever follows.
    assert cost_to_reach(CURVE, {"base": 0.2, "a-1": 0.6, "a-2": 0.4}, 0.4) == pytest.approx(15)


def test_saving_is_the_closed_form() -> None:
    # The reference needs 100 for 0.6; the arm reaches 0.6 at 20 + (0.6-0.4)/(0.8-0.4) * 20 = 30.
    values = {"base": 0.2, "a-1": 0.4, "a-2": 0.8, "r-1": 0.6}
    assert saving_fraction(CURVE, REFERENCE, values) == pytest.approx(0.7)


def test_an_arm_that_needs_more_has_a_negative_saving() -> None:
    # At 0.6 after 40, the reference after 20: 1 - 40/20.
    values = {"base": 0.2, "a-1": 0.4, "a-2": 0.6, "r-1": 0.6}
    cheap = Curve(arm="r", policies=("base", "r-1"), costs=(0.0, 20.0))
    assert saving_fraction(CURVE, cheap, values) == pytest.approx(-1.0)


def test_an_arm_that_never_reaches_the_reference_has_no_saving() -> None:
    values = {"base": 0.2, "a-1": 0.3, "a-2": 0.4, "r-1": 0.6}
    assert saving_fraction(CURVE, REFERENCE, values) is None


def test_a_reference_that_did_not_improve_leaves_nothing_to_reach() -> None:
    values = {"base": 0.2, "a-1": 0.3, "a-2": 0.4, "r-1": 0.2}
    assert saving_fraction(CURVE, REFERENCE, values) is None


def test_identical_policies_differ_by_exactly_nothing() -> None:
    rates = pd.DataFrame({"a": [0.1, 0.7, 0.3], "b": [0.1, 0.7, 0.3]})
    means = resample_means(rates, draw_resamples(3, resamples=100, seed=0))
    found = difference(rates, means, ("a", "b"), confidence=0.95)
    assert (found.value, found.low, found.high) == (0.0, 0.0, 0.0)


def test_a_constant_gain_has_no_width_because_resamples_are_paired() -> None:
    rates = pd.DataFrame({"a": [0.5, 1.0, 0.75], "b": [0.25, 0.75, 0.5]})
    means = resample_means(rates, draw_resamples(3, resamples=100, seed=0))
    found = difference(rates, means, ("a", "b"), confidence=0.95)
    assert (found.value, found.low, found.high) == pytest.approx((0.25, 0.25, 0.25))


def test_equally_good_policies_give_an_interval_around_0() -> None:
    # 200 prompts: half solved by one policy only, half by the other only.
    rates = pd.DataFrame({"a": [1.0, 0.0] * 100, "b": [0.0, 1.0] * 100})
    means = resample_means(rates, draw_resamples(200, resamples=1000, seed=0))
    found = difference(rates, means, ("a", "b"), confidence=0.95)
    assert found.value == 0
    assert found.low is not None
    assert found.high is not None
    # The difference has standard deviation 1 per prompt: 1.96/sqrt(200) = 0.139.
    assert found.low == pytest.approx(-0.139, abs=0.02)
    assert found.high == pytest.approx(0.139, abs=0.02)


def test_resamples_that_never_reach_it_are_the_worst_savings() -> None:
    # Only the first of 4 prompts lifts the arm to the reference's 0.25; a resample without it
    # (0.75^4 = 32 %) leaves both at 0: the reference gained nothing, there is no saving.
    rates = pd.DataFrame({"base": [0.0] * 4, "a-1": [1.0, 0, 0, 0], "r-1": [1.0, 0, 0, 0]})
    means = resample_means(rates, draw_resamples(4, resamples=2000, seed=0))
    curve = Curve(arm="a", policies=("base", "a-1"), costs=(0.0, 50.0))
    found = compare(curve, REFERENCE, rates=rates, means=means, confidence=0.9)
    assert found.reached_fraction == pytest.approx(1 - 0.75**4, abs=0.04)
    assert found.saving_fraction is not None
    assert found.saving_fraction.value == pytest.approx(0.5)
    assert found.saving_fraction.low is None
    assert found.saving_fraction.high == pytest.approx(0.5)
