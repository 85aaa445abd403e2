"""Curricula: boundaries, shares, order and determinism of sGPO."""

import pandas as pd
import pytest

from grpo.allocation.curriculum import (
    CurriculumStep,
    allocated_sizes,
    drop_trivial,
    fix_group_size,
    inverse_rate_size,
    keep_rate_window,
    plan_curriculum,
    sample_unsolved,
    select_phase,
    size_groups_by_inverse_rate,
    split_at_random,
    split_by_group_size,
    split_easy_to_hard,
    stage_by_family,
)
from grpo.errors import ParameterError


def profile_of(rates: list[float]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "prompt_id": [f"p{index:03d}" for index in range(len(rates))],
            "family": "f",
            "outcome_rate": rates,
        }
    )


def sgpo(*, alpha: float = 0.1, phases: int = 3) -> list[CurriculumStep]:
    return [
        drop_trivial(above=0.75),
        sample_unsolved(fraction=alpha),
        size_groups_by_inverse_rate(smallest=2, largest=8),
        split_easy_to_hard(phases=phases),
    ]


def published(*, phases: int = 3, unsolved: float = 0.1) -> list[CurriculumStep]:
    return [
        drop_trivial(above=0.75),
        size_groups_by_inverse_rate(smallest=2, largest=8),
        split_by_group_size(phases=phases, unsolved=unsolved),
    ]


EIGHTHS = [count / 8 for count in range(9)]


@pytest.mark.parametrize(
    ("rate", "size"),
    [(0.0, 8), (0.125, 8), (0.126, 4), (0.25, 4), (0.26, 2), (0.5, 2), (0.75, 2)],
)
def test_sizes_change_at_the_papers_boundaries(rate: float, size: int):
    assert inverse_rate_size(rate, 2, 8) == size


def test_sgpo_drops_what_is_trivial_and_keeps_a_share_of_what_is_unsolved():
    plan = plan_curriculum(profile_of(EIGHTHS * 20), sgpo(), seed=0)
    counts = plan["outcome_rate"].value_counts()
    assert plan["outcome_rate"].max() == 0.75
    assert counts[0.0] == 2  # 10 % of 20
    assert counts[0.5] == 20


def test_alpha_1_keeps_all_unsolved_prompts():
    plan = plan_curriculum(profile_of([0.0] * 7 + [0.5] * 3), sgpo(alpha=1.0), seed=0)
    assert (plan["outcome_rate"] == 0).sum() == 7


def test_phases_run_from_easy_to_hard_at_about_equal_cost():
    plan = plan_curriculum(profile_of(EIGHTHS * 50), sgpo(alpha=0.2), seed=0)
    hardest = plan.groupby("phase")["outcome_rate"].min()
    easiest = plan.groupby("phase")["outcome_rate"].max()
    assert (hardest.to_numpy()[:-1] >= easiest.to_numpy()[1:]).all()
    cost = plan.groupby("phase")["rollouts"].sum()
    assert cost.max() - cost.min() <= 16


@pytest.mark.parametrize("unsolved", [0.0, 0.1, 1 / 3])
def test_phases_are_the_prompts_of_one_size_from_the_smallest_to_the_largest(unsolved: float):
    plan = plan_curriculum(profile_of(EIGHTHS * 20), published(unsolved=unsolved), seed=0)
    assert plan.groupby("phase")["rollouts"].unique().map(list).tolist() == [[2], [4], [8]]
    solved = plan[plan["outcome_rate"] > 0].groupby("phase")["outcome_rate"]
    assert solved.unique().map(set).tolist() == [{0.375, 0.5, 0.625, 0.75}, {0.25}, {0.125}]
    assert solved.size().tolist() == [80, 20, 20]
    assert plan["prompt_id"].is_unique
    for _, phase in plan.groupby("phase"):
        assert phase["position"].tolist() == list(range(len(phase)))
        assert not phase["prompt_id"].is_monotonic_increasing
        assert not phase["prompt_id"].is_monotonic_decreasing


@pytest.mark.parametrize(
    ("unsolved", "counts"),
    [(0.1, [2, 2, 2]), (0.25, [5, 5, 5]), (1 / 3, [7, 6, 7]), (0.0, [0, 0, 20])],
)
def test_every_phase_draws_its_own_share_of_the_unsolved_prompts_at_its_size(
    unsolved: float, counts: list[int]
):
    """Of 20 unsolved prompts. Without a share they are in the phase of their own size, 8."""
    plan = plan_curriculum(profile_of(EIGHTHS * 20), published(unsolved=unsolved), seed=0)
    drawn = plan[plan["outcome_rate"] == 0]
    assert [(drawn["phase"] == each).sum() for each in (1, 2, 3)] == counts
    assert drawn["rollouts"].tolist() == [2 ** int(each) for each in drawn["phase"]]


def test_shares_that_round_up_draw_no_prompt_twice():
    """Half of 3 prompts is rounded to 2, twice."""
    rates = [0.0] * 3 + [0.5, 0.25]
    plan = plan_curriculum(profile_of(rates), published(phases=2, unsolved=0.5), seed=0)
    assert plan["prompt_id"].is_unique
    assert (plan["outcome_rate"] == 0).sum() == 3


