"""Laws of the numbers of a run, on the run of finished_run.py."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from finished_run import EVALUATION_FLOPS, PROFILE_FLOPS, SUCCESSES, WARMUP_FLOPS, ReadWith

from grpo.errors import ArtifactError
from grpo.params.parameters import Parameters, RoundParams
from grpo.report.comparison import draw_resamples
from grpo.report.numbers import (
    compute_numbers,
    cost_of,
    metrics,
    reward_spread,
    signal_by_step,
    write_numbers,
)
from grpo.report.reading import Run, read_run, reported_scores
from grpo.report.summary import summarize
from grpo.report.verdict import final_difference, verdict
from grpo.runtime.artifacts.files import read_json
from grpo.runtime.artifacts.tables import PROMPTS, read_table, write_table


def comparison_of(run: Run) -> Any:
    return metrics(run, compute_numbers(run))["comparisons"]["sgpo"]


def test_the_profile_counts_for_an_arm_that_reads_it_and_for_no_other(
    read_with: ReadWith,
) -> None:
    table = compute_numbers(read_with()).reward_by_cost
    flops = {(each.arm, each.round): each.flops for each in table.itertuples()}
    assert flops == {
        ("uniform", "base"): 0,
        ("uniform", "uniform-1"): 100,
        ("uniform", "uniform-2"): 200,
        ("sgpo", "base"): PROFILE_FLOPS,
        ("sgpo", "sgpo-1"): PROFILE_FLOPS + 50,
    }


def test_an_arm_that_grew_from_another_pays_for_its_rounds_and_its_profile(
    read_with: ReadWith, params: Parameters
) -> None:
    late = RoundParams(arm="uniform", start="sgpo-1", phase=2)
    rounds = {"sgpo-1": params.rounds["sgpo-1"], "uniform-2": late}
    run = read_with(None, params.model_copy(update={"rounds": rounds}))
    assert run.chain("uniform") == ["base", "sgpo-1", "uniform-2"]
    # Profile 50, sgpo-1 50, uniform-2 100.
    assert cost_of(run, "uniform-2", "uniform")["flops"] == 200
    assert cost_of(run, "base", "uniform")["flops"] == PROFILE_FLOPS


def test_signal_by_step_is_that_of_all_rounds_of_an_arm(read_with: ReadWith) -> None:
    """The rounds of uniform have four rollouts each; a step without a spread counts in none."""
    run = read_with()
    columns = ("step", "rollouts", "reward_std_within", "trained_rollouts", "advantage_abs_mean")
    first = pd.DataFrame([(0, 4, 0.25, 2, 1.0), (1, 2, None, 2, 1.0)], columns=columns)
    second = pd.DataFrame([(0, 2, 1.0, 2, 1.0), (5, 1, 0.5, 0, None)], columns=columns)
    run.steps["uniform-1"], run.steps["uniform-2"] = first, second
    found = signal_by_step(run, "uniform")
    assert found["trained_fraction"].to_dict() == {0: 0.5, 1: 0.25, 5: 0.0}
    assert found["reward_std_within"].dropna().to_dict() == {0: 0.5, 5: 0.5}


def test_saving_is_read_off_the_curves(read_with: ReadWith) -> None:
    # uniform ends at 0.75 after 200. sgpo goes from 0.25 at 50 to 0.875 at 100 and crosses 0.75
    # after 0.5/0.625 = 80 % of it: at 90. 1 - 90/200 = 0.55.
    found = comparison_of(read_with())
    assert (found["reached"], found["flops"], found["reference_flops"]) == (True, 90, 200)
    assert found["saving_fraction"]["value"] == pytest.approx(0.55)
    assert found["difference"]["value"] == pytest.approx(0.125)
    # At 100, where sgpo ended, uniform had 0.5 and sgpo 0.875.
    assert found["equal_flops"] == 100
    assert found["difference_at_equal_flops"]["value"] == pytest.approx(0.375)
    # 0.875 +- 0.1 and 0.75 +- 0.1 share [0.775, 0.85].
    assert found["intervals_overlap"] is True


def test_an_arm_that_never_reaches_the_reference_says_so(read_with: ReadWith) -> None:
    run = read_with({"sgpo-1": [0, 0, 3, 3]})
    found = comparison_of(run)
    assert (found["reached"], found["flops"], found["saving_fraction"]) == (False, None, None)
    (sentence,) = verdict(run, compute_numbers(run), {}, {})
    assert "sgpo never reached uniform's final mean@4 of 0.750" in sentence
    # 50 + 50 of 100 + 100.
    said = " ".join(sentence.split())  # without no-break spaces
    assert "it ended at 0.375, a difference of \N{MINUS SIGN}0.375" in said
    assert said.endswith("with 50 % of uniform's compute.")


def test_a_reference_that_did_not_improve_is_no_yardstick(read_with: ReadWith) -> None:
    run = read_with({"uniform-2": SUCCESSES["base"]})
    assert comparison_of(run)["reference_improved"] is False
    (sentence,) = verdict(run, compute_numbers(run), {}, {})
    assert "uniform did not improve on its base" in sentence


@pytest.fixture
def _enough_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The finished run has four."""
    monkeypatch.setattr("grpo.report.verdict.LEAST_PROMPTS", 4)


