"""A pipeline whose rollouts, later iterations and evaluations come from vLLM."""

import os
import warnings
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pandas as pd
import pytest
import torch

from benchmarks.workspaces import make_workspace, run_stages
from grpo.modalities.shared.directories import trainable
from grpo.modalities.tokens.policy import TokenPolicy
from grpo.params.parameters import read_params
from grpo.runtime.artifacts.files import read_json
from grpo.sampling.rollouts import read_batch
from grpo.wiring.policies import draws_of_round, load_policy
from tests.pipeline.workspaces import cut_short, two_arms
from tests.vllm_python import require_vllm

pytestmark = pytest.mark.long

NAME = "uniform-1"
TOLERANCE = 0.005  # nats per step
LORA = {"rank": 4, "alpha": 32, "dropout": 0.0, "target_modules": ["q_proj", "v_proj"]}


@pytest.fixture(scope="module", params=[None, LORA], ids=["all weights", "adapters"])
def workspace(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    params = cut_short(two_arms(), [NAME])
    params["arms"] = {"uniform": params["arms"]["uniform"]}
    params["policy"]["base"]["config"]["head_dim"] = 32
    params["policy"] |= {
        "lora": request.param,
        "sampler": "vllm",
        "vllm": {
            "tensor_parallel_size": 1,
            "memory_share": 0.02,
            "prefix_caching": True,
            "compiled": False,
        },
    }
    arm = params["arms"]["uniform"]
    arm["objective"] = [{"truncate_mismatch": {"weight_max": 2.0}}, "rloo"]
    arm["curriculum"] = [
        {"split_at_random": {"phases": 1, "prompts_per_phase": 16}},
        {"fix_group_size": {"rollouts": 8}},
    ]
    # The first update moves log-probs far more than engines differ.
    arm["training"] |= {
        "iterations_per_round": 2,
        "updates_per_iteration": 1,
        "learning_rate": 0.02,
    }
    folder = tmp_path_factory.mktemp("vllm") / "workspace"
    with pytest.MonkeyPatch.context() as monkeypatch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of DVC
        require_vllm(monkeypatch)
        make_workspace(folder, params)
        run_stages(folder)
        yield folder


def loaded(workspace: Path, name: str) -> TokenPolicy:
    with chdir(workspace):
        params = read_params()
        policies = Path("artifacts/policies")
        return load_policy(
            params,
            base=policies / "base",
            directory=policies / name,
            draws=draws_of_round(params, NAME),
        )


def largest_difference(policy: TokenPolicy, rollouts: Path) -> float:
    """Returns the largest difference of a policy's log-probs from those of sampling, in nats."""
    batch = read_batch(rollouts)
    group = torch.tensor(batch.table["group"].tolist())
    trajectory, logp = policy.unpack(batch.tensors, group)
    with torch.no_grad():
        return float((policy.log_prob(trajectory) - logp).abs().max())


def test_both_iterations_are_drawn_by_the_weights_that_they_train(workspace: Path):
    base, training = loaded(workspace, "base"), workspace / "artifacts/training" / NAME
    assert largest_difference(base, workspace / "artifacts/rollouts" / NAME) < TOLERANCE
    assert read_json(training / "summary.json")["drift_max"] < TOLERANCE
    assert largest_difference(base, training / "iteration-0001/rollouts") > 10 * TOLERANCE


def test_the_round_learns(workspace: Path):
    updates = pd.read_csv(workspace / "artifacts/training" / NAME / "updates.csv")
    assert len(updates) == 2
    assert (updates["mismatch_weight_mean"] - 1).abs().max() < TOLERANCE
    before, after = (trainable(loaded(workspace, each).model) for each in ("base", NAME))
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(moved) == len(before)


def test_no_engine_is_left(workspace: Path):
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    commands = [Path(f"/proc/{each}/cmdline").read_text() for each in children]
    assert not any("vllm_engine" in each for each in commands)
