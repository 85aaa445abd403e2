"""Turns rollouts into outcomes and rewards: the judge's score, a threshold, then shaping."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import pandas as pd
from jaxtyping import UInt8
from torch import Tensor

from grpo.errors import ArtifactError
from grpo.rewards.base import Judge, Reader, Task, judge_text


@dataclass(frozen=True, kw_only=True)
class RewardRule:
    """How a judge's score becomes an outcome and a reward."""

    judge: Judge
    read: Reader | None  # what the judge judges is read off images; None: the rollout's text
    answer_pattern: str  # group 1 of its last match is the answer
    threshold: float  # outcome 1 from this score on
    maximize: Literal["outcome", "score"]  # the reward, before it is shaped
    unfinished_penalty: float  # in units of reward
    timeout_seconds: float


def score_rollouts(
    rollouts: pd.DataFrame,
    prompts: pd.DataFrame,
    rule: RewardRule,
    *,
    media: UInt8[Tensor, " rollout *sample"] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> pd.DataFrame:
    """Returns outcome, reward and status per rollout under the schema REWARDS.

    Args:
      rollouts: Schema ROLLOUTS.
      prompts: Schema PROMPTS.
      media: What was drawn, row by row with `rollouts`, if the rule reads images.
      progress: Called with the rollouts done and their number.

    Raises:
      ArtifactError: If a rollout's prompt is not among `prompts`.
    """
    texts = judged_texts(rollouts, rule, media)
    return score_texts(rollouts, texts, prompts, rule, progress=progress)


def score_texts(
    rollouts: pd.DataFrame,
    texts: Sequence[str],
    prompts: pd.DataFrame,
    rule: RewardRule,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> pd.DataFrame:
    """Returns the same as `score_rollouts` of what is judged of each rollout.

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
    for number, (row, text) in enumerate(zip(rollouts.to_dict("records"), texts), start=1):
        outcome = judge_text(
            rule.judge,
            text,
            tasks[row["prompt_id"]],
            answer_pattern=rule.answer_pattern,
            timeout_seconds=rule.timeout_seconds,
        )
        solved = float(outcome.score >= rule.threshold)
        value = solved if rule.maximize == "outcome" else outcome.score
        penalty = 0.0 if row["is_finished"] else rule.unfinished_penalty
        rows.append(
            {
                "rollout_id": row["rollout_id"],
                "prompt_id": row["prompt_id"],
                "outcome": solved,
                "reward": value - penalty,
                "status": outcome.status,
            }
        )
        progress(number, len(rollouts))
    return pd.DataFrame(rows)


def score_captions(
    captions: Sequence[str],
    media: UInt8[Tensor, " row *sample"],
    *,
    tasks: pd.DataFrame,
    rule: RewardRule,
) -> list[float]:
    """Returns the rewards of what was drawn of captions, on the way to a rollout.

    Args:
      tasks: Schema PROMPTS; of prompts with one text, the first stands for all.
    """
    known = tasks.drop_duplicates("prompt").set_index("prompt")["prompt_id"]
    rows = pd.DataFrame({"prompt_id": known.loc[list(captions)].to_numpy(), "text": ""})
    rows = rows.assign(rollout_id=rows.index.astype(str), is_finished=True)
    return score_rollouts(rows, tasks, rule, media=media)["reward"].tolist()


def without_shaping(rule: RewardRule) -> RewardRule:
    """Returns the rule whose reward is the judge's score."""
    return replace(rule, maximize="score", unfinished_penalty=0.0)


def judged_texts(
    rollouts: pd.DataFrame, rule: RewardRule, media: UInt8[Tensor, " rollout *sample"] | None
) -> list[str]:
    """Returns what the judge judges of each rollout: its text, or what is read off its image.

    Raises:
      ArtifactError: If the rule reads images and there is not one per rollout.
    """
    if rule.read is None:
        return list(rollouts["text"])
    found = 0 if media is None else len(media)
    if media is None or found != len(rollouts):
        raise ArtifactError(
            f"must have an image per rollout, has {found} for {len(rollouts)}; rerun the rollout "
            "stage"
        )
    return rule.read(media.numpy())
