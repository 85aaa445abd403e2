"""Judging of rollouts: of stored ones shard by shard, or of those in memory."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import UInt8

from grpo.errors import ArtifactError, GrpoError, ServerError
from grpo.rewards.base import ROLLOUTS_PER_SHARD, CorpusScorer, Task
from grpo.runtime.artifacts.files import read_json, remove, write_json
from grpo.runtime.artifacts.media import read_rows
from grpo.runtime.artifacts.tables import (
    PARTS,
    REWARDS,
    ROLLOUTS,
    SCORE,
    TABLE,
    TENSORS,
    count_rows,
    empty_table,
    read_table,
)
from grpo.runtime.executors.base import Executor, Job, Skill
from grpo.sampling.judging import JointJudge, LimitedJudge, TextJudge, find_answer
from grpo.sampling.outcomes import Outcome
from grpo.sampling.shaping import DECIDED, Shaping, reward_rollouts

SHARD = "judged.json"
WORST_FIRST = ("unanswered", "failed", "timed_out", "unparsable", "scored")  # statuses
NOT_JUDGED = ("unanswered", "failed", "timed_out")  # of a stage that ends if all rollouts have them
# By name; the first decides the outcome.
Judges = Mapping[str, TextJudge | JointJudge | LimitedJudge]


@dataclass(frozen=True, kw_only=True)
class RewardRule:
    """Judges, and the mapping from their scores to an outcome and a reward."""

    judges: Judges
    shaping: Shaping


class Judged(NamedTuple):
    """Each rollout's text, or the text read from its media, and rewards (schema REWARDS)."""

    texts: list[str]
    rewards: pd.DataFrame


