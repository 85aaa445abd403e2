"""Turns rollouts into outcomes and rewards: the judge's score, a threshold, then shaping."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import pandas as pd
from jaxtyping import UInt8
from torch import Tensor

from grpo.errors import ArtifactError
from grpo.rewards.base import Judge, Outcome, Task, Viewer, judge_media, judge_text

MEDIA_AT_ONCE = 16  # images or clips that a viewer gets in one call


@dataclass(frozen=True, kw_only=True)
class TextJudge:
    """How the answer in a rollout's text is judged."""

    judge: Judge
    answer_pattern: str  # group 1 of its last match is the answer
    timeout_seconds: float


@dataclass(frozen=True, kw_only=True)
class RewardRule:
    """How a judge's score becomes an outcome and a reward."""

    judge: TextJudge | Viewer
    threshold: float  # outcome 1 from this score on
    maximize: Literal["outcome", "score"]  # the reward, before it is shaped
    unfinished_penalty: float  # in units of reward

    @property
    def looks_at_media(self) -> bool:
        """Whether what was drawn is judged, not what was written."""
        return not isinstance(self.judge, TextJudge)


class Judged(NamedTuple):
    """Each rollout's text, or what was seen of its media, and rewards under the schema REWARDS."""

    texts: list[str]
    rewards: pd.DataFrame


def judge_rollouts(
    rollouts: pd.DataFrame,
    prompts: pd.DataFrame,
    rule: RewardRule,
    *,
    media: UInt8[Tensor, " rollout *sample"] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Judged:
    """Returns what was judged, and outcome, reward and status per rollout.

    Args:
      rollouts: Schema ROLLOUTS.
      prompts: Schema PROMPTS.
      media: What was drawn, row by row with `rollouts`, if the rule looks at media.
      progress: Called with the rollouts done and their number.

    Raises:
      ArtifactError: If a rollout's prompt is not among `prompts`, or the rule looks at media and
        there is not one per rollout.
    """
    tasks = _tasks_of(rollouts, prompts)
    texts, rows = [], []
    judged = zip(rollouts.to_dict("records"), _judge_each(rollouts, tasks, rule.judge, media))
    for number, (row, (text, outcome)) in enumerate(judged, start=1):
        solved = float(outcome.score >= rule.threshold)
        value = solved if rule.maximize == "outcome" else outcome.score
        penalty = 0.0 if row["is_finished"] else rule.unfinished_penalty
        texts.append(text)
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
    return Judged(texts, pd.DataFrame(rows))


def score_rollouts(
    rollouts: pd.DataFrame,
    prompts: pd.DataFrame,
    rule: RewardRule,
    *,
    media: UInt8[Tensor, " rollout *sample"] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> pd.DataFrame:
    """Returns the rewards of `judge_rollouts`, which says what it takes and raises."""
    return judge_rollouts(rollouts, prompts, rule, media=media, progress=progress).rewards


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


def _tasks_of(rollouts: pd.DataFrame, prompts: pd.DataFrame) -> list[Task]:
    """Returns each rollout's task."""
    tasks = {
        row["prompt_id"]: Task(
            family=row["family"],
            prompt=row["prompt"],
            answer=row["answer"],
            entry=json.loads(row["entry"]),
        )
        for row in prompts.to_dict("records")
    }
    unknown = ~rollouts["prompt_id"].isin(tasks)
    if unknown.any():
        raise ArtifactError(
            f"rollout {rollouts.loc[unknown, 'rollout_id'].iloc[0]!r} belongs to no known prompt; "
            "rerun the rollout stage"
        )
    return [tasks[each] for each in rollouts["prompt_id"]]


def _judge_each(
    rollouts: pd.DataFrame,
    tasks: Sequence[Task],
    judge: TextJudge | Viewer,
    media: UInt8[Tensor, " rollout *sample"] | None,
) -> Iterator[tuple[str, Outcome]]:
    """Yields what is judged of each rollout and the outcome; media in batches."""
    if isinstance(judge, TextJudge):
        for text, task in zip(rollouts["text"], tasks):
            yield (
                text,
                judge_text(
                    judge.judge,
                    text,
                    task,
                    answer_pattern=judge.answer_pattern,
                    timeout_seconds=judge.timeout_seconds,
                ),
            )
        return
    found = 0 if media is None else len(media)
    if media is None or found != len(rollouts):
        raise ArtifactError(
            f"must have an image per rollout, has {found} for {len(rollouts)}; rerun the rollout "
            "stage"
        )
    for start in range(0, len(tasks), MEDIA_AT_ONCE):
        rows = slice(start, start + MEDIA_AT_ONCE)
        yield from judge_media(judge, media[rows].numpy(), tasks[rows])
