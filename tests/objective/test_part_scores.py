"""Scores of parts of rollouts: the paper's formula by hand, and laws of the advantages."""

from dataclasses import replace
from math import sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo.objective.advantage import (
    center_by_group_mean,
    scale_by_group_std,
    sum_later_part_scores,
)
from grpo.objective.base import chain
from grpo.objective.trust import (
    average_ratio_keeping_token_gradient,
    average_ratio_over_rollout,
    clip_surrogate,
)
from grpo.objective.weight import average_over_rollouts
from grpo.types import PartScores, Rollouts
from tests.objective.batches import credit_of, gradient_of, nearby, ragged_rollouts, with_parts

FEW = settings(max_examples=25, deadline=None)
LENGTHS = torch.tensor([5, 4, 2, 3])


def given_group(end: list[list[int]], score: list[list[float]]) -> Rollouts:
    """Returns two groups of two rollouts of 5, 4, 2 and 3 steps."""
    reward = torch.tensor([1.0, 0.0, 1.0, 0.0])
    mask = torch.arange(5) < LENGTHS[:, None]
    return Rollouts(
        group=torch.tensor([0, 0, 1, 1]),
        reward=reward,
        outcome=reward,
        mask=mask,
        behavior_logp=torch.full(mask.shape, -0.5),
        parts=PartScores(torch.tensor(end), torch.tensor(score)),
    )


def test_the_formula_of_the_paper_by_hand():
    """Group 0 has the scores 1, 0, 0, 1, 1: mean .6, std sqrt(.24). Those of group 1 are equal."""
    rollouts = given_group(
        [[1, 3, -1], [0, 2, 2], [1, -1, -1], [0, 2, -1]],
        [[1.0, 0.0, 9.0], [0.0, 1.0, 1.0], [0.5, 9.0, 9.0], [0.5, 0.5, 9.0]],
    )
    right, wrong = 0.4 / sqrt(0.24), -0.6 / sqrt(0.24)
    expected = [
        [right + wrong, right + wrong, wrong, wrong, 0.0],  # nothing ends at the last step
        [wrong + 2 * right, 2 * right, 2 * right, 0.0, 0.0],  # two parts end at step 2
        [0.0] * 5,
        [0.0] * 5,
    ]
    advantage = credit_of(sum_later_part_scores(epsilon=0.0), rollouts).advantage
    torch.testing.assert_close(advantage, torch.tensor(expected))


def test_the_outcome_adds_its_z_score_to_every_step():
    rollouts = given_group([[1], [0], [-1], [-1]], [[1.0], [0.0], [0.0], [0.0]])
    advantage = credit_of(sum_later_part_scores(2.0, epsilon=0.0), rollouts).advantage
    expected = [[3, 3, 2, 2, 2], [-3, -2, -2, -2, 0], [2, 2, 0, 0, 0], [-2, -2, -2, 0, 0]]
    torch.testing.assert_close(advantage, torch.tensor(expected).float())


@given(rollouts=ragged_rollouts(), seed=st.integers(0, 999), ddof=st.integers(0, 1))
@FEW
def test_one_part_at_the_last_step_is_the_advantage_of_grpo(
    rollouts: Rollouts, seed: int, ddof: int
):
    """The reward of an outcome is the score of the whole rollout."""
    last = rollouts.mask.sum(dim=1, keepdim=True) - 1
    whole = replace(rollouts, parts=PartScores(last, rollouts.reward[:, None]))
    expected = credit_of(chain(center_by_group_mean(), scale_by_group_std(ddof)), rollouts)
    found = credit_of(sum_later_part_scores(ddof=ddof), whole)
    torch.testing.assert_close(found.advantage, expected.advantage, atol=1e-4, rtol=1e-4)
    nothing = replace(whole, parts=PartScores(torch.full_like(last, -1), whole.reward[:, None]))
    alone = credit_of(sum_later_part_scores(1.0, ddof), nothing)
    torch.testing.assert_close(alone.advantage, expected.advantage, atol=1e-4, rtol=1e-4)


@given(rollouts=ragged_rollouts(), seed=st.integers(0, 999))
@FEW
def test_advantages_at_the_first_step_add_up_to_0_over_a_group(rollouts: Rollouts, seed: int):
    """There every part of a group counts once, and z-scores add up to 0."""
    advantage = credit_of(sum_later_part_scores(), with_parts(rollouts, seed)).advantage
    for group in torch.unique(rollouts.group):
        total = float(advantage[rollouts.group == group, 0].double().sum())
        assert total == pytest.approx(0.0, abs=1e-4)