def judge_stored(
    executor: Executor,
    stored: Sequence[Path],
    shaping: Shaping,
    *,
    scratch: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
    keep_unjudged: bool = False,
) -> Judged:
    """Judges stored rollouts shard by shard and returns the results in order.

    Args:
      executor: Executor with the skill `judging_skill`.
      stored: Directories that `grpo.sampling.rollouts.write_batch` wrote.
      scratch: Directory of finished shards.
      progress: Called with the number of finished shards and the total.
      keep_unjudged: Whether the work goes on if no rollout was judged; else the stage ends
        (`require_judged`), and a rerun judges again, e.g. by a server that was mended.
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
    scores = [row for shard in shards for row in shard["scores"]]
    if not keep_unjudged and all(row["status"] in NOT_JUDGED for row in scores):
        for job in jobs:
            remove(job.out)
    return _judged(texts, scores, shaping)


def judging_skill(judges: Judges, prompts: pd.DataFrame) -> Skill:
    """Returns the skill "judge".

    Args:
      prompts: Schema PROMPTS.
    """

    tasks = tasks_by_prompt(prompts)

    @lru_cache(maxsize=1)  # the shards of a table are consecutive
    def read(table: Path) -> pd.DataFrame:
        return read_table(table, ROLLOUTS)

    def judge(order: dict[str, Any], out: Path) -> None:
        stored = Path(order["rollouts"])
        table = read(stored / TABLE)[order["start"] : order["end"]]
        media = None
        if _judge_media(judges):
            media = np.stack(read_rows(stored / TENSORS, "media", list(table.index)))
        try:
            texts, scores = _judge(table, tasks, judges, media)
        except ArtifactError as error:  # errors of judges have their own place
            raise ArtifactError(f"{stored / TABLE}: {error}") from None
        # JSON, not a table: validating a table takes longer than judging a shard.
        write_json(out / SHARD, {"texts": texts, "scores": scores})

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
    texts, scores = _judge(rollouts, tasks_by_prompt(prompts), rule.judges, media)
    return _judged(texts, scores, rule.shaping)


def _judge_media(judges: Judges) -> bool:
    """Returns whether sampled media are judged, not texts."""
    return any(isinstance(each, JointJudge) and each.reads_media for each in judges.values())


def _judged(texts: list[str], scores: list[dict[str, Any]], shaping: Shaping) -> Judged:
    """Returns texts and rewards, with the scores of each judge if there are several, and parts."""
    rewards = reward_rollouts(pd.DataFrame(scores), shaping)
    kept = [name for name in rewards if str(name).startswith(SCORE)]
    has_scores = len(kept) > 1 or shaping.keeps_score
    parts = [PARTS] if PARTS in rewards else []
    columns = [*empty_table(REWARDS), *parts, *(kept if has_scores else [])]
    return Judged(texts, rewards[columns])


def _judge(
    rollouts: pd.DataFrame,
    tasks: Mapping[str, Task],
    judges: Judges,
    media: UInt8[np.ndarray, " rollout *sample"] | None,
) -> tuple[list[str], list[dict[str, Any]]]:
    """Returns the judged texts, and for every rollout its scores and what shaping needs.

    Args:
      tasks: By prompt_id.
    """
    asked = _tasks_of(rollouts, tasks)
    results = [[*_judge_each(rollouts, asked, each, media)] for each in judges.values()]
    rows = []
    for row, of_judges in zip(rollouts.to_dict("records"), zip(*results)):
        outcomes = {name: outcome for name, (_, outcome) in zip(judges, of_judges)}
        worst = min(outcomes, key=lambda name: WORST_FIRST.index(outcomes[name].status))
        detail = outcomes[worst].detail
        first = of_judges[0][1]
        facts = {
            "rollout_id": row["rollout_id"],
            "prompt_id": row["prompt_id"],
            "is_finished": row["is_finished"],
            "steps": row["steps"],
            "status": outcomes[worst].status,
            "detail": f"{worst}: {detail}" if detail and len(judges) > 1 else detail,
            DECIDED: first.status == "scored",
        }
        # The first, if an evaluation asks several; `reward.judges` has at most one.
        for name in [name for name, judge in judges.items() if judge.scores_parts][:1]:
            facts[PARTS] = json.dumps(outcomes[name].parts)
        rows.append(facts | {SCORE + name: each.score for name, each in outcomes.items()})
    return [text for text, _ in results[0]], rows


def score_rollouts(
    rollouts: pd.DataFrame,
    prompts: pd.DataFrame,
    rule: RewardRule,
    *,
    media: UInt8[np.ndarray, " rollout *sample"] | None = None,
) -> pd.DataFrame:
    """Returns the rewards of `judge_rollouts`; see it for arguments and errors."""
    return judge_rollouts(rollouts, prompts, rule, media=media).rewards


def score_corpora(
    rollouts: pd.DataFrame,
    prompts: pd.DataFrame,
    scorers: Sequence[CorpusScorer],
    *,
    answer_pattern: str | None,
) -> dict[str, dict[str, float]]:
    """Returns the scores of all answers of a family together, by family and name.

    Args:
      rollouts: Schema ROLLOUTS.
      prompts: Schema PROMPTS.
      answer_pattern: See `find_answer`; a text without a match has an empty answer. None: an
        answer is the whole text.
    """
    answers = [*rollouts["text"]]
    if answer_pattern is not None:
        answers = [find_answer(text, answer_pattern) or "" for text in answers]
    pairs = [*zip(answers, _tasks_of(rollouts, tasks_by_prompt(prompts)))]
    scores: dict[str, dict[str, float]] = {}
    for family in sorted({task.family for _, task in pairs}):
        texts, asked = zip(*(each for each in pairs if each[1].family == family))
        scores[family] = {}
        for score in scorers:
            scores[family] |= score(texts, asked)
    return scores


def require_judged(rewards: pd.DataFrame) -> str | None:
    """Returns a warning about unjudged rollouts; None if all were judged.

    Args:
      rewards: Schema REWARDS, of all rollouts of a stage.

    Raises:
      ServerError: If no rollout was judged, some because the judge's server does not answer.
      GrpoError: If the judge failed, or was too slow, on every rollout.
    """
    is_scored = rewards["status"] == "scored"
    broken = rewards[rewards["status"].isin(NOT_JUDGED)]
    if is_scored.any() and len(broken) == 0:
        return None
    counts = ", ".join(f"{n} {status}" for status, n in rewards["status"].value_counts().items())
    first = (broken if len(broken) else rewards).iloc[0]
    found = (
        f"{counts} of {len(rewards)} rollouts; the first is {first['rollout_id']} "
        f"{first['status']}: {_reason(first)}"
    )
    if len(broken) == len(rewards):
        is_outage = (broken["status"] == "unanswered").any()
        raise (ServerError if is_outage else GrpoError)(f"no rollout was judged, {found}")
    return found if is_scored.any() else f"no rollout was judged, {found}"


def _reason(row: "pd.Series[Any]") -> str:
    reasons = {
        "unanswered": "the judge's server does not answer",
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
    tasks = [*tasks_by_prompt(prompts).values()]
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
    rows = rows.assign(rollout_id=rows.index.astype(str), is_finished=True, steps=0)
    return score_rollouts(rows, tasks, rule, media=media)["reward"].tolist()


def tasks_by_prompt(prompts: pd.DataFrame) -> dict[str, Task]:
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
    judge: TextJudge | JointJudge | LimitedJudge,
    media: UInt8[np.ndarray, " rollout *sample"] | None,
) -> Iterator[tuple[str, Outcome]]:
    """Yields the judged text and the outcome of each rollout."""
    if isinstance(judge, JointJudge) and judge.reads_media:
        yield from judge.judge(_require_media(media, len(rollouts)), tasks)
        return
    texts = rollouts["text"].tolist()
    for text, steps, outcome in zip(texts, rollouts["steps"], judge.judge_texts(texts, tasks)):
        unsampled = Outcome(0.0, "failed", text or "the sampler returned no step")
        yield text, outcome if steps else unsampled


def _require_media(
    media: UInt8[np.ndarray, " rollout *sample"] | None, rollouts: int
) -> UInt8[np.ndarray, " rollout *sample"]:
    found = 0 if media is None else len(media)
    if media is None or found != rollouts:
        raise ArtifactError(
            f"must have an image per rollout, has {found} for {rollouts}; rerun the rollout stage"
        )
    return media
