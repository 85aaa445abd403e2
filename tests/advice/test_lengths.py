"""Lengths of rollouts while training: those of solved rollouts."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from profiles import DRAWN, facts_of
from test_prediction import PLAIN, plan_of

from grpo.advice.facts import Facts
from grpo.advice.prediction import predict
from grpo.allocation.selection import reuse_profile_rollouts

PROMPTS = 200
SOLVED, FAILED = 30, 10  # steps of a rollout, times the scale of its prompt


def facts_with(successes: np.ndarray, *, solved: int = SOLVED) -> Facts:
    """Returns facts whose solved rollouts are `solved / FAILED` times as long as the others."""
    scale = 1 + np.arange(len(successes)) % 4
    is_solved = np.arange(DRAWN) < successes[:, None]
    return facts_of(
        successes,
        scale[:, None] * np.where(is_solved, solved, FAILED),
        solved_steps=scale * solved,
        prompt_tokens=np.full(len(successes), 10),
    )


def test_rollouts_become_as_long_as_solved_ones():
    successes = np.random.default_rng(0).integers(1, DRAWN + 1, PROMPTS)
    facts = facts_with(successes)
    found = facts.in_training.profile["mean_steps"]
    # A rollout's length is rounded and limited to the longest of the profile.
    longest = facts.rollouts["steps"].max()
    expected = facts.profile["solved_steps"]
    is_far = expected < longest / 4
    np.testing.assert_allclose(found[is_far], expected[is_far], atol=0.5)
    assert facts.in_training.rollouts["steps"].max() == longest


def test_a_prompt_without_solved_rollouts_changes_as_the_mixed_ones_do():
    successes = np.resize([0, 2, 4, 6], PROMPTS)
    facts = facts_with(successes)
    means = (DRAWN * FAILED + successes[1:4] * (SOLVED - FAILED)) / DRAWN
    ratio = sum(np.array([2, 3, 4]) * SOLVED) / sum(np.array([2, 3, 4]) * means)
    unsolved = successes == 0
    assert np.allclose(facts.in_training.profile["mean_steps"][unsolved], round(FAILED * ratio))


@pytest.mark.parametrize("successes", [[0] * 8, [8] * 8, [0, 8] * 4])
def test_without_mixed_prompts_lengths_stay(successes: list[int]):
    facts = facts_with(np.array(successes))
    pd.testing.assert_frame_equal(facts.in_training.rollouts, facts.rollouts)


def test_shorter_solved_rollouts_shorten_a_round_but_not_what_it_reuses():
    successes = np.random.default_rng(0).integers(0, DRAWN + 1, PROMPTS)
    equal, shorter = (facts_with(successes, solved=each) for each in (FAILED, FAILED // 2))
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
