"""A profile is drawn only if something reads it, and everything works without one."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.advice.facts import read_facts
from grpo.allocation.curriculum import CurriculumStep, curriculum_input, plan_curriculum
from grpo.errors import ArtifactError, ParameterError
from grpo.params.parameters import Parameters, read_params
from grpo.params.recorded import PLUGIN_MANIFESTS
from grpo.params.yaml import dump_yaml, parse_yaml
from grpo.runtime.artifacts.files import read_json
from grpo.runtime.artifacts.tables import (
    CURRICULUM,
    PROFILE,
    PROFILED,
    PROMPTS,
    ROLLOUTS,
    count_rows,
    empty_table,
    read_profile,
    read_table,
    write_table,
)
from grpo.runtime.artifacts.usage import Usage
from grpo.wiring.allocation import (
    CURRICULUM_STEPS,
    SELECTION_STEPS,
    build_curriculum,
    build_selection,
    is_profile_needed,
    reads_profile,
)
from grpo.wiring.rollouts import with_pairs
from stages import check, curriculum, profile
from tests.files import contents

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
SETTINGS: dict[str, dict[str, Any]] = {  # of every curriculum step, on 12 prompts of two families
    "drop_trivial": {"above": 0.75},
    "sample_unsolved": {"fraction": 0.5},
    "keep_rate_window": {"low": 0.25, "high": 0.75},
    "fix_group_size": {"rollouts": 2},
    "size_groups_by_inverse_rate": {"smallest": 2, "largest": 8},
    "split_at_random": {"phases": 2, "prompts_per_phase": 3},
    "split_by_group_size": {"phases": 1},
    "split_easy_to_hard": {"phases": 2},
    "stage_by_family": {"order": "f, g", "prompts_per_phase": 2},
}
SELECTION_SETTINGS: dict[str, dict[str, Any]] = {
    "allocate_by_signal": {"budget": 1e9},
    "sample_prompts_near_rate": {"prompts": 3},
    "size_groups_by_knapsack": {"prompts": 3, "rollouts": 2},
    "visit_prompts": {"prompts": 2},
    "skip_uniform_prompts": {"prompts": 2},
    "resample_uniform_groups": {"prompts": 2, "prompts_per_batch": 2},
    "reuse_profile_rollouts": {},
    "revise_first_answers": {"judge": "exact"},
}
BLIND = [
    {"split_at_random": {"phases": 2, "prompts_per_phase": 3}},
    {"fix_group_size": {"rollouts": 2}},
]
LOOKING = [{"drop_trivial": {"above": 0.75}}, *BLIND]


def prompts() -> pd.DataFrame:
    names = [f"p{index:02d}" for index in range(12)]
    texts = {"prompt": "1+1=", "answer": "2", "entry": "{}"}
    return pd.DataFrame({"prompt_id": names, "family": ["f", "g"] * 6, **texts})


def profiled(rates: list[float]) -> pd.DataFrame:
    return prompts()[["prompt_id", "family"]].assign(outcome_rate=rates)


def applied(step: CurriculumStep, rates: list[float]) -> pd.DataFrame:
    """Returns what a step makes of prompts with group sizes, without their rates."""
    frame = profiled(rates).assign(rollouts=2)
    return step.apply(frame, np.random.default_rng(0)).drop(columns="outcome_rate")


def params_with(
    tmp_path: Path, *, curricula: list[Any], selection: Any = (), when: str = "read"
) -> Parameters:
    """Returns the image recipe with an arm per curriculum, written to params.yaml."""
    content = parse_yaml((ROOT / "recipes" / "reasoning-smollm2.yaml").read_text())
    plain = content["arms"]["plain"]
    training = {**plain["training"], "iterations_per_round": 1}  # phases here have few prompts
    arm = {**plain, "selection": list(selection), "training": training}
    content["profile"]["when"] = when
    content["arms"] = {f"arm{i}": {**arm, "curriculum": each} for i, each in enumerate(curricula)}
    content["rounds"] = {"first": {"arm": "arm0", "start": "base", "phase": 1}}
    (tmp_path / "params.yaml").write_text(dump_yaml(content))
    return read_params(tmp_path / "params.yaml")


@pytest.mark.parametrize("name", CURRICULUM_STEPS)
@settings(max_examples=20, deadline=None)
@given(rates=st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), min_size=12, max_size=12))
def test_a_curriculum_step_that_reads_no_profile_is_the_same_for_all_rates(
    name: str, rates: list[float]
):
    step = CURRICULUM_STEPS[name](**SETTINGS[name])
    if not step.reads_profile:
        pd.testing.assert_frame_equal(applied(step, rates), applied(step, [np.nan] * 12))


@pytest.mark.parametrize("name", CURRICULUM_STEPS)
def test_a_curriculum_step_that_reads_the_profile_depends_on_it(name: str):
    step = CURRICULUM_STEPS[name](**SETTINGS[name])
    rising = [index / 11 for index in range(12)]
    zeros = [0.0] * 12
    is_same = applied(step, rising).equals(applied(step, zeros))
    assert is_same != step.reads_profile


def test_only_a_share_of_unsolved_prompts_makes_a_split_by_group_size_read_the_profile():
    split = CURRICULUM_STEPS["split_by_group_size"]
    assert not split(phases=1).reads_profile
    step = split(phases=1, unsolved=0.5)
    assert step.reads_profile
    assert len(applied(step, [0.5] * 12)) == 12
    assert len(applied(step, [0.5] * 6 + [0.0] * 6)) == 9


@pytest.mark.parametrize("when", ["read", "always"])
@pytest.mark.parametrize("name", [None, *SELECTION_STEPS])
@pytest.mark.parametrize("others", [[], [BLIND], [LOOKING], [BLIND, LOOKING]])
def test_a_profile_is_needed_if_any_arm_reads_it_or_it_is_asked_for(
    tmp_path: Path, when: str, name: str | None, others: list[Any]
):
    selection = [] if name is None else [{name: SELECTION_SETTINGS[name]}]
    params = params_with(tmp_path, curricula=[BLIND, *others], selection=selection, when=when)
    reuses = build_selection(params.arms["arm0"].selection, "arm0").reuses_profile
    assert reuses == (name == "reuse_profile_rollouts")
    assert is_profile_needed(params) == (reuses or LOOKING in others or when == "always")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_asks_for_no_profile_that_nobody_reads(path: Path):
    params = read_params(path)
    assert is_profile_needed(params) == any(reads_profile(params, arm) for arm in params.arms)


def test_who_reads_a_profile_is_all_that_the_stage_learns_of_curricula(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Else a finished profile would be drawn again whenever another arm's curriculum changes."""
    monkeypatch.chdir(tmp_path)
    written = []
    for curricula in ([LOOKING], [LOOKING, BLIND], [BLIND], [BLIND, BLIND]):
        params_with(tmp_path, curricula=curricula)
        check.main(Usage(), *map(Path, ("params.yaml", "data", "needed.json", "described", "own")))
        written.append(Path("needed.json").read_bytes())
    assert written[0] == written[1] != written[2] == written[3]