def test_unsolved_prompts_are_no_cluster():
    """Their own size would be 8."""
    rates = [0.0] * 4 + [0.5, 0.25]
    plan = plan_curriculum(profile_of(rates), published(phases=2, unsolved=0.25), seed=0)
    assert plan["rollouts"].tolist() == [2, 2, 4, 4]


@pytest.mark.parametrize("unsolved", [0.0, 0.25])
def test_the_sizes_of_a_phase_are_those_that_the_steps_assign_to_it(unsolved: float):
    steps = published(unsolved=unsolved)
    plan = plan_curriculum(profile_of(EIGHTHS * 20), steps, seed=0)
    for number in (1, 2, 3):
        phase = select_phase(plan, number)
        changed = phase.assign(rollouts=3)
        pd.testing.assert_series_equal(allocated_sizes(changed, steps), phase["rollouts"])


def test_shares_above_the_unsolved_prompts_are_refused():
    with pytest.raises(ParameterError, match=r"needs phases \* unsolved <= 1, got 3 \* 0.5; lower"):
        split_by_group_size(phases=3, unsolved=0.5)


def test_the_same_seed_gives_the_same_plan_and_another_seed_another():
    profile = profile_of(EIGHTHS * 20)
    first = plan_curriculum(profile, sgpo(), seed=1)
    pd.testing.assert_frame_equal(first, plan_curriculum(profile, sgpo(), seed=1))
    assert not first.equals(plan_curriculum(profile, sgpo(), seed=2))


def test_the_order_of_the_profile_does_not_matter():
    profile = profile_of(EIGHTHS * 20)
    shuffled = profile.sample(frac=1, random_state=0)
    pd.testing.assert_frame_equal(
        plan_curriculum(profile, sgpo(), seed=1), plan_curriculum(shuffled, sgpo(), seed=1)
    )


def test_uniform_phases_are_disjoint_and_of_one_size():
    steps = [split_at_random(phases=3, prompts_per_phase=10), fix_group_size(rollouts=16)]
    plan = plan_curriculum(profile_of([0.5] * 40), steps, seed=0)
    assert plan["prompt_id"].is_unique
    assert (plan.groupby("phase").size() == 10).all()
    assert set(plan["rollouts"]) == {16}
    assert select_phase(plan, 2)["position"].tolist() == list(range(10))


def test_stages_are_the_families_in_the_stated_order():
    profile = profile_of([0.5] * 12).assign(family=["b", "c", "a"] * 4)
    steps = [fix_group_size(2), stage_by_family(order="c, a,b", prompts_per_phase=3)]
    plan = plan_curriculum(profile, steps, seed=0)
    assert plan.groupby("phase")["family"].unique().map(list).tolist() == [["c"], ["a"], ["b"]]
    assert plan["position"].tolist() == [0, 1, 2] * 3
    assert plan["prompt_id"].is_unique
    assert steps[1].phases == 3


def test_a_group_that_is_more_than_a_phase_is_refused():
    """Sizes 2, 2 and 8 of three phases: the third phase would have no prompt."""
    steps = [size_groups_by_inverse_rate(2, 8), split_easy_to_hard(phases=3)]
    with pytest.raises(ParameterError, match="leaves phase 3 of 3 without a prompt"):
        plan_curriculum(profile_of([0.5, 0.5, 0.0]), steps, seed=0)


def test_a_window_keeps_its_bounds():
    steps = [
        keep_rate_window(0.25, 0.5),
        fix_group_size(rollouts=2),
        split_easy_to_hard(phases=1),
    ]
    plan = plan_curriculum(profile_of(EIGHTHS), steps, seed=0)
    assert plan["outcome_rate"].tolist() == [0.5, 0.375, 0.25]


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([drop_trivial(0.1), fix_group_size(2), split_at_random(1, 1)], "leaves no prompt"),
        ([split_at_random(3, 10), fix_group_size(2)], "needs 30 prompts"),
        ([fix_group_size(2)], "a curriculum needs a step that"),
        ([split_at_random(1, 1)], "a curriculum needs a step that"),
        ([split_by_group_size(1), fix_group_size(2)], "must come after a step that sizes groups"),
        (
            [fix_group_size(2), split_by_group_size(3, unsolved=0.1)],
            r"needs a group size per phase, got sizes \[2\] for 3 phases; set phases to",
        ),
        ([fix_group_size(2), stage_by_family("f", 6)], "needs 6 prompts of 'f'"),
        (
            [fix_group_size(2), stage_by_family("f, g", 1)],
            r"the families of the selection, \['f'\]",
        ),
    ],
)
def test_a_curriculum_that_cannot_be_is_refused(steps: list[CurriculumStep], message: str):
    with pytest.raises(ParameterError, match=message):
        plan_curriculum(profile_of([0.5] * 5), steps, seed=0)


def test_a_group_of_one_and_a_missing_phase_are_refused():
    with pytest.raises(ParameterError, match="at least 2"):
        fix_group_size(rollouts=1)
    steps = [split_at_random(phases=2, prompts_per_phase=2), fix_group_size(rollouts=2)]
    plan = plan_curriculum(profile_of([0.5] * 5), steps, seed=0)
    with pytest.raises(ParameterError, match=r"one of \[1, 2\], .* got 3"):
        select_phase(plan, 3)
