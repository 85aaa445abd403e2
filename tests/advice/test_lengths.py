"""Lengths of rollouts while training: those of solved rollouts."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from profiles import COST_MODEL, DRAWN
from test_prediction import PLAIN, plan_of

from grpo.advice.facts import Facts, make_facts
from grpo.advice.prediction import predict
from grpo.allocation.selection import reuse_profile_rollouts
from grpo.types import Cost

PROMPTS = 200
SOLVED, FAILED = 30, 10  # mean steps; every prompt has one of the two, times its own scale


def facts_of(successes: np.ndarray, *, solved: int = SOLVED) -> Facts:
    """Returns facts whose solved rollouts are `solved / FAILED` times as long as the others."""
    ids = [f"p{i:04d}" for i in range(len(successes))]
    scale = 1 + np.arange(len(ids)) % 4
    is_solved = np.arange(DRAWN) < successes[:, None]
    steps = scale[:, None] * np.where(is_solved, solved, FAILED)
    profile = pd.DataFrame(
        {
            "prompt_id": ids,
            "family": "f",
            "rollouts": DRAWN,
            "successes": successes,
            "outcome_rate": successes / DRAWN,
            "mean_steps": steps.mean(axis=1),
            "solved_steps": np.where(successes > 0, scale * solved, np.nan),
        }
    )
    return make_facts(
        profile,
        pd.DataFrame({"prompt_id": np.repeat(ids, DRAWN), "steps": steps.ravel()}),
        prompt_tokens=dict.fromkeys(ids, 10),
        cost=Cost(flops=40_000_000, sampled_steps=int(steps.sum())),
        rollouts_per_batch=64,
        cost_model=COST_MODEL,
    )


def test_rollouts_become_as_long_as_solved_ones():
    successes = np.random.default_rng(0).integers(1, DRAWN + 1, PROMPTS)
    facts = facts_of(successes)
    found = facts.in_training.profile["mean_steps"]
    # A rollout's length is rounded and limited to the longest of the profile.
    longest = facts.rollouts["steps"].max()
    expected = facts.profile["solved_steps"]
    is_far = expected < longest / 4
    np.testing.assert_allclose(found[is_far], expected[is_far], atol=0.5)
    assert facts.in_training.rollouts["steps"].max() == longest


def test_a_prompt_without_solved_rollouts_changes_as_the_mixed_ones_do():
    successes = np.resize([0, 2, 4, 6], PROMPTS)
    facts = facts_of(successes)
    means = (DRAWN * FAILED + successes[1:4] * (SOLVED - FAILED)) / DRAWN
    ratio = sum(np.array([2, 3, 4]) * SOLVED) / sum(np.array([2, 3, 4]) * means)
    unsolved = successes == 0
    assert np.allclose(facts.in_training.profile["mean_steps"][unsolved], round(FAILED * ratio))


@pytest.mark.parametrize("successes", [[0] * 8, [8] * 8, [0, 8] * 4])
def test_without_mixed_prompts_lengths_stay(successes: list[int]):
    facts = facts_of(np.array(successes))
    pd.testing.assert_frame_equal(facts.in_training.rollouts, facts.rollouts)


def test_shorter_solved_rollouts_shorten_a_round_but_not_what_it_reuses():
    successes = np.random.default_rng(0).integers(0, DRAWN + 1, PROMPTS)
    equal, shorter = (facts_of(successes, solved=each) for each in (FAILED, FAILED // 2))
    plan = plan_of(equal)
    before, after = (predict(plan, PLAIN, each, starts_from_base=True) for each in (equal, shorter))
    assert after.sampled_steps < 0.7 * before.sampled_steps
    assert after.rollouts == before.rollouts
    reusing = replace(PLAIN, selection=reuse_profile_rollouts())
    found = predict(plan, reusing, shorter, starts_from_base=True)
    rows = shorter.rows_of(plan["prompt_id"])
    expected = plan["rollouts"].to_numpy() * shorter.profile["mean_steps"].to_numpy()[rows]
    whole = predict(plan, replace(reusing, drops_uniform=False), shorter, starts_from_base=True)
    assert whole.trained_steps == pytest.approx(expected.sum())
    assert found.trained_steps < whole.trained_steps