@given(rollouts=ragged_rollouts(), seed=st.integers(0, 999), extra=st.integers(1, 4))
@FEW
def test_padding_of_steps_and_parts_changes_no_advantage(rollouts: Rollouts, seed: int, extra: int):
    scored = with_parts(rollouts, seed)
    assert scored.parts is not None
    pad = torch.nn.functional.pad
    wide = replace(
        scored,
        mask=pad(scored.mask, (0, extra)),
        behavior_logp=pad(scored.behavior_logp, (0, extra)),
        parts=PartScores(
            pad(scored.parts.end, (0, extra), value=-1),
            pad(scored.parts.score, (0, extra), value=torch.nan),
        ),
    )
    expected = pad(credit_of(sum_later_part_scores(), scored).advantage, (0, extra))
    assert torch.equal(credit_of(sum_later_part_scores(), wide).advantage, expected)


def clipped_surrogate(logp: Tensor, start: Tensor, ratio: Tensor, credit: Tensor) -> Tensor:
    """Returns GSPO-token's loss [eq. 13] per step as a function of `logp`; what sg stops is given.

    Args:
      start: Log-probs at which the gradient is taken.
      ratio: Of the rollouts, at `start`.
      credit: Weight times advantage.
    """
    token = ratio * (logp - start).exp()
    return -torch.minimum(token * credit, token.clamp(0.9, 1.1) * credit)


@given(rollouts=ragged_rollouts(), seed=st.integers(0, 999))
@settings(max_examples=10, deadline=None)
def test_the_gradient_of_gspo_token_is_that_of_finite_differences(rollouts: Rollouts, seed: int):
    """With advantages that differ between the steps of a rollout, within the clip and beyond it."""
    scored = with_parts(rollouts, seed)
    objective = chain(
        sum_later_part_scores(0.5),
        average_over_rollouts(),
        average_ratio_keeping_token_gradient(),
        clip_surrogate(0.1, 0.1),
    )
    logp, mask = nearby(scored, seed), scored.mask
    gradient = gradient_of(objective, scored, logp)
    credit = credit_of(objective, scored)
    product = credit.weight.double() * credit.advantage.double()
    log_ratio = torch.where(mask, logp - scored.behavior_logp.double(), 0.0)
    ratio = (log_ratio.sum(dim=1) / mask.sum(dim=1)).exp()
    step = 1e-6
    for row, column in mask.nonzero().tolist():
        start = logp[row, column]
        high, low = (
            clipped_surrogate(start + move, start, ratio[row], product[row, column])
            for move in (step, -step)
        )
        numeric = float(high - low) / (2 * step)
        assert float(gradient[row, column]) == pytest.approx(numeric, abs=1e-7, rel=1e-4)


@given(rollouts=ragged_rollouts(), seed=st.integers(0, 999))
@FEW
def test_one_ratio_per_rollout_has_the_gradient_of_the_mean_advantage(
    rollouts: Rollouts, seed: int
):
    """Which is why rule H29 refuses it."""
    scored = with_parts(rollouts, seed)
    objective = chain(
        sum_later_part_scores(),
        average_over_rollouts(),
        average_ratio_over_rollout(),
        clip_surrogate(0.9, 9.0),
    )
    gradient = gradient_of(objective, scored, nearby(scored, seed))
    credit = credit_of(objective, scored)
    advantage = (credit.weight * credit.advantage).double().sum(dim=1)
    for row, mask in enumerate(scored.mask):
        steps = gradient[row, mask]
        torch.testing.assert_close(steps, steps[:1].expand(len(steps)))
        assert bool((steps * advantage[row] <= 1e-12).all())


def test_scores_of_parts_are_needed_and_settings_checked():
    rollouts = replace(given_group([[0]] * 4, [[1.0]] * 4), parts=None)
    with pytest.raises(ValueError, match=r"needs Rollouts\.parts, got None"):
        credit_of(sum_later_part_scores(), rollouts)
    with pytest.raises(ValueError, match="needs a finite outcome_weight >= 0, got -1"):
        sum_later_part_scores(-1.0)
    with pytest.raises(ValueError, match="sum_later_part_scores needs ddof 0 or 1"):
        sum_later_part_scores(ddof=2)
