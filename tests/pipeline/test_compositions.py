"""Triage of sGPO, GRESO and PODS run on translation models and on vision-language models alike."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from benchmarks.workspaces import make_workspace, run_stages
from grpo.runtime.artifacts.files import read_json
from grpo.runtime.artifacts.stored_iterations import iterations_of
from grpo.runtime.artifacts.tables import CREDIT, REWARDS, read_profile, read_table
from tests.pipeline import test_seq2seq, test_vision_language

ARTIFACTS = Path("artifacts")
EASY, SIZES = 0.75, (4, 8)  # in pairs, a z-score reads the order of rewards only (rule U16)
GROUP, KEPT = 16, 4
SMALL = 4  # rollouts of a group that often have equal outcomes


def translation(workspace: Path) -> None:
    make_workspace(workspace, composed(test_seq2seq.params()))
    test_seq2seq.write_data(workspace)


def grounding(workspace: Path) -> None:
    make_workspace(workspace, composed(test_vision_language.params()))


def composed(params: dict[str, Any]) -> dict[str, Any]:
    """Returns the parameters with one round of three arms instead, made from the arm `online`."""
    arm = params["arms"]["online"]
    prompts = arm["curriculum"][0]["split_at_random"]["prompts_per_phase"]
    split = {"split_at_random": {"phases": 1, "prompts_per_phase": prompts}}
    few, many = ([split, {"fix_group_size": {"rollouts": each}}] for each in (SMALL, GROUP))
    skip = {"skip_uniform_prompts": {"prompts": prompts // 2, "step": 0.25}}
    extremes = {"keep_extreme_rollouts": {"keep": KEPT, "advantage": "kept_z_score"}}
    params["arms"] = {
        "triage": {
            **arm,
            "curriculum": [
                {"drop_trivial": {"above": EASY}},
                {"size_groups_by_inverse_rate": {"smallest": SIZES[0], "largest": SIZES[1]}},
                {"split_easy_to_hard": {"phases": 1}},
            ],
        },
        "greso": {
            **arm,
            "curriculum": few,
            "selection": [skip],
            "training": {**arm["training"], "iterations_per_round": 6},
        },
        "pods": {
            **arm,
            "curriculum": many,
            "objective": [{"dapo": {"low": 0.2, "high": 0.28}}, extremes],
        },
    }
    params["rounds"] = {
        f"{each}-1": {"arm": each, "start": "base", "phase": 1} for each in params["arms"]
    }
    params["profile"] |= {"when": "always", "rollouts_per_prompt": 8}
    params["evaluation"] |= {"rollouts_per_prompt": 2}
    return params


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # dvc's own
@pytest.mark.parametrize("make", [translation, grounding])
def test_selections_and_links_for_texts_run_on_other_modalities(
    make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make(tmp_path)
    run_stages(tmp_path)
    monkeypatch.chdir(tmp_path)
    check_triage()
    check_greso()
    check_pods()


def check_triage() -> None:
    """No prompt that the profile solved too often is sampled; group sizes are in their range."""
    rates = read_profile(ARTIFACTS / "profile/prompts.parquet").set_index("prompt_id")
    rewards = rewards_of("triage-1")
    assert (rates.loc[rewards["prompt_id"], "outcome_rate"] <= EASY).all()
    assert rewards.groupby(["iteration", "prompt_id"]).size().between(*SIZES).all()


def check_greso() -> None:
    """A prompt is skipped only if its last group had equal outcomes; some are."""
    last: dict[str, bool] = {}
    skipped = 0
    for files in iterations_of(ARTIFACTS, "greso-1"):
        passed = read_json(files.rollouts / "passed.json")
        skipped += len(passed)
        assert all(last[each] for each in passed)
        groups = read_table(files.rewards, REWARDS).groupby("prompt_id")["outcome"]
        last |= (groups.nunique() == 1).to_dict()
    assert skipped


def check_pods() -> None:
    """Of every group, of GROUP rollouts, KEPT are trained."""
    for files in iterations_of(ARTIFACTS, "pods-1"):
        credit = read_table(files.credit, CREDIT)
        groups = credit[credit["weight"] > 0].groupby("prompt_id")
        assert (credit.groupby("prompt_id").size() == GROUP).all()
        assert (groups.size() == KEPT).all()


def rewards_of(name: str) -> pd.DataFrame:
    """Returns the rewards of a round's iterations, with the column iteration."""
    tables = [read_table(each.rewards, REWARDS) for each in iterations_of(ARTIFACTS, name)]
    return pd.concat([table.assign(iteration=n) for n, table in enumerate(tables)])
