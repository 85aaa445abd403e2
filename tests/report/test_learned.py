"""Laws of inconclusive results: page, summary and advice warn about them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from grpo.advice import text
from grpo.params.parameters import Parameters
from grpo.registry.gate import Bounds, judge
from grpo.report.learned import explain_missing_signal, find_empty_results
from grpo.report.page import PAGE, write_page
from grpo.runtime.artifacts.files import read_json, write_json
from grpo.runtime.artifacts.marks import Banner
from grpo.runtime.artifacts.tables import CREDIT, REWARDS, read_table, unscored, write_table
from grpo.sampling.evaluation import LEAST_PROMPTS, remark_on_prompts

pytestmark = pytest.mark.usefixtures("figures_drawn_once")

Change = Callable[[pd.DataFrame], pd.DataFrame]


def change_rewards(artifacts: Path, name: str, **columns: object) -> None:
    path = artifacts / f"rewards/{name}.parquet"
    write_table(read_table(path, REWARDS).assign(**columns), path, REWARDS)


def change_credit(artifacts: Path, name: str, **columns: object) -> None:
    path = artifacts / f"training/{name}/credit.parquet"
    write_table(read_table(path, CREDIT).assign(**columns), path, CREDIT)


def titles(banners: list[Banner]) -> list[str]:
    return [each.title for each in banners if each.title != "Too few evaluation prompts"]


def test_a_run_that_learned_has_no_such_banner(artifacts: Path, params: Parameters) -> None:
    assert titles(find_empty_results(artifacts, params)) == []


def test_a_round_without_a_mixed_group_learned_nothing_and_says_why(
    artifacts: Path, params: Parameters
) -> None:
    change_rewards(artifacts, "uniform-2", outcome=0.0, reward=0.0)
    change_credit(artifacts, "uniform-2", advantage=0.0)
    (banner, *_) = find_empty_results(artifacts, params)
    assert banner.title == "train@uniform-2 learned nothing"
    assert "rewards were equal within every group (all 0)" in banner.text
    write_page(artifacts, params, artifacts / "report")
    page = (artifacts / "report" / PAGE).read_text()
    assert page.index(banner.title) < page.index("<header>")


def test_a_rollout_that_was_not_judged_makes_no_group_mixed(
    artifacts: Path, params: Parameters
) -> None:
    rewards = read_table(artifacts / "rewards/uniform-2.parquet", REWARDS)
    is_failed = rewards.index == 0
    change_rewards(
        artifacts,
        "uniform-2",
        outcome=np.where(is_failed, 0.0, 1.0),
        reward=np.where(is_failed, 0.0, 1.0),
        status=np.where(is_failed, "failed", "scored"),
    )
    change_credit(artifacts, "uniform-2", advantage=0.0)
    reason = explain_missing_signal(artifacts, params)["uniform-2"]
    assert reason == "rewards were equal within every group (all 1)"


@pytest.mark.parametrize("status", ["unparsable", "timed_out", "failed"])
def test_a_round_of_which_nothing_was_scored_says_so(
    artifacts: Path, params: Parameters, status: str
) -> None:
    change_rewards(artifacts, "sgpo-1", outcome=0.0, reward=0.0, status=status)
    change_credit(artifacts, "sgpo-1", weight=0.0)
    found = find_empty_results(artifacts, params)
    assert titles(found) == ["score@sgpo-1 scored nothing", "train@sgpo-1 learned nothing"]
    assert all(f"{status} (4)" in each.text for each in found[:2])


@pytest.mark.parametrize(
    ("stage", "path"),
    [
        ("profile", "profile/summary.json"),
        pytest.param("evaluate@base", "evaluations/base.json", marks=pytest.mark.long),
        ("evaluate@sgpo-1", "evaluations/sgpo-1.json"),
    ],
)
def test_a_profile_or_an_evaluation_of_which_nothing_was_scored_says_so(
    artifacts: Path, params: Parameters, stage: str, path: str
) -> None:
    """Some rollouts were judged, so the stage did not fail."""
    statuses = pd.DataFrame({"status": ["failed"] * 5 + ["unparsable"]})
    write_json(artifacts / path, {**read_json(artifacts / path), **unscored(statuses)})
    (banner,) = [each for each in find_empty_results(artifacts, params) if "scored" in each.title]
    assert banner.title == f"{stage} scored nothing"
    assert banner.text.startswith("All 6 rollouts are failed (5), unparsable (1);")
    write_page(artifacts, params, artifacts / "report")
    assert banner.title in (artifacts / "report" / PAGE).read_text()


def test_a_stage_with_a_score_says_nothing_of_it() -> None:
    assert unscored(pd.DataFrame({"status": ["failed", "scored"]})) == {}


def test_one_scored_rollout_is_enough_for_the_stage_not_for_learning(
    artifacts: Path, params: Parameters
) -> None:
    statuses = ["scored", "failed", "failed", "failed"]
    change_rewards(artifacts, "sgpo-1", outcome=0.0, status=statuses)
    assert titles(find_empty_results(artifacts, params)) == []


def evaluation(successes: list[int]) -> pd.DataFrame:
    ids = [f"e{i}" for i in range(len(successes))]
    table = {"prompt_id": ids, "family": "f", "greedy": 0.0, "rollouts": 4, "successes": successes}
    return pd.DataFrame(table)


@pytest.mark.parametrize("number", range(1, LEAST_PROMPTS))
def test_no_gain_on_a_few_prompts_makes_a_champion(number: int) -> None:
    """The interval of prompts that agree has no width: +0.250 [+0.250, +0.250]."""
    verdict = judge(evaluation([2] * number), evaluation([1] * number), Bounds())
    assert f"on {number} prompts, fewer than the {LEAST_PROMPTS}" in verdict.reason


def test_the_least_number_of_prompts_is_where_a_sign_test_can_be_significant() -> None:
    assert 2 * 0.5**LEAST_PROMPTS < 0.05 <= 2 * 0.5 ** (LEAST_PROMPTS - 1)
    many = evaluation([2] * LEAST_PROMPTS), evaluation([1] * LEAST_PROMPTS)
    assert judge(*many, Bounds()).reason == ""


def test_too_few_prompts_are_said_by_check_and_on_the_page(
    artifacts: Path, params: Parameters
) -> None:
    assert find_empty_results(artifacts, params)[-1].title == "Too few evaluation prompts"
    assert remark_on_prompts(params) is None
    few = params.task.model_copy(update={"eval_prompts": LEAST_PROMPTS - 1})
    remark = remark_on_prompts(params.model_copy(update={"task": few}))
    assert remark is not None
    assert "task.eval_prompts" in remark


@pytest.mark.parametrize("rates", [[0.0] * 3, [1.0] * 3, [0.0, 1.0, 0.0]])
def test_no_arm_is_proposed_where_nothing_can_be_learned(
    monkeypatch: pytest.MonkeyPatch, params: Parameters, rates: list[float]
) -> None:
    from tests.advice.profiles import synthetic_facts

    facts = synthetic_facts(3)
    profile = facts.profile.assign(outcome_rate=rates)
    changed = type(facts)(**{**vars(facts), "profile": profile})
    monkeypatch.setattr(text, "read_facts", lambda *_: changed)
    said = text.advise(Path("artifacts"), params, Path("params.yaml"))
    assert "Nothing can be learned here, so no arm is proposed" in said
    assert "advised" not in said


def test_no_arm_is_proposed_where_no_finished_round_learned(
    artifacts: Path, params: Parameters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profile has mixed groups, but no finished round had any."""
    from tests.advice.profiles import synthetic_facts

    for name in params.rounds:
        change_credit(artifacts, name, weight=0.0)
    monkeypatch.setattr(text, "read_facts", lambda *_: synthetic_facts())
    said = text.advise(artifacts, params, Path("params.yaml"))
    assert "No finished round learned anything, so no arm is proposed" in said
    assert all(
        f"  {name}: no rollout had an advantage, because the" in said for name in params.rounds
    )
    assert "advised" not in said


def test_a_round_that_learned_and_one_that_is_missing_are_told_apart(
    artifacts: Path, params: Parameters
) -> None:
    change_credit(artifacts, "uniform-2", advantage=0.0)
    (artifacts / "rewards/sgpo-1.parquet").unlink()
    reasons = explain_missing_signal(artifacts, params)
    assert list(reasons) == ["uniform-1", "uniform-2"]
    assert [bool(each) for each in reasons.values()] == [False, True]
