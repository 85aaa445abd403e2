"""The image recipe through every stage, made small: learning, the same bytes, and a resume."""

import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from grpo.errors import ArtifactError
from grpo.objective.algorithms import flow_grpo
from grpo.params.yaml import parse_yaml
from grpo.runtime.artifacts.files import Scratch, read_json
from grpo.runtime.artifacts.stored_iterations import iterations_of
from grpo.runtime.artifacts.tables import REWARDS, ROLLOUTS, read_table
from grpo.runtime.artifacts.tensors import read_tensors, write_tensors
from grpo.runtime.artifacts.usage import Usage
from stages import report, train
from tests.modalities.tiny import rewarded
from tests.modalities.tiny_denoiser import TRANSFORMER, seeded, tiny_denoiser
from tests.pipeline.workspaces import cut_short, run_stages_in, start_stages, until_done
from tests.training.test_training import train as train_policy

ROOT = Path(__file__).parents[2]
ROUNDS = ("flow-1", "flash-1")
TWO_ITERATIONS = {"iterations_per_round": 2, "updates_per_iteration": 1}  # of flash
SCOPE = {
    "pilots": 1,
    "steps_per_look": 1,
    "smoothing": 0.3,
    "structure_tolerance": 0.1,
    "preference_tolerance": 0.1,
    "patience": 1,
    "first_look": 1,
    "fallback": [0.1, 0.64],
}


def small() -> dict[str, Any]:
    """Returns the image recipe: a tiny model, one round per arm, few prompts."""
    params = parse_yaml((ROOT / "recipes" / "glyphs.yaml").read_text())
    params["task"] |= {"train_prompts": 8, "eval_prompts": 4}
    params["task"]["families"] = {"digits_1": ["23456789ACE"], "digits_2": ["23456789", "2345"]}
    base = params["policy"]["base"]
    base["transformer"] = dict(TRANSFORMER)
    base["warmup"] |= {
        "shares": {"digits_1": 1, "digits_2": 2},
        "prompts": 64,
        "updates": 4,
        "rows_per_update": 8,
        "font_size": 8,
    }
    params["policy"]["canvas"] = {"frames": 1, "height": 8, "width": 16}
    params["evaluation"]["sampling"]["num_steps"] = 3
    params["evaluation"]["rollouts_per_prompt"] = 2
    for arm in params["arms"].values():
        arm["sampling"] |= {"num_steps": 4, "window": [0, 3], "rollouts_per_batch": 8}
        arm["training"] |= {"updates_per_checkpoint": 1}
        arm["objective"] = [
            {name: {**settings, "dimensions": 128}}
            for link in arm["objective"]
            for name, settings in link.items()
        ]
    params["arms"]["flash"]["sampling"]["scope"] = dict(SCOPE)
    short = cut_short(params, ROUNDS)
    flash = short["arms"]["flash"]
    flash["training"] = flash["training"] | TWO_ITERATIONS
    return short


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_stages_in(tmp_path_factory.mktemp("images"), small())


def test_every_stage_leaves_what_the_next_one_reads(run: Path):
    for name, rows in zip(ROUNDS, (16, 8), strict=True):
        rollouts = run / "artifacts" / "rollouts" / name
        table = read_table(rollouts / "table.parquet", ROLLOUTS)
        tensors = read_tensors(rollouts / "tensors.safetensors")
        assert len(table) == len(tensors["media"]) == rows
        assert (table["steps"] == (3 if name == "flow-1" else 1)).all()
        assert tensors["media"].shape[1:] == (1, 8, 16)
        cost = read_json(rollouts / "summary.json")["cost"]
        # Two pilots in each iteration of flash, judged at each of four steps.
        assert cost["judge_calls"] == (0 if name == "flow-1" else 8)
        assert cost["sampled_steps"] == (64 if name == "flow-1" else 32 + 8)
        rewards = read_table(run / "artifacts" / "rewards" / f"{name}.parquet", REWARDS)
        assert set(rewards["rollout_id"]) == set(table["rollout_id"])
        summary = read_json(run / "artifacts" / "rollouts" / name / "summary.json")
        assert summary["cost"]["flops"] > 0
        assert "greedy" not in read_json(run / "artifacts" / "evaluations" / f"{name}.json")


