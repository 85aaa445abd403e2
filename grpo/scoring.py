"""Turns rollouts into outcomes and rewards: the judge's score, a threshold, then shaping."""

import json
from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from grpo.errors import ArtifactError
from grpo.rewards.base import Judge, Task, judge_text


@dataclass(frozen=True, kw_only=True)
class RewardRule:
    """How a judge's score becomes an outcome and a reward."""

    judge: Judge
    answer_pattern: str  # group 1 of its last match is the answer
    threshold: float  # outcome 1 from this score on
    unfinished_penalty: float  # in units of reward
    timeout_seconds: float


def score_rollouts(
    rollouts: pd.DataFrame,
    prompts: pd.DataFrame,
    rule: RewardRule,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> pd.DataFrame:
    """Returns outcome, reward and status per rollout under the schema REWARDS.

    Args:
      rollouts: Schema ROLLOUTS.
      prompts: Schema PROMPTS.
      progress: Called with the rollouts done and their number.

    Raises:
      ArtifactError: If a rollout's prompt is not among `prompts`.
    """
    tasks = {
        row["prompt_id"]: Task(
            family=row["family"], answer=row["answer"], entry=json.loads(row["entry"])
        )
        for row in prompts.to_dict("records")
    }
    unknown = ~rollouts["prompt_id"].isin(tasks)
    if unknown.any():
        raise ArtifactError(
            f"rollout {rollouts.loc[unknown, 'rollout_id'].iloc[0]!r} belongs to no known prompt; "
            "rerun the rollout stage"
        )
    rows = []
    for number, row in enumerate(rollouts.to_dict("records"), start=1):
        outcome = judge_text(
            rule.judge,
            row["text"],
            tasks[row["prompt_id"]],
            answer_pattern=rule.answer_pattern,
            timeout_seconds=rule.timeout_seconds,
        )
        solved = float(outcome.score >= rule.threshold)
        penalty = 0.0 if row["is_finished"] else rule.unfinished_penalty
        rows.append(
            {
                "rollout_id": row["rollout_id"],
                "prompt_id": row["prompt_id"],
                "outcome": solved,
                "reward": solved - penalty,
                "status": outcome.status,
            }
        )
        progress(number, len(rollouts))
    return pd.DataFrame(rows)