@pytest.mark.parametrize("arms", [["uniform", "sgpo"], ["uniform"]])
def test_too_few_prompts_are_not_judged(
    read_with: ReadWith, artifacts: Path, params: Parameters, arms: list[str]
) -> None:
    """Page and summary omit the interval: zero width does not mean certainty."""
    rounds = {name: each for name, each in params.rounds.items() if each.arm in arms}
    some = params.model_copy(update={"rounds": rounds})
    run = read_with(None, some)
    numbers = compute_numbers(run)
    said = verdict(run, numbers, {}, {})
    said += [final_difference(run, each) for each in numbers.comparisons.values()]
    assert all("too few prompts to judge (4)" in each for each in said)
    text = " ".join([*said, summarize(artifacts, some).rpartition("report:")[0]])
    assert not re.search(r"significant|overlap|interval|\[| to [+\u2212]", text), text


@pytest.mark.usefixtures("_enough_prompts")
def test_equal_arms_show_no_significant_difference(read_with: ReadWith) -> None:
    run = read_with({"sgpo-1": SUCCESSES["uniform-2"]})
    sentence = final_difference(run, compute_numbers(run).comparisons["sgpo"])
    assert "at their ends, +0.000 (+0.000 to +0.000, not significant)" in sentence
    assert "their own intervals overlap" in sentence


@pytest.mark.usefixtures("_enough_prompts")
def test_a_single_arm_is_compared_with_its_base(read_with: ReadWith, params: Parameters) -> None:
    rounds = {name: each for name, each in params.rounds.items() if each.arm == "uniform"}
    run = read_with(None, params.model_copy(update={"rounds": rounds}))
    (sentence,) = verdict(run, compute_numbers(run), {}, {})
    # Every prompt gained 2 of 4: the paired interval has no width.
    assert "uniform improved on its base: mean@4 changed by +0.500 (+0.500 to +0.500)" in sentence


def test_a_policy_gains_nothing_over_itself_in_any_score(
    read_with: ReadWith, judged: Parameters
) -> None:
    same = dict.fromkeys(("uniform-1", "uniform-2", "sgpo-1"), SUCCESSES["base"])
    run = read_with(same, judged)
    for gains in compute_numbers(run).gains.values():
        assert tuple(gains) == reported_scores(judged)
        assert {(each.value, each.low, each.high) for each in gains.values()} == {(0.0, 0.0, 0.0)}


