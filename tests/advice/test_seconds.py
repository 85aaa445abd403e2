"""Seconds: rates are recovered from usages that follow the model, and errors are relative ones."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from profiles import synthetic_facts
from test_proposal import write_params

from benchmarks.workspaces import SHORT_ROLLOUTS
from grpo.advice import text
from grpo.advice.facts import Facts
from grpo.advice.prediction import Amounts, Compared, decode_steps, expected_longest, predict
from grpo.advice.seconds import (
    Calibration,
    Rates,
    Seconds,
    Work,
    measure_rates,
    read_rates,
    split_seconds,
)
from grpo.params.parameters import read_params
from grpo.report.words import SPACE
from grpo.runtime.artifacts.files import write_json
from grpo.runtime.artifacts.usage import Usage
from tests.advice.test_prediction import PLAIN, plan_of

TRUTH = Rates(
    per_decode_step=0.002,
    per_sampling_flop=1e-7,
    per_update_flop=3e-8,
    per_judging=0.05,
    per_judged_rollout=0.0004,
    per_stage=1.5,
    profile=0.0,
)
WARM_UP_FLOPS = 2e9


def usage_of(**parts: float) -> Usage:
    return Usage(seconds_by_part=parts, seconds=sum(parts.values()))


def work(per_fixed: float, fixed: float, per_unit: float, units: float) -> Work:
    return Work(per_fixed * fixed + per_unit * units, fixed, units)


def profile_of(facts: Facts, rates: Rates) -> Usage:
    """Returns the usage of the profile at these rates: 8 rollouts of each prompt, 64 a batch."""
    count = 8 * len(facts.profile)
    rows, sizes = np.arange(len(facts.profile)), np.full(len(facts.profile), 8.0)
    steps = decode_steps(facts, rows, sizes, draws=1, rollouts_per_batch=64)
    return usage_of(
        start=0.5,
        load=1.0,
        sampling=rates.per_decode_step * steps + rates.per_sampling_flop * facts.cost.flops,
        judging=rates.per_judging * -(-count // 64) + rates.per_judged_rollout * count,
    )


def calibration_at(load: float) -> Calibration:
    """Returns timed batches on a machine that is `load` times slower than it was."""
    step, flop = load * TRUTH.per_decode_step, load * TRUTH.per_sampling_flop
    call, rollout = load * TRUTH.per_judging, load * TRUTH.per_judged_rollout
    return Calibration(
        sampling=(work(step, 12, flop, 3e4), work(step, 19, flop, 5e5)),
        judging=(work(call, 1, rollout, 16), work(call, 1, rollout, 256)),
    )


@pytest.mark.parametrize("load", [1.0, 1.7])
def test_rates_of_usages_that_follow_the_model_are_recovered(load: float):
    facts = synthetic_facts()
    profile = profile_of(facts, TRUTH)
    base = usage_of(start=3.0, **{"warm-up": TRUTH.per_update_flop * WARM_UP_FLOPS})
    found = measure_rates(base, profile, calibration_at(load), facts, warm_up_flops=WARM_UP_FLOPS)
    for name, truth in vars(replace(TRUTH, profile=profile.seconds)).items():
        assert getattr(found, name) == pytest.approx(truth), name


def test_prediction_at_the_true_rates_is_the_sum_over_work():
    amounts = amounts_of(iterations=4, decode_steps=80, rollouts=256)
    found = TRUTH.predict(amounts, rounds=2)
    assert found.sampling == pytest.approx(0.002 * 80 + 1e-7 * amounts.sampling_flops)
    assert found.updates == pytest.approx(3e-8 * amounts.update_flops)
    assert found.judging == pytest.approx(0.05 * 4 + 0.0004 * 256)
    assert found.rest == 1.5 * 3 * 2  # three stages per round
    assert found.total == found.sampling + found.updates + found.judging + found.rest


def test_twice_the_prompts_take_twice_the_seconds_of_proportional_work():
    facts = synthetic_facts(120)
    proportional = replace(TRUTH, per_decode_step=0.0, per_judging=0.0)
    once, twice = (
        predict(pd.concat([plan_of(facts)] * times), PLAIN, facts, starts_from_base=False)
        for times in (1, 2)
    )
    one, two = (proportional.predict(each, rounds=1) for each in (once, twice))
    assert two.judging == pytest.approx(2 * one.judging)
    # Larger batches pad and share prompts otherwise.
    assert two.sampling == pytest.approx(2 * one.sampling, rel=0.05)
    assert two.updates == pytest.approx(2 * one.updates, rel=0.1)
    assert two.rest == one.rest


def test_fixed_cost_grows_with_iterations_and_not_with_prompts():
    facts = synthetic_facts(120)
    plan = plan_of(facts)
    wide = replace(PLAIN, rollouts_per_batch=10_000)
    few, many = (
        predict(plan, replace(wide, iterations=each), facts, starts_from_base=False)
        for each in (2, 6)
    )
    half = predict(plan[::2], replace(wide, iterations=2), facts, starts_from_base=False)
    # The longest of fewer rollouts is a little shorter.
    assert 0.9 < many.decode_steps / (3 * few.decode_steps) < 1
    assert 0.9 < half.decode_steps / few.decode_steps < 1


@pytest.mark.parametrize("count", [1, 4, 50])
def test_the_expected_longest_is_the_mean_of_simulated_maxima(count: int):
    chooser = np.random.default_rng(0)
    steps, weights = np.array([1, 3, 3, 7, 20]), np.array([4.0, 1.0, 2.0, 2.0, 1.0])
    drawn = chooser.choice(steps, size=(4000, count), p=weights / weights.sum()).max(axis=1)
    error = 4 * drawn.std() / 4000**0.5 + 1e-9
    assert abs(drawn.mean() - expected_longest(steps, weights, count=count)) <= error


def test_every_batch_decodes_as_long_as_its_longest_rollout():
    facts = synthetic_facts(8)
    equal = replace(facts, rollouts=facts.rollouts.assign(steps=5))
    rows, rollouts = np.arange(8), np.full(8, 4.0)  # 32 in all
    for draws, per_batch, batches in ((1, 32, 1), (1, 31, 2), (4, 32, 4), (4, 4, 8)):
        found = decode_steps(equal, rows, rollouts, draws=draws, rollouts_per_batch=per_batch)
        assert found == 5 * batches
    assert decode_steps(equal, rows, 0 * rollouts, draws=1, rollouts_per_batch=32) == 0


def test_a_rate_that_noise_makes_negative_is_zero_and_the_whole_keeps_its_seconds():
    whole = Work(10.0, 50, 1000)
    small, large = Work(1.0, 10, 10), Work(0.9, 10, 100)  # more work in less time
    assert split_seconds(whole, small, large) == (10.0 / 50, 0.0)
    small, large = Work(0.01, 10, 10), Work(1.0, 10, 100)  # ten times the work, 100 times slower
    assert split_seconds(whole, small, large) == (0.0, 10.0 / 1000)
    small, large = Work(1.0, 10, 10), Work(2.0, 20, 20)
    assert split_seconds(whole, small, large) == (0.0, 10.0 / 1000)


def test_measured_seconds_are_those_of_the_usages():
    stages = [usage_of(start=1.0, sampling=2.0), usage_of(load=0.5, update=4.0, waiting=1.0)]
    found = Seconds.of_stages([*stages, usage_of(judging=3.0, save=0.25)])
    assert found == Seconds(sampling=3.0, updates=4.0, judging=3.0, rest=1.75)


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        ([], "this workspace has not measured base and profile (.runs/STAGE.json)."),
        (["base"], "this workspace has not measured profile (.runs/STAGE.json)."),
        (["base", "profile"], "the base has no warm-up"),
    ],
)
def test_without_measured_stages_one_line_says_that_seconds_are_not_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: list[str], said: str
):
    params = read_params(write_params(tmp_path, {}))
    monkeypatch.chdir(tmp_path)
    for stage in measured:
        write_json(Path(f".runs/{stage}.json"), vars(usage_of(sampling=1.0)))
    monkeypatch.setattr(text, "read_facts", lambda *_: synthetic_facts())
    printed = text.advise(tmp_path, params, Path("params.yaml"))
    lines = [line for line in printed.splitlines() if "Seconds are not predicted" in line]
    assert len(lines) == 1
    assert said in lines[0]
    assert "SECONDS" not in printed


def test_a_machine_that_cannot_sample_predicts_no_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Both stages are measured, and the base policy is missing."""
    monkeypatch.chdir(tmp_path)
    write_json(Path(".runs/base.json"), vars(usage_of(**{"warm-up": 1.0})))
    write_json(Path(".runs/profile.json"), vars(usage_of(sampling=1.0)))
    found = read_rates(tmp_path, read_params(SHORT_ROLLOUTS), synthetic_facts())
    assert isinstance(found, str)
    assert found.startswith("the base policy cannot be sampled and judged here: ")


