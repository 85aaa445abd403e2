"""Several judges: what each adds to the reward, and that one of them decides the outcome."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.rewards.base import Task, View
from grpo.runtime.artifacts.tables import REWARDS, SCORE, validate
from grpo.sampling.judging import JointJudge, TextJudge
from grpo.sampling.scoring import RewardRule, judge_rollouts
from grpo.sampling.shaping import Overlong, Shaping, Share, normalize
from grpo.schema import Normalization

PROMPTS = pd.DataFrame(
    [
        {"prompt_id": each, "family": "f", "prompt": each, "answer": "", "entry": "{}"}
        for each in "pqr"
    ]
)
SCORES = st.lists(st.integers(0, 20).map(lambda n: n / 20), min_size=1, max_size=8)
KINDS: tuple[Normalization, ...] = ("none", "z_score_in_group", "rank")


def length(answer: str, task: Task) -> float:
    return len(answer) / 10


def digits(answer: str, task: Task) -> float:
    if answer == "bug":
        raise KeyError("a judge's own bug")
    return sum(each.isdigit() for each in answer) / 10


def rule_of(*shares: Share, maximize: str = "score", penalty: float = 0.0) -> RewardRule:
    """Returns a rule with the judges `length` and `digits`, of which the first decides."""
    known = {"length": length, "digits": digits}
    return RewardRule(
        judges={
            each.judge: TextJudge(known[each.judge], answer_pattern="^(.*)$", timeout_seconds=5.0)
            for each in shares
        },
        shaping=Shaping(
            shares=shares,
            threshold=0.3,
            maximize=maximize,  # type: ignore[arg-type]
            unfinished_penalty=penalty,
        ),
    )


def share(judge: str, weight: float = 1.0, normalize: Normalization = "none") -> Share:
    return Share(judge=judge, weight=weight, normalize=normalize)


def rollouts_of(*texts: str, prompt: str = "p") -> pd.DataFrame:
    ids = [f"{prompt}/{row}" for row in range(len(texts))]
    table = pd.DataFrame({"rollout_id": ids, "prompt_id": prompt, "text": list(texts)})
    return table.assign(steps=1, is_finished=True)


def rewards_of(rule: RewardRule, *texts: str) -> pd.DataFrame:
    return judge_rollouts(rollouts_of(*texts), PROMPTS, rule).rewards


def test_the_reward_is_the_weighted_sum_and_the_first_judge_decides():
    rule = rule_of(share("length", 2.0), share("digits", 0.5), penalty=0.25)
    rollouts = rollouts_of("a12", "abcd", "7").assign(is_finished=[True, False, True])
    rewards = judge_rollouts(rollouts, PROMPTS, rule).rewards
    assert rewards["outcome"].tolist() == [1.0, 1.0, 0.0]
    assert rewards["reward"].tolist() == pytest.approx([0.7, 0.55, 0.25])
    assert rewards[SCORE + "length"].tolist() == [0.3, 0.4, 0.1]
    assert rewards[SCORE + "digits"].tolist() == [0.2, 0.0, 0.1]
    pd.testing.assert_frame_equal(rewards, validate(rewards, REWARDS, Path("rewards")))


@given(
    limit=st.integers(1, 60),
    share=st.integers(1, 60),
    penalty=st.floats(0.1, 2),
    steps=st.integers(0, 80),
)
@settings(max_examples=200, deadline=None)
def test_the_overlong_penalty_is_0_then_linear_then_whole(
    limit: int, share: int, penalty: float, steps: int
):
    """DAPO's eq. 13, times the penalty."""
    buffer = min(share, limit)
    overlong = Overlong(max_steps=limit, buffer_steps=buffer, penalty=penalty)
    if steps <= limit - buffer:
        expected = 0.0
    elif steps <= limit:
        expected = -((limit - buffer) - steps) / buffer
    else:
        expected = 1.0
    assert overlong.of(np.array([steps])) == pytest.approx(penalty * expected)


def test_the_overlong_penalty_is_part_of_the_reward_and_not_of_the_outcome():
    """A penalty of 1 that rises from 8 to 10 steps; the last rollout is also unfinished."""
    plain = rule_of(share("length"), penalty=0.25)
    overlong = Overlong(max_steps=10, buffer_steps=2, penalty=1.0)
    rule = replace(plain, shaping=replace(plain.shaping, overlong=overlong))
    rollouts = rollouts_of("a12", "a12", "a12", "a12")
    rollouts = rollouts.assign(steps=[8, 9, 10, 12], is_finished=[True, True, True, False])
    rewards = judge_rollouts(rollouts, PROMPTS, rule).rewards
    assert rewards["reward"].tolist() == pytest.approx([0.3, -0.2, -0.7, -0.95])
    assert rewards["outcome"].tolist() == [1.0] * 4
    evaluated = replace(rule, shaping=rule.shaping.without_shaping())
    assert judge_rollouts(rollouts, PROMPTS, evaluated).rewards["reward"].tolist() == [0.3] * 4


