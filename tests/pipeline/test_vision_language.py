"""A vision-language model runs through every stage with two iterations per round, and learns."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from benchmarks.workspaces import ROOT, make_workspace, run_stages
from grpo.objective.algorithms import group_revision
from grpo.params.parameters import read_params
from grpo.params.yaml import parse_yaml
from grpo.report.reading import read_run
from grpo.report.revisions import measure_revisions
from grpo.report.side_by_side import read_sheets
from grpo.runtime.artifacts.files import read_json
from grpo.runtime.artifacts.stored_iterations import iterations_of
from grpo.runtime.artifacts.tables import CREDIT, REWARDS, ROLLOUTS, read_table
from grpo.runtime.artifacts.usage import Usage
from grpo.sampling.shaping import improvements
from grpo.types import Rollouts
from stages import report
from tests.files import contents
from tests.objective.batches import credit_of

TEMPLATE = " not {answer}"


def params() -> dict[str, Any]:
    """Returns the recipe with counts only, a smaller model and a short warm-up."""
    recipe: dict[str, Any] = parse_yaml((ROOT / "recipes" / "grounding.yaml").read_text())
    family = {"style": "filled", "min_objects": 1, "max_objects": 3, "pairs": "known"}
    recipe["task"] |= {
        "train_prompts": 32,
        "eval_prompts": 48,
        "pixels": 32,
        "families": {"count": {**family, "question": "count", "warmup": 1.0}},
        "revised_pairs": {"share": 0.3, "right": 0.3, "shift": 6, "template": TEMPLATE},
    }
    other = {**recipe["reward"]["judges"][0], "judge": "box_distance", "weight": 0.0}
    recipe["reward"]["judges"].append(other)
    base = recipe["policy"]["base"]
    base["config"] = {"projection_dim": 32, "hidden_size": 32}
    base["vision_config"] |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    base["vision_config"] |= {"image_size": 32, "patch_size": 8}
    base["text_config"] |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    base["text_config"] |= {"head_dim": 8}
    base["warmup"] = {
        "prompts": 256,
        "updates": 60,
        "rows_per_update": 32,
        "learning_rate": 0.003,
    }
    recipe["policy"]["max_steps"] = 3
    recipe["evaluation"] |= {"rollouts_per_prompt": 64, "rollouts_per_batch": 1024}
    arm = recipe["arms"]["grpo"]
    arm["curriculum"] = [
        {"split_at_random": {"phases": 1, "prompts_per_phase": 32}},
        {"fix_group_size": {"rollouts": 16}},
    ]
    arm["training"] |= {
        "iterations_per_round": 2,
        "updates_per_iteration": 2,
        "learning_rate": 0.002,
    }
    revise = {"revise_first_answers": {"judge": "box_distance", "template": TEMPLATE}}
    revised = {**arm, "selection": [revise], "objective": [{"group_revision": {"weight": 1.0}}]}
    recipe["arms"] = {"online": arm, "revised": revised}
    recipe["rounds"] = {
        "online-1": {"arm": "online", "start": "base", "phase": 1},
        "online-2": {"arm": "online", "start": "online-1", "phase": 1},
        "revised-1": {"arm": "revised", "start": "base", "phase": 1},
    }
    return recipe


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # dvc's own
def test_a_vision_language_model_runs_through_every_stage_and_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make_workspace(tmp_path, params())
    run_stages(tmp_path)
    updates = pd.read_csv(tmp_path / "artifacts/training/base/updates.csv")
    assert updates["loss"].iloc[-1] < 0.5 * updates["loss"].iloc[0]
    monkeypatch.chdir(tmp_path)
    report.main(Usage(), Path("artifacts"), Path("artifacts/report"))
    found = read_json(Path("artifacts/report/metrics.json"))
    before, after = (
        each["mean_at_k"]["value"] for each in (found["base"], found["arms"]["online"])
    )
    # Of 3072 evaluation rollouts; 4 standard errors of a difference are at most 0.05.
    assert after - before > 0.05
    page = Path("artifacts/report/index.html").read_text()
    assert "[image] count" in page
    assert "](data:image" not in page
    assert "first answer:" in page
    sheets = read_sheets(Path("artifacts"), read_run(Path("artifacts"), read_params()))
    assert [each.has_images for each in sheets] == [True, True]
    ((name, revised),) = measure_revisions(read_run(Path("artifacts"), read_params())).items()
    assert (name, revised.asked) == ("revised-1", 0.5)
    assert f"<td>{revised.improvement:.3f}</td>" in page
    trained = contents(Path("artifacts/policies/online-1"))
    require_revisions(Path("artifacts"))
    removed = [
        Path("artifacts") / folder / name
        for folder in ("policies", "training")
        for name in ("online-1", "revised-1")
    ]
    for each in removed:
        each.rename(tmp_path / f"{each.parent.name}-{each.name}")
    run_stages(tmp_path)
    assert contents(Path("artifacts/policies/online-1")) == trained
    for each in removed:
        assert contents(each) == contents(tmp_path / f"{each.parent.name}-{each.name}")


def require_revisions(artifacts: Path):
    """Half of the groups have a first answer; the advantages are those of the published form."""
    for files in iterations_of(artifacts, "revised-1"):
        rollouts = read_table(files.table, ROLLOUTS)
        groups = rollouts.groupby("prompt_id")["first_answer"].first()
        assert groups.notna().sum() == len(groups) // 2
        rewards = read_table(files.rewards, REWARDS)
        credit = read_table(files.credit, CREDIT).set_index("rollout_id")
        improved = improvements(rollouts, rewards, "box_distance")
        assert rollouts["first_score"].notna().any()
        made = Rollouts(
            group=torch.tensor(rollouts["group"].to_numpy()),
            reward=torch.tensor(rewards["reward"].to_numpy(np.float32)),
            outcome=torch.tensor(rewards["outcome"].to_numpy(np.float32)),
            mask=torch.ones(len(rollouts), 1, dtype=torch.bool),
            behavior_logp=torch.zeros(len(rollouts), 1),
            improvement=torch.tensor(improved.astype(np.float32)),
        )
        expected = credit_of(group_revision(weight=1.0), made).advantage[:, 0]
        found = credit.loc[rollouts["rollout_id"], "advantage"].to_numpy()
        np.testing.assert_allclose(found, expected.numpy(), atol=1e-6)
