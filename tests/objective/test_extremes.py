"""PODS: the rollouts with the largest variance, chosen fairly among equals."""

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo.objective.advantage import (
    center_by_group_mean,
    center_by_moving_average,
    leave_one_out,
    scale_by_group_std,
)
from grpo.objective.base import Objective, assign_credit, chain
from grpo.objective.weight import (
    average_over_prompts,
    average_over_rollouts,
    average_over_steps,
    drop_uniform_groups,
    keep_extreme_rollouts,
)
from grpo.types import Credit, Rollouts

FEW = settings(max_examples=20, deadline=None)
DRAWS = 1000


def batch_of(*groups: list[float], steps: int = 2) -> Rollouts:
    reward = torch.tensor([value for group in groups for value in group])
    index = [number for number, group in enumerate(groups) for _ in group]
    return Rollouts(
        group=torch.tensor(index),
        reward=reward,
        outcome=reward,
        mask=torch.ones(len(reward), steps, dtype=torch.bool),
        behavior_logp=torch.zeros(len(reward), steps),
    )


def credit_of(objective: Objective, rollouts: Rollouts, seed: int = 0) -> Credit:
    generator = torch.Generator().manual_seed(seed)
    return assign_credit(objective, rollouts, objective.init(), generator)[0]


def kept_by(credit: Credit) -> list[int]:
    return (credit.weight != 0).any(dim=1).nonzero()[:, 0].tolist()


def pods(keep: int, advantage: str = "kept_z_score") -> Objective:
    return chain(
        center_by_group_mean(), average_over_rollouts(), keep_extreme_rollouts(keep, advantage)
    )


@given(
    reward=st.lists(st.integers(-3, 3).map(float), min_size=2, max_size=8),
    keep=st.integers(2, 5),
    seed=st.integers(0, 99),
)
@FEW
def test_no_subset_has_a_larger_variance(reward: list[float], keep: int, seed: int):
    kept = kept_by(credit_of(pods(keep, "full_group"), batch_of(reward), seed))
    assert len(kept) == min(keep, len(reward))
    best = max(
        float(torch.tensor(subset).var(correction=0)) for subset in combinations(reward, len(kept))
    )
    chosen = float(torch.tensor([reward[i] for i in kept]).var(correction=0))
    assert chosen == pytest.approx(best, abs=1e-6)


def test_the_highest_and_the_lowest_are_kept_by_hand():
    """0, 10 and 9 of 0, 4, 5, 6, 9, 10: two high and one low beat any other three."""
    credit = credit_of(pods(3, "kept_mean"), batch_of([4.0, 10.0, 0.0, 6.0, 9.0, 5.0]))
    assert kept_by(credit) == [1, 2, 4]
    # mean of the kept 19/3
    assert credit.advantage[[1, 2, 4], 0].tolist() == pytest.approx([11 / 3, -19 / 3, 8 / 3])


@pytest.mark.parametrize("advantage", ["kept_z_score", "kept_mean"])
@given(
    reward=st.lists(st.floats(-2, 2, width=32), min_size=5, max_size=9),
    keep=st.integers(2, 4),
)
@FEW
def test_advantages_add_up_to_0_over_what_is_kept(advantage: str, reward: list[float], keep: int):
    credit = credit_of(pods(keep, advantage), batch_of(reward))
    kept = credit.advantage[kept_by(credit), 0].double()
    assert float(kept.sum()) == pytest.approx(0, abs=1e-5)
    if advantage == "kept_z_score" and max(reward) - min(reward) > 1e-2:
        assert float(kept.std(correction=0)) == pytest.approx(1, abs=1e-3)


