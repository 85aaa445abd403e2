"""Construction of judges and rewards from parameters."""

from pathlib import Path
from typing import Any

import pandas as pd

from grpo.errors import ParameterError, brief
from grpo.params.parameters import Parameters
from grpo.rewards import find_judge
from grpo.rewards.base import JudgeInputs, Viewer
from grpo.sampling.judging import TextJudge
from grpo.sampling.scoring import RewardRule, rejected_gold_answers
from grpo.schema import DATA, PARAMS

MOST_GOLD_ANSWERS = 256  # judged per table
MOST_REJECTED = 0.1  # largest accepted fraction of rejected gold answers


def build_reward(params: Parameters, data: Path) -> RewardRule:
    """Returns the reward rule with its judge loaded and, for a judge of texts, its process started.

    Call it before a policy is loaded: the process is a fork, which keeps what is in memory.

    Args:
      data: Parent directory of `reward.model`, if that is a directory.

    Raises:
      MissingExtraError: If the judge's package is not installed.
      ParameterError: If the judge's model cannot be loaded, or its device is missing.
    """
    reward, judge = params.reward, _load_judge(params, data)
    if isinstance(judge, TextJudge):
        judge.start()
    return RewardRule(
        judge=judge,
        threshold=reward.threshold,
        maximize=reward.maximize,
        unfinished_penalty=reward.unfinished_penalty,
        score_range=reward.score_range,
    )


def check_gold_answers(params: Parameters, *tables: pd.DataFrame) -> str | None:
    """Returns a warning if the judge rejects some gold answers; None if it accepts them.

    Judges at most MOST_GOLD_ANSWERS of each table, evenly spaced; judges of media are not tested.

    Args:
      tables: Schema PROMPTS.

    Raises:
      MissingExtraError: If the judge's package is not installed.
      ParameterError: If it rejects more than MOST_REJECTED of them: such prompts reward wrong
        answers.
    """
    reward = params.reward
    if find_judge(reward.judge).reads != "text":
        return None
    judge = _load_judge(params, DATA)
    assert isinstance(judge, TextJudge)
    tried = pd.concat([table.iloc[:: -(-len(table) // MOST_GOLD_ANSWERS)] for table in tables])
    rejected = rejected_gold_answers(judge, tried, threshold=reward.threshold)
    if len(rejected) == 0:
        return None
    first = rejected.iloc[0]
    outcome = f"{first['status']} {first['score']:g} {first['detail']}".rstrip()
    sentence = (
        f"{PARAMS}: reward.judge {reward.judge} rejects the gold answers of {len(rejected)} of "
        f"{len(tried)} tested prompts; the first is prompt {first['prompt_id']}, answer "
        f"{brief(repr(first['answer']))}, {outcome}"
    )
    if len(rejected) > MOST_REJECTED * len(tried):
        raise ParameterError(f"{sentence}; use another judge or correct the answers")
    return sentence


def _load_judge(params: Parameters, data: Path) -> Viewer | TextJudge:
    reward = params.reward
    judge = find_judge(reward.judge)
    loaded: Any = judge.load(JudgeInputs(model=reward.model, data=data, machine=params.machine))
    if judge.reads == "media":
        viewer: Viewer = loaded
        return viewer
    if judge.reads == "simulation":
        return TextJudge(loaded, answer_pattern="^(.*)$", timeout_seconds=1.0)
    assert reward.answer_pattern is not None
    assert reward.timeout_seconds is not None
    return TextJudge(
        loaded,
        answer_pattern=reward.answer_pattern,
        timeout_seconds=reward.timeout_seconds,
        score_range=reward.score_range,
    )
