"""The robot recipe through every stage, made small: the same bytes, kills, and failures as data."""

import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest

from benchmarks.workspaces import run_stages
from grpo.params.yaml import parse_yaml
from grpo.runtime.artifacts.files import read_json
from grpo.runtime.artifacts.stored_iterations import iterations_of
from grpo.runtime.artifacts.tables import REWARDS, ROLLOUTS, read_table
from grpo.runtime.artifacts.tensors import read_tensors
from tests.files import contents
from tests.pipeline.workspaces import cut_short, environment, run_stages_in

ROOT = Path(__file__).parents[2]
NAME = "pcm_ht-1"


def small() -> dict[str, Any]:
    """Returns the robot recipe: two families, one round of the masked arm, few scenes."""
    params = parse_yaml((ROOT / "recipes" / "manipulation.yaml").read_text())
    families = ["handle-press-side-v3", "plate-slide-v3"]
    params["task"] |= {"train_prompts": 4, "eval_prompts": 2, "families": families}
    base = params["policy"]["base"]
    base["backbone"]["config"] |= {"hidden_size": 64, "intermediate_size": 64}
    base["warmup"] |= {
        "demonstrations": dict.fromkeys(families, 2),
        "updates": 120,
        "rows_per_update": 32,
    }
    params["policy"] |= {"max_steps": 12, "scenes": {"at_once": 1, "timeout_seconds": 30.0}}
    params["profile"] |= {"when": "always", "rollouts_per_prompt": 2}  # for its phases
    params["evaluation"]["rollouts_per_prompt"] = 2
    for arm in params["arms"].values():
        arm["sampling"]["rollouts_per_batch"] = 4
        arm["training"] |= {"updates_per_audit": 2}
    short = cut_short(params, [NAME])
    for arm in short["arms"].values():
        arm["training"] |= {"iterations_per_round": 2, "updates_per_iteration": 1}
    return short


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_stages_in(tmp_path_factory.mktemp("robot"), small())


def test_every_stage_leaves_what_the_next_one_reads(run: Path):
    rollouts = run / "artifacts" / "rollouts" / NAME
    table = read_table(rollouts / "table.parquet", ROLLOUTS)
    tensors = read_tensors(rollouts / "tensors.safetensors")
    assert len(table) == len(tensors["ending"]) == 8
    assert len(tensors["observation"]) == table["steps"].sum()
    rewards = read_table(run / "artifacts" / "rewards" / f"{NAME}.parquet", REWARDS)
    solved = rewards.set_index("rollout_id")["outcome"].loc[table["rollout_id"]] == 1
    assert (table["text"].str.startswith("success").to_numpy() == solved.to_numpy()).all()
    assert (rewards["status"] == "scored").all()
    cost = read_json(rollouts / "summary.json")["cost"]
    assert cost["sampled_steps"] == table["steps"].sum()
    assert cost["flops"] > 0
    assert "greedy" in read_json(run / "artifacts" / "evaluations" / f"{NAME}.json")


def test_a_masked_arm_trains_its_budget_and_keeps_its_chances_in_the_policy(run: Path):
    masked = pd.read_csv(run / "artifacts" / "training" / NAME / "updates.csv")
    assert masked["trained_rollouts"].sum() > 0
    assert (masked["trained_steps"] == 3 * masked["trained_rollouts"]).all()
    iterations = iterations_of(run / "artifacts", NAME)
    tables = [read_table(each.table, ROLLOUTS) for each in iterations]
    assert [len(each) for each in tables] == masked["rollouts"].tolist() == [8, 8]
    assert all(each["steps"].mean() > 3 for each in tables)
    # The update of the second iteration is audited: its gradient beside that of all chunks.
    assert masked["audit_cosine"].isna().tolist() == [True, False]
    training = run / "artifacts" / "training" / NAME
    phases = [pd.read_csv(each / "phases.csv") for each in (training, training / "iteration-0001")]
    trained = [each["trained_chunks"].sum() for each in phases]
    assert trained == masked["trained_steps"].tolist()
    state = read_json(run / "artifacts" / "policies" / NAME / "state.json")
    chances = state["objective_state"]["sample_chunks_by_phase"]
    assert chances["batches"] == 2
    assert all(0 < chances[f"keep_{phase}"] <= 1 for phase in range(5))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # dvc's own
def test_a_killed_rollout_leaves_no_process_and_all_that_follows_ends_with_the_same_bytes(
    run: Path, tmp_path: Path
):
    """Keeps the artifacts that do not depend on the round; reruns the others without dvc."""
    workspace = tmp_path / "killed"
    shutil.copytree(run, workspace, ignore=shutil.ignore_patterns("__pycache__"))
    expected = contents(workspace / "artifacts")
    for path in sorted((workspace / "artifacts").glob(f"*/{NAME}*")):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    a = Path("artifacts")
    paths = ["policies/base", "policies/base", "prompts/train.parquet", "curricula/pcm_ht.parquet"]
    arguments = [
        str(a / each)
        for each in ["data/judge.json", *paths, "profile/rollouts", f"rollouts/{NAME}"]
    ]
    command = [sys.executable, "-W", "ignore", "-m", "stages.rollout", *arguments]
    process = subprocess.Popen(command, cwd=workspace, env=environment())
    deadline = time.monotonic() + 120
    while not list(workspace.glob(".work/**/batch-00000/cost.json")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    assert workers
    assert psutil.wait_procs(workers, timeout=30)[1] == []
    assert not (workspace / "artifacts" / "rollouts" / NAME).exists()
    run_stages(workspace)
    again = contents(workspace / "artifacts")
    assert again.keys() == expected.keys()
    for name, content in expected.items():
        assert again[name] == content, name
