"""Every recipe that needs a GPU or a hub runs through all stages as a tiny twin on the CPU."""

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from safetensors.torch import load_file

from benchmarks.workspaces import make_workspace, run_stages
from grpo.runtime.artifacts.usage import Usage
from stages import report
from tests.twins.models import CONFIGS, DEPTHS, INDICES, WIDTHS, config_of, shrink
from tests.twins.recipes import E2PO, UPDATES, make_twin, needing_a_twin, read

NAMES = needing_a_twin()


def run_twin(params: dict[str, Any], workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs all stages of a recipe's twin in this process, and checks what every round left."""
    twin = make_twin(params, workspace / "made")
    make_workspace(workspace, twin)
    for each in (workspace / "made").iterdir():
        each.rename(workspace / "data" / each.name)
    run_stages(workspace)
    monkeypatch.chdir(workspace)
    artifacts = Path("artifacts")
    report.main(Usage(), artifacts, artifacts / "report")
    assert (artifacts / "report" / "index.html").stat().st_size > 0
    for name in twin["rounds"]:
        updates = pd.read_csv(artifacts / "training" / name / "updates.csv")
        assert len(updates) == UPDATES
        assert updates["loss"].map(math.isfinite).all()
        weights = [
            load_file(path) for path in (artifacts / "policies" / name).rglob("*.safetensors")
        ]
        assert weights
        assert all(torch.isfinite(each).all() for part in weights for each in part.values())


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of dvc and of the libraries' own
@pytest.mark.parametrize("name", NAMES)
def test_a_tiny_twin_runs_all_arms_through_all_stages(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run_twin(read(name), tmp_path, monkeypatch)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_the_image_recipe_runs_with_e2po(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    params = read("images-sd35")
    arm = params["arms"].pop("flow")
    arm = {**arm, "objective": E2PO["objective"], "sampling": arm["sampling"] | E2PO["sampling"]}
    run_twin({**params, "arms": {"e2po": arm}}, tmp_path, monkeypatch)


def test_a_model_without_configurations_fails_in_one_line_that_says_what_to_add():
    for source, message in [
        ({"source": "hub", "id": "a/b", "revision": "main"}, "no file has the name 'a/b'; add one"),
        ({"source": "directory", "path": "mine"}, "no file has the name 'mine'; add one"),
        (
            {"source": "hub", "id": "Qwen/Qwen2.5-1.5B-Instruct", "revision": "other"},
            "is of revision main, the recipe names other",
        ),
    ]:
        with pytest.raises(LookupError, match=message) as raised:
            config_of(source)
        assert "\n" not in str(raised.value)
    assert list(CONFIGS.glob("*.json"))


def test_recipes_for_a_cpu_without_imports_need_no_twin():
    assert {"glyphs", "clips", "smoke"}.isdisjoint(NAMES)
    assert {read(name)["policy"]["kind"] for name in NAMES} == {
        "tokens",
        "denoising",
        "action_chunks",
        "seq2seq",
        "vision_language",
    }
    assert yaml.safe_load((CONFIGS / "dinov2-small.json").read_text())["name"] == "dinov2-small"


def leaves(config: dict[str, Any], where: str = "") -> dict[str, Any]:
    """Returns the values of a nested configuration by their path."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= (
            leaves(value, f"{where}{key}.") if isinstance(value, dict) else {where + key: value}
        )
    return found


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_a_twin_differs_from_the_real_model_in_sizes_alone(path: Path):
    sizes = WIDTHS | DEPTHS | INDICES | {"vocab_size"}
    for component in json.loads(path.read_text())["components"].values():
        real, tiny = leaves(component["config"]), leaves(shrink(component["config"], 300))
        assert real.keys() == tiny.keys()
        assert {key for key in real if real[key] != tiny[key]} <= {
            key for key in real if key.split(".")[-1] in sizes
        }
    # Heads are as wide as the rule says, and what two components share stays shared.
    assert shrink({"hidden_size": 1536, "num_attention_heads": 12}) == {
        "hidden_size": 96,
        "num_attention_heads": 12,
    }