@pytest.mark.parametrize("content", ["{}", "[1]", "null", '{"needed": 1}'])
def test_what_does_not_say_whether_a_profile_is_needed_is_refused(tmp_path: Path, content: str):
    path = tmp_path / "needed.json"
    path.write_text(content)
    with pytest.raises(ArtifactError, match=r'needed.json: must be {"needed": true} or'):
        profile.main(Usage(), path, *[tmp_path / "none"] * 4)


def unread_run(tmp_path: Path) -> Path:
    """Runs the stages up to the curriculum in a workspace without a base policy; returns it."""
    params_with(tmp_path, curricula=[BLIND])
    artifacts = Path("artifacts")
    write_table(prompts(), artifacts / "prompts/train.parquet", PROMPTS)
    needed, train = artifacts / "profile_needed.json", artifacts / "prompts/train.parquet"
    check.main(
        Usage(), Path("params.yaml"), Path("data"), needed, artifacts / "data", PLUGIN_MANIFESTS
    )
    judge = artifacts / "data/judge.json"
    profile.main(Usage(), needed, judge, artifacts / "policies/base", train, artifacts / "profile")
    return artifacts


def test_an_unread_profile_loads_no_policy_draws_nothing_and_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    artifacts = unread_run(tmp_path)
    summary = read_json(artifacts / "profile/summary.json")
    assert summary.pop("rollouts") == 0
    assert set(summary.pop("cost").values()) == {0}
    assert summary == {}
    assert len(read_profile(artifacts / "profile/prompts.parquet")) == 0
    assert count_rows(artifacts / "profile/rollouts/table.parquet") == 0
    before = contents(artifacts)
    unread_run(tmp_path)
    assert contents(artifacts) == before