def test_with_the_outcome_as_the_aim_only_the_first_judge_is_cut_at_its_threshold():
    rule = rule_of(share("length"), share("digits"), maximize="outcome")
    assert rewards_of(rule, "a12", "7")["reward"].tolist() == pytest.approx([1.2, 0.1])


def test_a_judge_of_weight_0_is_asked_and_adds_nothing():
    both, alone = rule_of(share("length"), share("digits", 0.0)), rule_of(share("length"))
    found, expected = (rewards_of(each, "a1", "bcd", "") for each in (both, alone))
    assert found[SCORE + "digits"].tolist() == [0.1, 0.0, 0.0]
    pd.testing.assert_frame_equal(found[expected.columns], expected)


def test_one_judge_has_no_column_of_scores():
    assert list(rewards_of(rule_of(share("length")), "a")) == [
        "rollout_id", "prompt_id", "outcome", "reward", "status", "detail",
    ]  # fmt: skip


def test_a_rollout_that_one_judge_cannot_judge_was_not_judged_and_the_judge_is_named():
    """It counts in no group's statistics: the z-scores are those of the two others."""
    rule = rule_of(share("length"), share("digits", 1.0, "z_score_in_group"))
    rewards = rewards_of(rule, "a12", "bug", "7")
    assert rewards["status"].tolist() == ["scored", "failed", "scored"]
    assert rewards["detail"][1].startswith("digits: KeyError")
    assert rewards["reward"].tolist() == pytest.approx([1.3, 0.3, -0.9], abs=1e-4)


def test_a_judge_that_reads_together_gets_whole_texts_and_fails_alone():
    seen: list[str] = []

    def view(texts: Sequence[str], tasks: Sequence[Task]) -> list[View]:
        if "bug" in texts:
            raise RuntimeError("a model's own bug")
        seen.extend(texts)
        return [View("", len(each) / 10) for each in texts]

    rule = rule_of(share("length"))
    judge = JointJudge(view=view, reads_media=False)
    rewards = rewards_of(
        RewardRule(judges={"length": judge}, shaping=rule.shaping), "a b\nc", "bug"
    )
    assert seen == ["a b\nc"]
    assert rewards["reward"].tolist() == [0.5, 0.0]
    assert rewards["status"].tolist() == ["scored", "failed"]


@given(
    groups=st.lists(SCORES, min_size=1, max_size=3), slope=st.floats(0.1, 3), ends=st.floats(0, 1)
)
@settings(max_examples=60, deadline=None)
def test_normalized_scores_do_not_depend_on_scale_and_offset(
    groups: list[list[float]], slope: float, ends: float
):
    values = np.array([each for group in groups for each in group])
    prompts = pd.Series([f"{n}" for n, group in enumerate(groups) for _ in group])
    counts = np.ones(len(values), dtype=bool)
    for kind in KINDS[1:]:
        found = normalize(values, prompts, counts, kind)
        other = normalize(slope * values + ends, prompts, counts, kind)
        np.testing.assert_allclose(found, other, atol=2e-3)  # EPSILON beside a spread of 0.02


@given(groups=st.lists(SCORES, min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_z_scores_have_mean_0_and_variance_1_and_ranks_have_mean_one_half(
    groups: list[list[float]],
):
    values = np.array([each for group in groups for each in group])
    prompts = pd.Series([f"{n}" for n, group in enumerate(groups) for _ in group])
    counts = np.ones(len(values), dtype=bool)
    z_scores = normalize(values, prompts, counts, "z_score_in_group")
    ranks = normalize(values, prompts, counts, "rank")
    starts = [0, *itertools.accumulate(map(len, groups))]
    for group, start, end in zip(groups, starts, starts[1:]):
        expected = 1.0 if len(set(group)) > 1 else 0.0
        assert z_scores[start:end].mean() == pytest.approx(0, abs=1e-9)
        assert z_scores[start:end].var() == pytest.approx(expected, abs=1e-3)
        assert ranks[start:end].mean() == pytest.approx(0.5)
        worse = [sum(a < b for a in group) + sum(a == b for a in group) / 2 - 0.5 for b in group]
        if len(group) > 1:
            assert ranks[start:end] == pytest.approx(np.array(worse) / (len(group) - 1))


@given(groups=st.lists(SCORES, min_size=1, max_size=3), data=st.data())
@settings(max_examples=40, deadline=None)
def test_what_was_not_judged_changes_no_normalized_score(
    groups: list[list[float]], data: st.DataObject
):
    values = np.array([each for group in groups for each in group])
    prompts = pd.Series([f"{n}" for n, group in enumerate(groups) for _ in group])
    counts = np.array(
        data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values)))
    )
    for kind in KINDS[1:]:
        found = normalize(values, prompts, counts, kind)
        kept = prompts[counts].reset_index(drop=True)
        alone = normalize(values[counts], kept, np.ones(counts.sum(), dtype=bool), kind)
        np.testing.assert_array_equal(found[counts], alone)
        assert not found[~counts].any()
