"""A vision-language model runs through every stage with two iterations per round, and learns."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from benchmarks.workspaces import ROOT, make_workspace, run_stages
from grpo.params.yaml import parse_yaml
from grpo.runtime.artifacts.files import read_json
from grpo.runtime.artifacts.usage import Usage
from stages import report
from tests.files import contents


def params() -> dict[str, Any]:
    """Returns the recipe with counts only, a smaller model and a short warm-up."""
    recipe: dict[str, Any] = parse_yaml((ROOT / "recipes" / "grounding.yaml").read_text())
    family = {"style": "filled", "min_objects": 1, "max_objects": 3, "pairs": "known"}
    recipe["task"] |= {
        "train_prompts": 32,
        "eval_prompts": 48,
        "pixels": 32,
        "families": {"count": {**family, "question": "count", "warmup": 1.0}},
    }
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
    recipe["arms"] = {"online": arm}
    recipe["rounds"] = {
        "online-1": {"arm": "online", "start": "base", "phase": 1},
        "online-2": {"arm": "online", "start": "online-1", "phase": 1},
    }
    return recipe


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
    trained = contents(Path("artifacts/policies/online-1"))
    for name in ("artifacts/policies/online-1", "artifacts/training/online-1"):
        Path(name).rename(tmp_path / name.replace("/", "-"))
    run_stages(tmp_path)
    assert contents(Path("artifacts/policies/online-1")) == trained