def test_errors_are_relative_to_measured_seconds_and_unmeasured_rounds_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    params = read_params(SHORT_ROLLOUTS)
    monkeypatch.chdir(tmp_path)
    rates = replace(TRUTH, per_sampling_flop=0.0, per_update_flop=0.0, per_stage=0.0)
    counted, predicted = (amounts_of(decode_steps=each) for each in (2000, 5000))
    for name in ("uniform-1", "uniform-2"):
        for stage, sampling in (("rollout", 1.0), ("score", 0.0), ("train", 7.0)):
            write_json(Path(f".runs/{stage}@{name}.json"), vars(usage_of(sampling=sampling)))
    compared = [
        Compared(round=name, predicted=predicted, actual=counted)
        for name in ("uniform-1", "uniform-2", "sgpo-1")
    ]
    printed = text._compared_seconds(params, compared, rates).replace(SPACE, " ")
    of_round = next(line for line in printed.splitlines() if "  uniform-1" in line)
    # 0.002 seconds per decode step: 10 seconds predicted, 4 for what was counted, 8 measured.
    assert of_round.count("10.0 s / 8.0 s  +25 %") == 2
    assert "4.0 s / 8.0 s  -50 %" in of_round
    assert "20.0 s / 16.0 s  +25 %" in printed
    assert "Not measured in this workspace: sgpo-1." in printed


def amounts_of(**given: float) -> Amounts:
    names = Amounts.__dataclass_fields__
    amounts = dict.fromkeys(names, 0.0) | {name: float(each) for name, each in given.items()}
    return Amounts(**amounts)