def test_the_gain_of_every_score_is_that_of_the_same_resampled_prompts(
    read_with: ReadWith, judged: Parameters
) -> None:
    # Successes of 4 rollouts go from 0 0 2 2 to 0 1 1 4; greedy is right from 2 on.
    run = read_with({"sgpo-1": [0, 1, 1, 4]}, judged)
    shown = metrics(run, compute_numbers(run))["arms"]["sgpo"]
    gains = {"mean_at_k": shown["gain_over_base"], **shown["other_gains_over_base"]}
    draws = draw_resamples(4, resamples=200, seed=judged.seed)
    expected = {
        "mean_at_k": [0, 0.25, -0.25, 0.5],
        "greedy": [0, 0, -1, 0],
        "pass_at_k": [0, 1, 0, 0],
        "score.ocr": [0, 0.125, -0.125, 0.25],
        "greedy_score.ocr": [0, 0.125, -0.125, 0.25],
    }
    assert gains.keys() == expected.keys()
    for score, gain in expected.items():
        low, high = np.quantile(np.array(gain)[draws].mean(axis=1), [0.05, 0.95])
        found = {"value": np.mean(gain), "low": low, "high": high}
        assert gains[score] == pytest.approx(found, abs=1e-6)


def test_advantage_mass_and_counts_add_up_over_buckets(read_with: ReadWith) -> None:
    run = read_with()
    signal = compute_numbers(run).signal
    own = signal[signal["round"] == "sgpo-1"].set_index("bucket")
    assert own["groups"].to_dict() == {
        "0": 1,
        "(0, .25]": 0,
        "(.25, .5]": 1,
        "(.5, .75]": 0,
        "(.75, 1]": 0,
    }
    assert own.loc["0", "uniform_groups"] == 1
    assert own.loc["(.25, .5]", "uniform_groups"] == 0
    assert own["trained_rollouts"].sum() == 2
    credit = run.rollouts["sgpo-1"]
    # |0.5| * 2 + |-0.5| * 3
    assert own["advantage_mass"].sum() == pytest.approx(2.5)
    assert own["advantage_mass"].sum() == (credit["advantage"].abs() * credit["weight"]).sum()


def test_the_spread_of_reward_is_that_within_groups(read_with: ReadWith) -> None:
    run = read_with()
    # never: 0 and 0, deviation 0; half: 1 and 0, deviation 0.5.
    assert reward_spread(run.rollouts["sgpo-1"]) == pytest.approx(0.25)
    signal = compute_numbers(run).signal.set_index(["round", "bucket"])["reward_spread"]
    assert signal["sgpo-1", "0"] == 0
    assert signal["sgpo-1", "(.25, .5]"] == pytest.approx(0.5)
    assert pd.isna(signal["sgpo-1", "(.75, 1]"])  # no groups


def test_costs_are_listed_by_kind(read_with: ReadWith) -> None:
    cost = compute_numbers(read_with()).cost
    assert cost.groupby("kind")["flops"].sum().to_dict() == {
        "warmup": WARMUP_FLOPS,
        "profile": PROFILE_FLOPS,
        "sampling": 2 * 60 + 30,
        "update": 2 * 40 + 20,
        "evaluation": 4 * EVALUATION_FLOPS,
    }


def test_numbers_beyond_64_bits_stay_whole(read_with: ReadWith, artifacts: Path) -> None:
    run = read_with()
    run.costs["flops"] = [10**21 + 1] * len(run.costs)
    assert cost_of(run, "uniform-2", "uniform")["flops"] == 4 * (10**21 + 1)


def test_numbers_are_the_same_bytes_twice(read_with: ReadWith, tmp_path: Path) -> None:
    for out in ("first", "second"):
        run = read_with()
        write_numbers(run, compute_numbers(run), tmp_path / out)
    names = ["cost.csv", "metrics.json", "reward_by_cost.csv", "signal.csv"]
    assert sorted(path.name for path in (tmp_path / "first").iterdir()) == names
    for name in names:
        first, second = (tmp_path / out / name for out in ("first", "second"))
        assert first.read_bytes() == second.read_bytes()
    assert list(pd.read_csv(tmp_path / "first/reward_by_cost.csv").columns) == [
        *("arm", "round", "flops", "sampled_steps", "trained_steps", "judge_calls"),
        *("greedy", "mean_at_k", "mean_low", "mean_high", "pass_at_k"),
    ]
    assert read_json(tmp_path / "first/metrics.json")["arms"]["sgpo"]["cost"]["flops"] == 100


