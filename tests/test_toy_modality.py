"""A modality that `grpo/` does not know runs through every stage, and learns."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.workspaces import ROOT, make_workspace, run_stages
from grpo.modalities import MODALITIES
from grpo.params.yaml import parse_yaml
from grpo.runtime.artifacts.files import read_json
from grpo.runtime.artifacts.usage import Usage
from stages import report
from tests.bandit import Bandit

DIGITS = "0123456789"


def params() -> dict[str, Any]:
    """Returns the smoke recipe for a bandit that is asked for a digit."""
    recipe = parse_yaml((ROOT / "recipes" / "smoke.yaml").read_text())
    recipe["policy"] = {
        "kind": "bandit",
        "base": {"arms": 10, "spread": 0.1},
        "lora": None,
        "recompute": False,
    }
    recipe["task"] = {
        "kind": "jsonl",
        "directory": None,
        "train": "digits/train.jsonl",
        "eval": "digits/eval.jsonl",
        "columns": {},
        "instruction": "",
    }
    recipe["reward"]["answer_pattern"] = "#(.*)"
    recipe["reward"]["judges"][0]["judge"] = "math"
    recipe["evaluation"] |= {"rollouts_per_prompt": 32}
    arm = recipe["arms"]["sgpo"]
    arm["curriculum"] = [
        {"split_at_random": {"phases": 1, "prompts_per_phase": 10}},
        {"fix_group_size": {"rollouts": 64}},
    ]
    arm["training"] |= {"updates_per_iteration": 10, "learning_rate": 0.3, "updates_per_audit": 0}
    recipe["arms"] = {"pull": arm}
    recipe["rounds"] = {
        "pull-1": {"arm": "pull", "start": "base", "phase": 1},
        "pull-2": {"arm": "pull", "start": "pull-1", "phase": 1},
    }
    return recipe


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # dvc's own
def test_a_modality_of_somebody_else_runs_through_every_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(MODALITIES, "bandit", Bandit())
    make_workspace(tmp_path, params())
    (tmp_path / "data/digits").mkdir()
    for part, asked in (("train", "pull {}"), ("eval", "pull  {}!")):
        lines = [json.dumps({"prompt": asked.format(each), "answer": each}) for each in DIGITS]
        (tmp_path / f"data/digits/{part}.jsonl").write_text("\n".join(lines))
    run_stages(tmp_path)
    monkeypatch.chdir(tmp_path)
    report.main(Usage(), Path("artifacts"), Path("artifacts/report"))
    found = read_json(Path("artifacts/report/metrics.json"))
    before, after = (each["mean_at_k"]["value"] for each in (found["base"], found["arms"]["pull"]))
    # By chance one pull of ten is right, of 320 at most 0.17 (4 standard errors).
    assert before < 0.17 < after
    assert "step of the rollout: a pull" in Path("artifacts/report/index.html").read_text()
