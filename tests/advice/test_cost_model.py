"""Advice uses policies only through the cost model of their modality, or refuses them."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from profiles import COST_MODEL, synthetic_facts
from test_proposal import write_params

from benchmarks.workspaces import SHORT_ROLLOUTS
from grpo.__main__ import main
from grpo.advice import text
from grpo.advice.prediction import (
    TrainedGroups,
    pass_flops,
    sampling_flops,
    sampling_scale,
    treatment_of,
)
from grpo.modalities.costs import CostModel
from grpo.params.parameters import read_params
from grpo.runtime.artifacts.tables import PROFILE, PROMPTS, write_table

ROOT = Path(__file__).parents[2]


class PullCostModel:
    """Costs of a policy whose rollouts take 3 FLOPs each, and 5 or 20 per rollout of a pass."""

    always_scores_proximal = False

    def group_flops(self, width, sizes, *, mean_later_steps, mean_step_pairs):
        return 3.0 * sizes

    def microbatch_flops(self, rollouts, *, is_training):
        return (20 if is_training else 5) * len(rollouts)

    def rollout_flops(self, prompt_tokens, steps, *, is_training):
        return np.full(len(steps), 20.0 if is_training else 5.0)

    def count_tokens(self, prompts):
        return [1 for _ in prompts]

    def find_decoding_mismatch(self, draws, profile_draws):
        return None


def test_flops_are_those_that_the_modality_gives():
    cost_model: CostModel = PullCostModel()
    facts = replace(synthetic_facts(10), cost_model=cost_model)
    rows, sizes = np.arange(10), np.full(10, 4)
    # The profile of 10 prompts took 40e6 FLOPs for 8 rollouts each, so 4 take half of it.
    scale = sampling_scale(facts)
    found = sampling_flops(facts, rows, sizes, scale=scale, rollouts_per_batch=64)
    np.testing.assert_allclose(found, 2e6)
    groups = TrainedGroups(size=sizes, chance=np.ones(10))
    for is_training, expected in ((False, 4 * 5), (True, 4 * 20)):
        found = pass_flops(
            facts, rows, groups, parts=2, tokens_per_microbatch=64, is_training=is_training
        )
        np.testing.assert_allclose(found, expected)


def test_a_single_update_scores_the_proximal_policy_only_if_the_modality_always_does():
    arm = read_params(SHORT_ROLLOUTS).arms["uniform"]
    for updates, always, expected in (
        (1, False, False),
        (1, True, True),
        (2, False, True),
    ):
        training = arm.training.model_copy(update={"updates_per_iteration": updates})
        facts = replace(
            synthetic_facts(3), cost_model=replace(COST_MODEL, always_scores_proximal=always)
        )
        found = treatment_of(arm.model_copy(update={"training": training}), "uniform", facts)
        assert found.scores_proximal == expected


def test_arms_that_sample_at_another_temperature_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sampling = {"temperature": 0.7, "top_p": 1.0, "rollouts_per_batch": 512}
    params = read_params(write_params(tmp_path, {"arms.uniform.sampling": sampling}))
    monkeypatch.setattr(text, "read_facts", lambda *_: synthetic_facts())
    said = text.advise(tmp_path, params, Path("params.yaml"))
    remark = "samples at temperature 0.7, the profile at 1: its rates and lengths may differ."
    assert f"uniform {remark}" in said
    assert said.count("samples at temperature") == 1


@pytest.mark.parametrize(
    ("recipe", "kind"), [("glyphs", "denoising"), ("manipulation", "action_chunks")]
)
def test_a_modality_without_a_cost_model_is_refused_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    recipe: str,
    kind: str,
):
    monkeypatch.chdir(tmp_path)
    file = ROOT / "recipes" / f"{recipe}.yaml"
    drawn = read_params(file).profile.rollouts_per_prompt
    prompts = pd.DataFrame(
        {"prompt_id": ["p0"], "family": "f", "prompt": "a", "answer": "a", "entry": "{}"}
    )
    profile = prompts[["prompt_id", "family"]].assign(
        rollouts=drawn, successes=1, outcome_rate=1 / drawn, mean_steps=1.0, solved_steps=1.0
    )
    write_table(prompts, Path("artifacts/prompts/train.parquet"), PROMPTS)
    write_table(profile, Path("artifacts/profile/prompts.parquet"), PROFILE)
    Path("artifacts/profile/rollouts").mkdir()
    Path("artifacts/profile/rollouts/table.parquet").touch()
    monkeypatch.setattr(sys, "argv", ["grpo", "advise", str(file)])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (2, "")
    assert len(printed.err.splitlines()) == 1
    assert f"policy.kind must be tokens for cost predictions, got '{kind}'" in printed.err
