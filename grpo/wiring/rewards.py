"""Construction of judges and rewards from parameters."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from grpo.errors import ParameterError, brief
from grpo.params.parameters import JudgeParams, Parameters, Purpose
from grpo.rewards import find_judge
from grpo.rewards.base import CorpusScorer, JudgeInputs
from grpo.sampling.judge_process import MEMORY_GB
from grpo.sampling.judging import JointJudge, LimitedJudge, TextJudge
from grpo.sampling.scoring import Judges, RewardRule, rejected_gold_answers
from grpo.schema import DATA, PARAMS
from grpo.wiring.shaping import build_shaping

MOST_GOLD_ANSWERS = 256  # judged per table
MOST_REJECTED = 0.1  # largest accepted fraction of rejected gold answers


def build_reward(params: Parameters, data: Path) -> RewardRule:
    """Returns the reward rule with its judges loaded and the processes of judges of texts started.

    Call it before a policy is loaded: the processes are forks, which keep what is in memory.

    Args:
      data: Parent directory of a judge's `model`, if that is a directory.

    Raises:
      MissingExtraError: If a judge's package is not installed.
      ParameterError: If a judge's model cannot be loaded, or its device is missing.
    """
    return RewardRule(judges=build_judges(params, data, "reward"), shaping=build_shaping(params))


def build_judges(params: Parameters, data: Path, purpose: Purpose) -> Judges:
    """Returns the judges for a purpose by name; see `build_reward`."""
    judges = {
        each.judge: _load_judge(params, data, where, each)
        for where, each in params.judges(purpose).items()
    }
    for judge in judges.values():
        if not isinstance(judge, JointJudge):
            judge.process.start()
    return judges


def corpus_scorers(params: Parameters) -> list[CorpusScorer]:
    """Returns the scorers of corpora of the judges of an evaluation."""
    judges = [find_judge(each.judge) for each in params.judges("evaluation").values()]
    return [each.score_corpus for each in judges if each.score_corpus is not None]


def check_gold_answers(params: Parameters, *tables: pd.DataFrame) -> str | None:
    """Returns a warning if the first judge rejects some gold answers; None if it accepts them.

    Judges at most MOST_GOLD_ANSWERS of each table, evenly spaced; judges of media or of whole texts
    are not tested. Also checks that prompts have the columns that judges need.

    Args:
      tables: Schema PROMPTS.

    Raises:
      MissingExtraError: If the judge's package is not installed.
      ParameterError: If it rejects more than MOST_REJECTED of them: such prompts reward wrong
        answers. If a prompt has not the columns that a judge needs.
    """
    _require_columns(params, tables)
    ((where, first),) = params.judges("outcome").items()
    judge = find_judge(first.judge)
    if judge.reads != "text" or judge.reads_together or judge.scores_parts:
        return None
    loaded = _load_judge(params, DATA, where, first)
    assert isinstance(loaded, TextJudge)
    tried = pd.concat([table.iloc[:: -(-len(table) // MOST_GOLD_ANSWERS)] for table in tables])
    rejected = rejected_gold_answers(loaded, tried, threshold=params.reward.threshold)
    if len(rejected) == 0:
        return None
    example = rejected.iloc[0]
    outcome = f"{example['status']} {example['score']:g} {example['detail']}".rstrip()
    sentence = (
        f"{PARAMS}: {where}.judge {first.judge} rejects the gold answers of {len(rejected)} of "
        f"{len(tried)} tested prompts; the first is prompt {example['prompt_id']}, answer "
        f"{brief(repr(example['answer']))}, {outcome}"
    )
    if len(rejected) > MOST_REJECTED * len(tried):
        raise ParameterError(f"{sentence}; use another judge or correct the answers")
    return sentence


def _require_columns(params: Parameters, tables: Sequence[pd.DataFrame]) -> None:
    """Raises ParameterError unless every prompt has the columns that the judges need."""
    needed = {
        where: find_judge(each.judge).needs_columns
        for where, each in params.judges("evaluation").items()
    }
    if not any(needed.values()):
        return
    for prompt_id, entry in (
        row for each in tables for row in zip(each["prompt_id"], each["entry"])
    ):
        there = json.loads(entry).keys()
        for where, names in needed.items():
            if names - there:
                raise ParameterError(
                    f"{PARAMS}: {where}.judge needs the column {min(names - there)!r}, prompt "
                    f"{prompt_id} has answer, family and {brief(sorted(there))}"
                )


def _load_judge(
    params: Parameters, data: Path, where: str, given: JudgeParams
) -> TextJudge | JointJudge | LimitedJudge:
    judge, reward = find_judge(given.judge), params.reward
    inputs = JudgeInputs(
        where=where,
        model=given.model,
        data=data,
        machine=params.machine,
        answer_pattern=reward.answer_pattern,
        takes_messages=params.modality.takes_messages(params.policy),
        settings=given.settings,
    )
    loaded: Any = judge.load(inputs)
    memory_gb = reward.memory_gb or MEMORY_GB
    if judge.reads == "media" or judge.reads_together:
        joint = JointJudge(
            view=loaded,
            reads_media=judge.reads == "media",
            score_range=given.score_range,
            scores_parts=judge.scores_parts,
            rollouts_per_call=judge.rollouts_per_call,
        )
        if not judge.may_fork or reward.timeout_seconds is None:
            return joint
        return LimitedJudge(joint, timeout_seconds=reward.timeout_seconds, memory_gb=memory_gb)
    if judge.reads == "simulation":
        return TextJudge(loaded, answer_pattern="^(.*)$", timeout_seconds=1.0)
    assert reward.answer_pattern is not None
    assert reward.timeout_seconds is not None
    return TextJudge(
        loaded,
        answer_pattern=None if judge.scores_parts else reward.answer_pattern,
        timeout_seconds=reward.timeout_seconds,
        score_range=given.score_range,
        scores_parts=judge.scores_parts,
        memory_gb=memory_gb,
    )
