"""Advice on a finished workspace: predictions match the counts; errors without a workspace."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from grpo.__main__ import main
from grpo.advice import seconds
from grpo.advice.facts import Facts, read_facts
from grpo.advice.prediction import compare_rounds, predict_round
from grpo.advice.seconds import calibrate
from grpo.params.parameters import Parameters, read_params
from grpo.params.yaml import dump_yaml, parse_yaml
from grpo.runtime.artifacts.files import read_json, write_json
from grpo.runtime.artifacts.tables import (
    PROFILE,
    ROLLOUTS,
    read_profile,
    read_table,
    write_table,
)

# Wide: of one round of 16 or so prompts whose rollouts are drawn anew.
STEPS_BAND, FLOPS_BAND = 0.15, 0.35


@pytest.fixture(scope="module")
def params(finished: Path) -> Parameters:
    return read_params(finished / "params.yaml")


@pytest.fixture(scope="module")
def facts(finished: Path, params: Parameters) -> Facts:
    return read_facts(finished / "artifacts", params)


def advise(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> tuple:
    """Runs the command in a workspace; returns its exit code and what it printed."""
    monkeypatch.chdir(workspace)
    monkeypatch.setattr(sys, "argv", ["grpo", "advise"])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    return ended.value.code, printed.out, printed.err


def test_a_round_from_the_base_takes_what_was_predicted(
    finished: Path, params: Parameters, facts: Facts
):
    compared = compare_rounds(finished / "artifacts", params, facts)
    assert [each.round for each in compared] == ["uniform-1", "sgpo-1"]
    for each in compared:
        predicted, actual = each.predicted, each.actual
        assert predicted.groups == actual.groups
        assert predicted.rollouts == actual.rollouts
        assert predicted.sampled_steps == pytest.approx(actual.sampled_steps, rel=STEPS_BAND)
        assert predicted.sampling_flops == pytest.approx(actual.sampling_flops, rel=STEPS_BAND)
        assert predicted.update_flops == pytest.approx(actual.update_flops, rel=FLOPS_BAND)
        # Groups are independent: 4 standard deviations of a mean of so many.
        share = predicted.uniform_fraction
        deviation = (share * (1 - share) / actual.groups) ** 0.5
        assert abs(actual.uniform_fraction - share) < 4 * deviation


def test_counted_amounts_are_those_of_the_artifacts(
    finished: Path, params: Parameters, facts: Facts
):
    artifacts = finished / "artifacts"
    for each in compare_rounds(artifacts, params, facts):
        updates = pd.read_csv(artifacts / "training" / each.round / "updates.csv")
        summary = read_json(artifacts / "rollouts" / each.round / "summary.json")
        assert each.actual.trained_steps == updates["trained_steps"].sum()
        assert each.actual.groups == summary["prompts"]
        assert each.actual.sampling_flops == summary["cost"]["flops"]


def test_a_round_that_stopped_on_a_plateau_is_compared_for_the_iterations_that_it_had(
    workspace: Path, params: Parameters, facts: Facts
):
    artifacts = workspace / "artifacts"
    whole = compare_rounds(artifacts, params, facts)[1]
    summary = artifacts / "training" / "sgpo-1" / "summary.json"
    plateau = {"before": 0.5, "after": 0.5, "planned_iterations": 4}
    write_json(summary, {**read_json(summary), "plateau": plateau})
    arm = params.arms["sgpo"]
    training = arm.training.model_copy(update={"iterations_per_round": 4})
    longer = arm.model_copy(update={"training": training})
    changed = params.model_copy(update={"arms": {**params.arms, "sgpo": longer}})
    stopped = compare_rounds(artifacts, changed, facts)[1]
    assert (stopped.round, stopped.actual) == (whole.round, whole.actual)
    # The prompts of the phase are dealt to the four planned iterations, of which it had one.
    for name in ("iterations", "groups", "rollouts", "sampled_steps", "trained_steps"):
        planned = getattr(predict_round(changed, "sgpo-1", facts), name)
        assert getattr(stopped.predicted, name) == pytest.approx(planned / 4)


def test_the_timed_batches_are_those_of_the_base_and_nothing_is_written(
    workspace: Path, params: Parameters, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(workspace)
    monkeypatch.setattr(seconds, "REPEATS", 1)  # repeats are for precision
    before = sorted(workspace.rglob("*"))
    timed = calibrate(workspace / "artifacts", params)
    for small, large in timed:
        assert min(small.seconds, large.seconds) > 0
        assert small.proportional < large.proportional
    for steps in (timed.sampling[0].fixed, timed.sampling[1].fixed):
        assert 0 < steps <= params.policy.max_steps
    assert [each.fixed for each in timed.judging] == [1.0, 1.0]
    assert sorted(workspace.rglob("*")) == before


def test_the_command_prints_an_arm_to_paste_and_what_happened(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    code, out, err = advise(workspace, monkeypatch, capsys)
    assert code == 0, err
    for expected in (
        "PROFILE",
        "Dead prompts",
        "ARMS",
        "Rollouts are expected to be ",
        "GROUP SIZES",
        "WHAT HAPPENED",
        "uniform-1",
    ):
        assert expected in out
    assert "They do not say which arm learns more" in out
    pasted = parse_yaml(out[out.index("arms:\n") : out.index("Predictions cover")])
    assert set(pasted) == {"arms", "rounds"}
    assert all(len(line) <= 120 for line in out.splitlines())


def test_the_command_prints_seconds_where_stages_were_measured(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """Without measurements, one line says so; the stages of sgpo-1 are not measured."""
    monkeypatch.setattr(seconds, "REPEATS", 1)  # repeats are for precision
    shutil.rmtree(workspace / ".runs", ignore_errors=True)
    assert advise(workspace, monkeypatch, capsys)[1].count("Seconds are not predicted") == 1
    parts = {"warm-up": 2.0, "sampling": 1.0, "judging": 0.5}
    usage = {"seconds_by_part": parts, "seconds": 4.0}
    for stage in ("base", "profile", "rollout@uniform-1", "score@uniform-1", "train@uniform-1"):
        write_json(workspace / ".runs" / f"{stage}.json", usage)
    code, out, err = advise(workspace, monkeypatch, capsys)
    assert code == 0, err
    assert "SECONDS  predicted for all rounds of each" in out
    measured = out[out.index("SECONDS  predicted / measured") :].splitlines()
    assert "/ 12.0 s" in measured[2]  # the three stages of uniform-1
    assert measured[-1] == "Not measured in this workspace: sgpo-1."
    assert all(len(line) <= 120 for line in out.splitlines())


@pytest.mark.parametrize("arms", [["sgpo"], ["uniform", "sgpo"]])
def test_an_arm_that_allocates_online_is_not_predicted_and_one_line_says_so(
    workspace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    arms: list[str],
):
    file = workspace / "params.yaml"
    content = parse_yaml(file.read_text())
    for arm in arms:
        content["arms"][arm]["selection"] = [{"sample_prompts_near_rate": {"prompts": 4}}]
    file.write_text(dump_yaml(content))
    code, out, err = advise(workspace, monkeypatch, capsys)
    assert code == 0, err
    for arm in arms:
        line = f"{arm} is not predicted: it chooses prompts or group sizes by outcomes of earlier"
        assert out.count(line) == 1
    assert ("ARMS" in out) is (len(arms) == 1)


def test_rounds_of_another_curriculum_are_not_compared(
    workspace: Path, params: Parameters, facts: Facts
):
    arm = params.arms["uniform"].model_copy(
        update={
            "curriculum": [
                {"keep_rate_window": {"low": 0.5, "high": 1.0}},
                {"split_at_random": {"phases": 1, "prompts_per_phase": 2}},
                {"fix_group_size": {"rollouts": 8}},
            ]
        }
    )
    changed = params.model_copy(update={"arms": {**params.arms, "uniform": arm}})
    compared = compare_rounds(workspace / "artifacts", changed, facts)
    assert [each.round for each in compared] == ["sgpo-1"]


def test_rounds_that_have_not_run_are_predicted_and_not_compared(
    workspace: Path, params: Parameters, facts: Facts
):
    shutil.rmtree(workspace / "artifacts" / "training" / "sgpo-1")
    compared = compare_rounds(workspace / "artifacts", params, facts)
    assert [each.round for each in compared] == ["uniform-1"]


@pytest.mark.parametrize("missing", ["profile", "profile/rollouts", "prompts", "policies/base"])
def test_without_a_profile_one_line_says_what_to_run(
    workspace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    missing: str,
):
    shutil.rmtree(workspace / "artifacts" / missing)
    code, out, err = advise(workspace, monkeypatch, capsys)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert f"artifacts/{missing}" in err
    if missing.startswith("profile"):
        assert "dvc repro profile" in err


def test_a_profile_of_other_parameters_is_refused(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    file = workspace / "params.yaml"
    content = parse_yaml(file.read_text())
    content["profile"]["rollouts_per_prompt"] = 4
    file.write_text(dump_yaml(content))
    code, _, err = advise(workspace, monkeypatch, capsys)
    assert code == 2
    assert "must have 4 rollouts per prompt (profile.rollouts_per_prompt), got 8" in err
    assert "dvc repro profile" in err


@pytest.mark.parametrize("failed", [1, 8])
def test_a_profile_in_which_the_judge_failed_on_rollouts_is_advised_on(
    workspace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    failed: int,
):
    file = workspace / "artifacts" / "profile" / "prompts.parquet"
    profile = read_profile(file)
    rounds = (workspace / "artifacts" / "rollouts").glob("*/table.parquet")
    trained = {each for path in rounds for each in read_table(path, ROLLOUTS)["prompt_id"]}
    place = profile.index[~profile["prompt_id"].isin(trained)][-1]
    judged = profile.loc[place, "rollouts"] - failed
    successes = min(profile.loc[place, "successes"], judged)
    profile.loc[place, ["rollouts", "successes"]] = judged, successes
    profile.loc[place, "outcome_rate"] = successes / judged if judged else np.nan
    profile.loc[place, "mean_steps"] = profile.loc[place, "mean_steps"] if judged else np.nan
    if not successes:
        profile.loc[place, "solved_steps"] = np.nan
    write_table(profile.astype({"rollouts": int, "successes": int}), file, PROFILE)
    code, out, err = advise(workspace, monkeypatch, capsys)
    assert code == 0, err
    assert f"{len(profile) - (not judged)} prompts, 8 rollouts each" in out
