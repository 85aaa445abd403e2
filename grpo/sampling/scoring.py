"""Conversion of rollouts into outcomes and rewards: a judge's score, a threshold, shaping."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import UInt8

from grpo.errors import ArtifactError, GrpoError, located
from grpo.rewards.base import Task, Viewer
from grpo.runtime.artifacts.files import read_json, write_json
from grpo.runtime.artifacts.media import read_rows
from grpo.runtime.artifacts.tables import REWARDS, ROLLOUTS, TABLE, TENSORS, count_rows, read_table
from grpo.runtime.executors.base import Executor, Job, Skill
from grpo.sampling.judging import Outcome, ScoreRange, TextJudge, judge_media

SHARD = "judged.json"
MEDIA_AT_ONCE = 16  # images or clips per call of a viewer
ROLLOUTS_PER_SHARD = 8 * MEDIA_AT_ONCE  # a multiple, so that sharding does not change the calls


@dataclass(frozen=True, kw_only=True)
class RewardRule:
    """A judge, and the mapping from its score to an outcome and a reward."""

    judge: TextJudge | Viewer
    threshold: float  # the outcome is 1 if the score is at least this
    maximize: Literal["outcome", "score"]  # the reward before shaping
    unfinished_penalty: float  # in units of reward
    score_range: ScoreRange = None  # of a viewer; a TextJudge has its own

    @property
    def judges_media(self) -> bool:
        """Whether sampled media are judged, not text."""
        return not isinstance(self.judge, TextJudge)


class Judged(NamedTuple):
    """Each rollout's text, or the text read from its media, and rewards (schema REWARDS)."""

    texts: list[str]
    rewards: pd.DataFrame