def test_a_curriculum_without_a_profile_chooses_as_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    artifacts = unread_run(tmp_path)
    paths = [artifacts / "prompts/train.parquet", artifacts / "profile/prompts.parquet"]
    out = artifacts / "curricula/arm0.parquet"
    rollouts = artifacts / "profile/rollouts"
    curriculum.main(Usage(), *paths, rollouts, out, out.with_suffix(".json"))
    without = read_table(out, CURRICULUM)
    assert without["outcome_rate"].isna().all()
    full = profiled([0.5] * 12).assign(rollouts=2, successes=1, mean_steps=1.0, solved_steps=1.0)
    write_table(full, artifacts / "profile/prompts.parquet", PROFILE)
    curriculum.main(Usage(), *paths, rollouts, out, out.with_suffix(".json"))
    chosen = read_table(out, CURRICULUM)
    assert (chosen["outcome_rate"] == 0.5).all()
    columns = ["prompt_id", "phase", "position", "rollouts"]
    pd.testing.assert_frame_equal(without[columns], chosen[columns])


def test_a_step_that_reads_rates_refuses_an_empty_profile():
    steps = build_curriculum(LOOKING, "arm")
    with pytest.raises(ArtifactError, match="drop_trivial reads a profile, got one without rows"):
        curriculum_input(empty_table(PROFILE), prompts(), steps)
    rates = curriculum_input(profiled([0.5] * 12).assign(rollouts=8), prompts(), steps)
    assert len(plan_curriculum(rates, steps, seed=0)) == 6


@pytest.mark.parametrize("steps", [BLIND, LOOKING], ids=["blind", "looking"])
def test_a_prompt_without_a_judged_rollout_is_in_no_arm(steps: list[Any]):
    profile = profiled([0.5] * 11 + [np.nan]).assign(rollouts=[8] * 11 + [0])
    built = build_curriculum(steps, "arm")
    rates = curriculum_input(profile, prompts(), built)
    assert rates["prompt_id"].tolist() == prompts()["prompt_id"].tolist()[:11]
    assert len(plan_curriculum(rates, built, seed=0)) == 6


def test_advice_without_a_profile_says_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    artifacts = unread_run(tmp_path)
    with pytest.raises(ArtifactError, match=r"no arm reads a profile; set profile\.when to always"):
        read_facts(artifacts, read_params())


def test_empty_tables_have_their_columns():
    optional = ["first_answer", "first_score", "prompt_weight"]
    assert [*empty_table(ROLLOUTS).columns, *optional] == list(ROLLOUTS.columns)


def test_a_prompt_with_one_judged_rollout_is_no_group_of_an_allocation():
    candidates = pd.DataFrame({"prompt_id": ["a", "b", "c"], PROFILED: [1, 8, 2]})
    assert with_pairs(candidates, "own")["prompt_id"].tolist() == ["b", "c"]
    with pytest.raises(ParameterError, match=r"arms.own.selection: .*rollouts_per_prompt to 2"):
        with_pairs(candidates.head(1), "own")