def test_a_later_iteration_samples_other_prompts_and_measures_their_steps(run: Path):
    first, second = iterations_of(run / "artifacts", "flash-1")
    tables = [read_table(each.table, ROLLOUTS) for each in (first, second)]
    assert not set(tables[0]["prompt_id"]) & set(tables[1]["prompt_id"])
    assert set(read_table(second.rewards, REWARDS)["rollout_id"]) == {*tables[1]["rollout_id"]}
    assert read_json(second.rollouts / "cost.json")["judge_calls"] == 8  # as in the first one
    updates = pd.read_csv(run / "artifacts" / "training" / "flash-1" / "updates.csv")
    assert updates["rollouts"].tolist() == [8, 8]
    assert updates["trained_steps"].tolist() == [8, 8]  # one step of every rollout


@pytest.mark.long
def test_a_second_workspace_agrees_to_the_byte(run: Path, tmp_path: Path):
    again = tmp_path / "workspace"
    until_done(again, start_stages(again, small()))  # in a process of its own
    for path in sorted((run / "artifacts").rglob("*")):
        other = again / path.relative_to(run)
        assert path.is_dir() or path.read_bytes() == other.read_bytes(), path.name


def test_the_report_needs_no_greedy_score(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(run)
    report.main(Usage(), Path("artifacts"), Path("artifacts/report"))
    page = (run / "artifacts" / "report" / "index.html").read_text()
    assert "pass@2" in page
    assert "greedy" not in page


def test_rollouts_of_mixed_steps_are_refused_by_the_groups_number(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shutil.copytree(run, tmp_path / "broken")
    monkeypatch.chdir(tmp_path / "broken")
    path = Path("artifacts/rollouts/flash-1/tensors.safetensors")
    tensors = read_tensors(path)
    tensors["step_index"][1] = (tensors["step_index"][0] + 1) % 3
    write_tensors(path, tensors)
    a = Path("artifacts")
    inputs = (a / "data/judge.json", a / "policies/base", a / "policies/base")
    prompts = (a / "prompts/train.parquet", a / "curricula/flash.parquet")
    drawn = (a / "rollouts/flash-1", a / "rewards/flash-1.parquet")
    outs = (a / "policies/flash-1", a / "training/flash-1")
    with pytest.raises(ArtifactError, match=r"flash-1/tensors.safetensors: U4: group 0 has noise"):
        train.main(Usage(), *inputs, *prompts, *drawn, *outs)


def train_until(stop: int | None, scratch: str) -> dict[str, torch.Tensor]:
    """Returns the weights after a round of two updates; interrupted when `stop` are done."""
    policy = tiny_denoiser()
    trajectory, logp = policy.sample(["2A", "77"], group_sizes=[4, 4], generator=seeded())
    reward = torch.arange(8) % 3 / 2

    def progress(done: int, total: int) -> None:
        if done == stop:
            raise KeyboardInterrupt

    train_policy(
        policy,
        rewarded(trajectory, logp, reward),
        trajectory,
        objective=flow_grpo(128, 0.01, 0.01),
        scratch=Scratch(scratch, "x"),
        progress=progress,
    )
    return policy.model.state_dict()


@pytest.mark.parametrize("stop", [1, 2])
def test_training_resumes_after_any_update_bit_identically(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int
):
    monkeypatch.chdir(tmp_path)
    whole = train_until(None, "whole")
    with pytest.raises(KeyboardInterrupt):
        train_until(stop, "cut")
    resumed = train_until(None, "cut")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    fresh = tiny_denoiser().model.state_dict()
    assert not all(torch.equal(whole[name], fresh[name]) for name in whole)