def test_files_of_removed_rounds_are_ignored(read_with: ReadWith, params: Parameters) -> None:
    with_all = read_with()
    rounds = {name: each for name, each in params.rounds.items() if name != "uniform-2"}
    fewer = params.model_copy(update={"rounds": rounds})
    run = read_with(None, fewer)
    assert "uniform-2" in with_all.rates
    assert "uniform-2" not in run.rates
    assert "uniform-2" not in set(compute_numbers(run).signal["round"])


@pytest.mark.parametrize(
    "name",
    [
        "profile/prompts.parquet",
        "profile/summary.json",
        "evaluations/base.parquet",
        "evaluations/sgpo-1.json",
        "rollouts/sgpo-1/table.parquet",
        "rewards/sgpo-1.parquet",
        "training/sgpo-1/credit.parquet",
        "training/sgpo-1/updates.csv",
        "training/sgpo-1/steps.csv",
    ],
)
def test_a_missing_file_is_named_in_one_line(
    read_with: ReadWith, artifacts: Path, params: Parameters, name: str
) -> None:
    read_with()
    (artifacts / name).unlink()
    with pytest.raises(ArtifactError, match=name) as caught:
        read_run(artifacts, params)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("profile/summary.json", '{"rollouts": 3}', "'cost' is missing"),
        (
            "profile/summary.json",
            '{"cost": {"flops": 1.5, "sampled_steps": 0, "trained_steps": 0, "judge_calls": 0}}',
            "cost.flops must be a whole number",
        ),
        ("training/sgpo-1/updates.csv", "", "must be CSV"),
        ("training/sgpo-1/updates.csv", "update,loss\n0,1\n", "'reward_mean' is missing"),
        ("training/sgpo-1/steps.csv", "step,rollouts\n0,1\n", "'reward_std_within' is missing"),
        (
            "training/sgpo-1/steps.csv",
            "step,rollouts,reward_std_within,trained_rollouts,advantage_abs_mean\n0,4,,4,1\n1,4,0,x,1\n",
            r"row 1, column 'trained_rollouts' must be a number, got 'x'",
        ),
        ("evaluations/base.json", '{"k": 4}', "'cost' is missing"),
    ],
)
def test_a_broken_file_is_named_in_one_line(
    read_with: ReadWith,
    artifacts: Path,
    params: Parameters,
    name: str,
    content: str,
    message: str,
) -> None:
    read_with()
    (artifacts / name).write_text(content)
    with pytest.raises(ArtifactError, match=f"{name}: .*{message}") as caught:
        read_run(artifacts, params)
    assert "\n" not in str(caught.value)


def test_evaluations_over_other_prompts_are_not_compared(read_with: ReadWith) -> None:
    with pytest.raises(ArtifactError, match=r"sgpo-1\.parquet: must hold the prompts of .*base"):
        read_with({"sgpo-1": [3, 3, 4]})


def test_what_was_trained_on_is_not_evaluated_on(artifacts: Path, params: Parameters) -> None:
    train, held_out = (artifacts / f"prompts/{part}.parquet" for part in ("train", "eval"))
    table = read_table(held_out, PROMPTS)
    table.loc[1, "prompt"] = read_table(train, PROMPTS)["prompt"][0]
    write_table(table, held_out, PROMPTS)
    wrong = r"eval.parquet: row 1 .*'prompt' must be no prompt of train.parquet, got trained; rerun"
    with pytest.raises(ArtifactError, match=wrong):
        read_run(artifacts, params)