def test_the_z_score_of_the_kept_is_that_of_their_rewards_whatever_the_chain():
    """A baseline and a scale of the full group cancel: the paper's (r - mean) / std of the kept."""
    reward = [0.3, 1.7, -0.4, 0.9, 0.1, 1.1]
    scaled = chain(
        leave_one_out(),
        scale_by_group_std(),
        average_over_prompts(),
        keep_extreme_rollouts(4),
    )
    for objective in (scaled, pods(4)):
        credit = credit_of(objective, batch_of(reward))
        kept = kept_by(credit)
        values = torch.tensor([reward[i] for i in kept])
        expected = (values - values.mean()) / values.std(correction=0)
        torch.testing.assert_close(credit.advantage[kept, 0], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("average", [average_over_rollouts(), average_over_prompts()])
def test_every_prompt_keeps_its_share_of_the_weight(average: Objective):
    rollouts = batch_of([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 0.0, 0.0], [7.0, 8.0])
    full = credit_of(chain(center_by_group_mean(), average), rollouts)
    kept = credit_of(
        chain(center_by_group_mean(), average, keep_extreme_rollouts(2, "kept_mean")), rollouts
    )
    for group in range(3):
        rows = rollouts.group == group
        torch.testing.assert_close(kept.weight[rows].sum(), full.weight[rows].sum())


def test_with_a_step_average_a_kept_rollout_weighs_as_many_as_it_stands_for():
    credit = credit_of(
        chain(center_by_group_mean(), average_over_steps(), keep_extreme_rollouts(2)),
        batch_of([0.0, 1.0, 2.0, 3.0]),
    )
    # 8 steps; each kept rollout stands for 4 / 2
    assert credit.weight[[0, 3], 0].tolist() == pytest.approx([2 / 8, 2 / 8])


def test_what_was_there_before_the_selection_stays_in_full():
    rollouts = batch_of([0.0, 1.0, 2.0, 3.0, 4.0])
    before = credit_of(chain(center_by_group_mean(), average_over_rollouts()), rollouts)
    after = credit_of(pods(2), rollouts)
    assert after.full is not None
    assert torch.equal(after.full.advantage, before.advantage)
    assert torch.equal(after.full.weight, before.weight)


def test_a_selection_after_another_chooses_among_what_is_left():
    before = chain(center_by_group_mean(), average_over_rollouts(), drop_uniform_groups())
    objective = chain(before, keep_extreme_rollouts(3))
    credit = credit_of(objective, batch_of([1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 0.0, 1.0]))
    assert len(kept_by(credit)) == 3
    assert min(kept_by(credit)) >= 4
    assert credit.full is not None
    assert (credit.full.weight != 0).all()


@pytest.mark.parametrize("advantage", ["kept_z_score", "kept_mean"])
def test_a_uniform_group_has_no_advantage_whatever_the_baseline(advantage: str):
    objective = chain(
        center_by_moving_average(), average_over_rollouts(), keep_extreme_rollouts(3, advantage)
    )
    credit = credit_of(objective, batch_of([0.1] * 7))
    assert (credit.advantage == 0).all()


def test_a_rollout_without_steps_is_never_kept():
    rollouts = batch_of([9.0, 0.0, 1.0, 2.0])
    rollouts.mask[0] = False
    assert kept_by(credit_of(pods(2), rollouts)) == [1, 3]


def drawn(objective: Objective, group: list[float]) -> Tensor:
    """Returns weight * advantage, a draw per row: a batch of many groups of the same rewards."""
    credit = credit_of(objective, batch_of(*[group] * DRAWS, steps=1))
    return (credit.weight * credit.advantage).double().view(DRAWS, len(group))


def test_ties_are_broken_at_random_and_not_by_order():
    """U23: of six equal failures and one success, each failure is kept equally often."""
    kept = drawn(pods(3, "kept_mean"), [1.0] + [0.0] * 6) != 0
    share = kept.double().mean(dim=0)
    error = (1 / 3 * 2 / 3 / DRAWS) ** 0.5
    assert share[0] == 1
    assert ((share[1:] - 1 / 3).abs() < 4 * error).all()


@pytest.mark.parametrize("advantage", ["kept_z_score", "kept_mean"])
@pytest.mark.parametrize("keep", [4, 5])
def test_a_binary_reward_keeps_the_direction_in_expectation(advantage: str, keep: int):
    """E[w A] is the full group's w A times one number per prompt: the same gradient direction.

    Odd `keep` too: whether the odd one is a success or a failure is drawn as well.
    """
    group = [1.0] * 3 + [0.0] * 5
    direction = drawn(chain(center_by_group_mean(), average_over_rollouts()), group)[0]
    each = drawn(pods(keep, advantage), group)
    mean, error = each.mean(dim=0), each.std(dim=0) / DRAWS**0.5
    scale = float(mean @ direction / (direction @ direction))
    assert scale > 0
    assert ((mean - scale * direction).abs() <= 4 * error + 1e-9).all()


def test_advantages_of_the_full_group_would_favor_what_is_kept():
    """Why rule H5 warns: two of three successes and two of five failures, at the old advantages."""
    credit = credit_of(pods(4, "full_group"), batch_of([1.0] * 3 + [0.0] * 5))
    kept = credit.advantage[kept_by(credit), 0]
    # advantages 5/8 and -3/8: 2 * 5/8 - 2 * 3/8
    assert float(kept.sum()) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: keep_extreme_rollouts(1), "keep >= 2"),
        (lambda: keep_extreme_rollouts(4, "z_score"), "advantage in"),
    ],
)
def test_wrong_settings_are_refused(make: object, message: str):
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