def judge_stored(
    executor: Executor,
    stored: Sequence[Path],
    *,
    scratch: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Judged:
    """Judges stored rollouts shard by shard and returns the results in order.

    Args:
      executor: Executor with the skill `judging_skill`.
      stored: Directories that `grpo.sampling.rollouts.write_batch` wrote.
      scratch: Directory of finished shards.
      progress: Called with the number of finished shards and the total.
    """
    orders = [
        {"rollouts": str(each), "start": start, "end": start + ROLLOUTS_PER_SHARD}
        for each in stored
        # An empty table gets one shard, whose reading raises the error.
        for start in range(0, max(1, count_rows(each / TABLE)), ROLLOUTS_PER_SHARD)
    ]
    jobs = [Job("judge", each, scratch / f"shard-{n:05d}") for n, each in enumerate(orders)]
    executor.finish(jobs, progress)
    shards = [read_json(job.out / SHARD) for job in jobs]
    texts = [text for shard in shards for text in shard["texts"]]
    rewards = [row for shard in shards for row in shard["rewards"]]
    return Judged(texts, pd.DataFrame(rewards, columns=list(REWARDS.columns)))


def judging_skill(rule: RewardRule, prompts: pd.DataFrame) -> Skill:
    """Returns the skill "judge".

    Args:
      prompts: Schema PROMPTS.
    """

    tasks = _tasks(prompts)

    @lru_cache(maxsize=1)  # the shards of a table are consecutive
    def read(table: Path) -> pd.DataFrame:
        return read_table(table, ROLLOUTS)

    def judge(order: dict[str, Any], out: Path) -> None:
        stored = Path(order["rollouts"])
        table = read(stored / TABLE)[order["start"] : order["end"]]
        media = None
        if rule.judges_media:
            media = np.stack(read_rows(stored / TENSORS, "media", list(table.index)))
        with located(stored / TABLE):
            texts, rewards = _judge(table, tasks, rule, media)
        # JSON, not a table: validating a table takes longer than judging a shard.
        write_json(out / SHARD, {"texts": texts, "rewards": rewards})

    return judge


def judge_rollouts(
    rollouts: pd.DataFrame,
    prompts: pd.DataFrame,
    rule: RewardRule,
    *,
    media: UInt8[np.ndarray, " rollout *sample"] | None = None,
) -> Judged:
    """Returns the judged texts, and outcome, reward and status per rollout.

    Args:
      rollouts: Schema ROLLOUTS.
      prompts: Schema PROMPTS.
      media: The sampled media, one per row of `rollouts`, if the rule judges media.

    Raises:
      ArtifactError: If a rollout's prompt is not among `prompts`, or the rule judges media and
        there is not one per rollout.
    """
    texts, rewards = _judge(rollouts, _tasks(prompts), rule, media)
    return Judged(texts, pd.DataFrame(rewards))


def _judge(
    rollouts: pd.DataFrame,
    tasks: Mapping[str, Task],
    rule: RewardRule,
    media: UInt8[np.ndarray, " rollout *sample"] | None,
) -> tuple[list[str], list[dict[str, Any]]]:
    """Returns the results of `judge_rollouts` with rewards as dicts; `tasks` are by prompt_id."""
    asked = _tasks_of(rollouts, tasks)
    texts, rows = [], []
    judged = zip(rollouts.to_dict("records"), _judge_each(rollouts, asked, rule, media))
    for row, (text, outcome) in judged:
        solved = float(outcome.status == "scored" and outcome.score >= rule.threshold)
        value = solved if rule.maximize == "outcome" else outcome.score
        penalty = 0.0 if row["is_finished"] else rule.unfinished_penalty
        texts.append(text)
        rows.append(
            {
                "rollout_id": row["rollout_id"],
                "prompt_id": row["prompt_id"],
                "outcome": solved,
                "reward": float(value - penalty),
                "status": outcome.status,
                "detail": outcome.detail,
            }
        )
    return texts, rows


def score_rollouts(
    rollouts: pd.DataFrame,
    prompts: pd.DataFrame,
    rule: RewardRule,
    *,
    media: UInt8[np.ndarray, " rollout *sample"] | None = None,
) -> pd.DataFrame:
    """Returns the rewards of `judge_rollouts`; see it for arguments and errors."""
    return judge_rollouts(rollouts, prompts, rule, media=media).rewards


def require_judged(rewards: pd.DataFrame) -> str | None:
    """Returns a warning about unjudged rollouts; None if all were judged.

    Args:
      rewards: Schema REWARDS, of all rollouts of a stage.

    Raises:
      GrpoError: If the judge failed, or was too slow, on every rollout.
    """
    is_scored = rewards["status"] == "scored"
    broken = rewards[rewards["status"].isin(["failed", "timed_out"])]
    if is_scored.any() and len(broken) == 0:
        return None
    counts = ", ".join(f"{n} {status}" for status, n in rewards["status"].value_counts().items())
    first = (broken if len(broken) else rewards).iloc[0]
    found = (
        f"{counts} of {len(rewards)} rollouts; the first is {first['rollout_id']} "
        f"{first['status']}: {_reason(first)}"
    )
    if len(broken) == len(rewards):
        raise GrpoError(f"no rollout was judged, {found}")
    return found if is_scored.any() else f"no rollout was judged, {found}"


def _reason(row: "pd.Series[Any]") -> str:
    reasons = {
        "timed_out": "raise reward.timeout_seconds or fix the judge",
        "unparsable": "reward.answer_pattern matches nowhere in its text",
    }
    return str(row["detail"]) or reasons[row["status"]]


def rejected_gold_answers(
    judge: TextJudge, prompts: pd.DataFrame, *, threshold: float
) -> pd.DataFrame:
    """Returns the prompts whose gold answer the judge scores below `threshold`.

    Args:
      prompts: Schema PROMPTS.

    Returns:
      The rows of `prompts`, with the columns `score`, `status` and `detail`.
    """
    tasks = [*_tasks(prompts).values()]
    outcomes = [*judge.judge_answers(prompts["answer"].tolist(), tasks)]
    judged = prompts.reset_index(drop=True).join(pd.DataFrame(outcomes, columns=Outcome._fields))
    return judged[judged["score"] < threshold]


def score_captions(
    captions: Sequence[str],
    media: UInt8[np.ndarray, " row *sample"],
    *,
    tasks: pd.DataFrame,
    rule: RewardRule,
) -> list[float]:
    """Returns the rewards of intermediate samples of captions.

    Args:
      tasks: Schema PROMPTS; if several prompts have the same text, the first is used.
    """
    known = tasks.drop_duplicates("prompt").set_index("prompt")["prompt_id"]
    rows = pd.DataFrame({"prompt_id": known.loc[list(captions)].to_numpy(), "text": ""})
    rows = rows.assign(rollout_id=rows.index.astype(str), is_finished=True)
    return score_rollouts(rows, tasks, rule, media=media)["reward"].tolist()


def without_shaping(rule: RewardRule) -> RewardRule:
    """Returns the rule with the judge's score as the reward."""
    return replace(rule, maximize="score", unfinished_penalty=0.0)


def _tasks(prompts: pd.DataFrame) -> dict[str, Task]:
    """Returns each prompt's task by prompt_id."""
    return {
        row["prompt_id"]: Task(
            family=row["family"],
            prompt=row["prompt"],
            answer=row["answer"],
            entry=json.loads(row["entry"]),
        )
        for row in prompts.to_dict("records")
    }


def _tasks_of(rollouts: pd.DataFrame, tasks: Mapping[str, Task]) -> list[Task]:
    """Returns each rollout's task."""
    try:
        return [tasks[each] for each in rollouts["prompt_id"]]
    except KeyError:
        unknown = rollouts.loc[~rollouts["prompt_id"].isin(tasks), "rollout_id"].iloc[0]
        raise ArtifactError(
            f"rollout {unknown!r} must have a known prompt; rerun the rollout stage"
        ) from None


def _judge_each(
    rollouts: pd.DataFrame,
    tasks: Sequence[Task],
    rule: RewardRule,
    media: UInt8[np.ndarray, " rollout *sample"] | None,
) -> Iterator[tuple[str, Outcome]]:
    """Yields the judged text and the outcome of each rollout; media are judged in batches."""
    judge = rule.judge
    if isinstance(judge, TextJudge):
        texts = rollouts["text"].tolist()
        for text, steps, outcome in zip(texts, rollouts["steps"], judge.judge_texts(texts, tasks)):
            unsampled = Outcome(0.0, "failed", text or "the sampler returned no step")
            yield text, outcome if steps else unsampled
        return
    found = 0 if media is None else len(media)
    if media is None or found != len(rollouts):
        raise ArtifactError(
            f"must have an image per rollout, has {found} for {len(rollouts)}; rerun the rollout "
            "stage"
        )
    for start in range(0, len(tasks), MEDIA_AT_ONCE):
        rows = slice(start, start + MEDIA_AT_ONCE)
        yield from judge_media(judge, media[rows], tasks[rows], score_range=rule.score_range)
