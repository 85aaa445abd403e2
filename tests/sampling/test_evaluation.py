"""Evaluation and profiling: counts by hand, intervals with the stated coverage."""

import numpy as np
import pandas as pd
import pytest

from grpo.allocation.profiling import profile_prompts, summarize_profile
from grpo.sampling.evaluation import (
    evaluate_prompts,
    means_by_kind,
    per_prompt_metrics,
    summarize_evaluation,
)
from grpo.types import Cost


def rewards_of(outcomes: dict[str, list[float]]) -> pd.DataFrame:
    rows = [
        {
            "rollout_id": f"{prompt}/{index}",
            "prompt_id": prompt,
            "outcome": value,
            "status": "scored",
        }
        for prompt, values in outcomes.items()
        for index, value in enumerate(values)
    ]
    return pd.DataFrame(rows)


PROMPTS = pd.DataFrame({"prompt_id": ["a", "b"], "family": ["x", "y"]})


def test_greedy_mean_and_pass_at_k_by_hand():
    sampled = rewards_of({"a": [1, 0, 0, 0], "b": [0, 0, 0, 0]})
    table = evaluate_prompts(PROMPTS, sampled, rewards_of({"a": [0], "b": [1]}))
    values = per_prompt_metrics(table)
    assert values["greedy"].tolist() == [0, 1]
    assert values["mean_at_k"].tolist() == [0.25, 0]
    assert values["pass_at_k"].tolist() == [1, 0]
    summary = summarize_evaluation(table, confidence=0.95, resamples=100, seed=0)
    assert (summary["k"], summary["mean_at_k"]["value"]) == (4, 0.125)
    assert summary["by_family"]["x"] == {"greedy": 0, "mean_at_k": 0.25, "pass_at_k": 1}


def test_without_a_greedy_decoding_there_is_no_such_score():
    table = evaluate_prompts(PROMPTS, rewards_of({"a": [1, 0], "b": [0, 0]}), None)
    summary = summarize_evaluation(table, confidence=0.95, resamples=100, seed=0)
    assert summary["by_family"]["x"] == {"mean_at_k": 0.5, "pass_at_k": 1}
    assert "greedy" not in summary


def test_means_by_kind_are_those_of_the_prompts_whose_entries_name_it():
    prompts = PROMPTS.assign(entry=['{"kind": "dates"}', "{}"])
    table = evaluate_prompts(prompts, rewards_of({"a": [1, 0], "b": [1, 1]}), None)
    assert means_by_kind(table, prompts) == {"dates": {"mean_at_k": 0.5, "pass_at_k": 1}}
    assert means_by_kind(table, prompts.assign(entry="{}")) == {}


def test_intervals_cover_the_truth_as_often_as_stated():
    """300 evaluations of 80 prompts at p = 0.3: 95 % intervals miss in 2 to 9 %."""
    generator = np.random.default_rng(0)
    missed = 0
    for repeat in range(300):
        successes = generator.binomial(8, 0.3, size=80)
        table = pd.DataFrame(
            {
                "prompt_id": [f"p{index}" for index in range(80)],
                "family": "x",
                "greedy": 0.0,
                "rollouts": 8,
                "successes": successes,
            }
        )
        score = summarize_evaluation(table, confidence=0.95, resamples=300, seed=repeat)
        missed += not score["mean_at_k"]["low"] <= 0.3 <= score["mean_at_k"]["high"]
    assert 0.02 <= missed / 300 <= 0.09


def test_a_profile_counts_successes_per_prompt():
    rewards = rewards_of({"a": [1, 1, 0, 1], "b": [0, 0, 0, 0]})
    rollouts = rewards[["rollout_id", "prompt_id"]].assign(steps=[2, 4, 6, 8, 1, 1, 1, 1])
    profile = profile_prompts(rollouts, rewards, PROMPTS)
    assert profile["outcome_rate"].tolist() == [0.75, 0.0]
    assert profile["mean_steps"].tolist() == [5.0, 1.0]
    summary = summarize_profile(profile, Cost(flops=7), {"steps": 3})
    assert (summary["unsolved_fraction"], summary["rollouts"]) == (0.5, 8)


@pytest.mark.parametrize("seed", [0, 1])
def test_policies_are_compared_on_the_same_resamples(seed: int):
    """Two policies that differ by a constant differ by it in every bound."""
    base = pd.DataFrame(
        {
            "prompt_id": [f"p{index}" for index in range(40)],
            "family": "x",
            "greedy": 0.0,
            "rollouts": 8,
            "successes": [index % 7 for index in range(40)],
        }
    )
    better = base.assign(successes=base["successes"] + 1)
    low, high = (
        summarize_evaluation(table, confidence=0.9, resamples=200, seed=seed)["mean_at_k"]
        for table in (base, better)
    )
    for bound in ("value", "low", "high"):
        assert high[bound] - low[bound] == pytest.approx(1 / 8)
