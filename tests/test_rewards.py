"""Judges: what they accept, and that nothing a policy writes can crash a run."""

import math
import time

import numpy as np
import pandas as pd
import pytest

from grpo.errors import ArtifactError
from grpo.rewards.base import Outcome, Task, judge_text
from grpo.rewards.math import verify_math
from grpo.rewards.reasoning import score_answer
from grpo.scoring import RewardRule, TextJudge, score_rollouts
from grpo.tasks.reasoning import create_dataset

TASK = Task(family="gcd", prompt="gcd(12, 18)", answer="6", entry={"answer": "6", "metadata": {}})


def raises(answer: str, task: Task) -> float:
    raise RuntimeError("a judge's own bug")


def hangs(answer: str, task: Task) -> float:
    time.sleep(5)
    return 1.0


@pytest.mark.parametrize(
    ("judge", "text", "expected"),
    [
        (score_answer, "work 12,6#6", Outcome(1.0, "scored")),
        (score_answer, "#7 #6", Outcome(1.0, "scored")),  # the last match counts
        (score_answer, "no mark", Outcome(0.0, "unparsable")),
        (raises, "#6", Outcome(0.0, "failed")),
        (lambda answer, task: math.nan, "#6", Outcome(0.0, "failed")),
        (lambda answer, task: 3.0, "#6", Outcome(0.0, "failed")),
        (hangs, "#6", Outcome(0.0, "timed_out")),
    ],
)
def test_whatever_a_judge_does_becomes_an_outcome(judge, text: str, expected: Outcome):
    outcome = judge_text(judge, text, TASK, answer_pattern="#([^#]*)", timeout_seconds=0.2)
    assert outcome == expected


@pytest.mark.parametrize("family", ["gcd", "lcm", "chain_sum", "products", "count_bits"])
def test_the_judge_accepts_its_own_answers_and_no_other(family: str):
    dataset = create_dataset(family, {}, size=20, seed=1)
    for entry in dataset:
        task = Task(family=family, prompt="", answer=entry["answer"], entry=entry)
        assert score_answer(entry["answer"], task) == 1.0
        assert score_answer(str(int(entry["answer"]) + 1), task) < 0.99
        assert score_answer("", task) < 0.99


def test_mathematical_equality_is_judged_by_math_verify():
    task = Task(family="math", prompt="", answer="\\frac{1}{2}", entry={})
    assert verify_math("$0.5$", task) == 1.0
    assert verify_math("$\\frac{2}{4}$", task) == 1.0
    assert verify_math("$0.6$", task) == 0.0


def rule_of(*, unfinished_penalty: float) -> RewardRule:
    return RewardRule(
        judge=TextJudge(judge=score_answer, answer_pattern="#([^#]*)", timeout_seconds=1.0),
        threshold=0.99,
        maximize="outcome",
        unfinished_penalty=unfinished_penalty,
    )


def _tables() -> tuple[pd.DataFrame, pd.DataFrame]:
    prompts = pd.DataFrame(
        {
            "prompt_id": ["p"],
            "family": "gcd",
            "prompt": "?",
            "answer": "6",
            "entry": '{"answer": "6"}',
        }
    )
    rollouts = pd.DataFrame(
        {
            "rollout_id": ["p/0", "p/1", "p/2"],
            "prompt_id": "p",
            "text": ["#6", "#5", "6"],
            "is_finished": [False, True, True],
        }
    )
    return rollouts, prompts


def test_the_threshold_makes_outcomes_and_shaping_touches_only_the_reward():
    rule = rule_of(unfinished_penalty=0.25)
    rewards = score_rollouts(*_tables(), rule)
    assert rewards["outcome"].tolist() == [1.0, 0.0, 0.0]
    assert rewards["reward"].tolist() == [0.75, 0.0, 0.0]
    assert rewards["status"].tolist() == ["scored", "scored", "unparsable"]
    assert np.isfinite(rewards["reward"]).all()


def test_a_rollout_of_an_unknown_prompt_is_refused():
    rollouts, prompts = _tables()
    rule = rule_of(unfinished_penalty=0.0)
    with pytest.raises(ArtifactError, match="'p/0' belongs to no known prompt"):
        score_rollouts(rollouts, prompts.assign(prompt_id="q"), rule)
