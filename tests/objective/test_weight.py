"""Normalizers and selections, by hand."""

import pytest
import torch

from grpo.objective.base import Objective, chain
from grpo.objective.weight import (
    average_over_horizon,
    average_over_prompts,
    average_over_rollouts,
    average_over_steps,
    drop_uniform_groups,
    sum_over_steps,
)
from grpo.types import Rollouts
from tests.objective.batches import credit_of

# Two prompts: three rollouts of 1, 2, 3 steps; two rollouts of 2, 2 steps. Ten steps.
MASK = torch.arange(3) < torch.tensor([[1], [2], [3], [2], [2]])
ROLLOUTS = Rollouts(
    group=torch.tensor([0, 0, 0, 1, 1]),
    reward=torch.tensor([1.0, 0.0, 1.0, 0.3, 0.2]),
    outcome=torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0]),
    mask=MASK,
    behavior_logp=torch.zeros(5, 3),
)


@pytest.mark.parametrize(
    ("average", "first_step"),
    [
        (average_over_steps(), [1 / 10] * 5),
        (average_over_rollouts(), [1 / 5, 1 / 10, 1 / 15, 1 / 10, 1 / 10]),
        (average_over_horizon(4), [1 / 20] * 5),
        (sum_over_steps(), [1 / 5] * 5),
        (average_over_prompts(), [1 / 6, 1 / 12, 1 / 18, 1 / 8, 1 / 8]),
    ],
)
def test_averages_by_hand(average: Objective, first_step: list[float]):
    weight = credit_of(average, ROLLOUTS).weight
    torch.testing.assert_close(weight[:, 0], torch.tensor(first_step))
    assert (weight[~MASK] == 0).all()


@pytest.mark.parametrize(
    "average", [average_over_steps(), average_over_rollouts(), average_over_prompts()]
)
def test_averages_sum_to_1(average: Objective):
    assert float(credit_of(average, ROLLOUTS).weight.sum()) == pytest.approx(1)


@pytest.mark.parametrize("average", [average_over_steps(), average_over_prompts()])
def test_the_normalizer_does_not_depend_on_the_selection_or_its_place(average: Objective):
    before = credit_of(chain(drop_uniform_groups(), average), ROLLOUTS).weight
    after = credit_of(chain(average, drop_uniform_groups()), ROLLOUTS).weight
    full = credit_of(average, ROLLOUTS).weight
    assert torch.equal(before, after)
    assert torch.equal(before[:3], full[:3])


def test_uniform_groups_are_told_by_outcome_or_by_reward():
    by_outcome = credit_of(drop_uniform_groups(), ROLLOUTS).weight
    by_reward = credit_of(drop_uniform_groups(by="reward"), ROLLOUTS).weight
    assert by_outcome.any(dim=1).tolist() == [True, True, True, False, False]
    assert by_reward.any(dim=1).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: average_over_horizon(0), "horizon > 0"),
        (lambda: drop_uniform_groups(by="score"), "by in"),
    ],
)
def test_wrong_settings_are_refused(make: object, message: str):
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
