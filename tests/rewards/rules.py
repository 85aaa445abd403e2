"""Reward rules with one judge."""

from typing import Literal

from grpo.sampling.judging import JointJudge, TextJudge
from grpo.sampling.scoring import RewardRule
from grpo.sampling.shaping import Shaping, Share


def rule_with(
    judge: TextJudge | JointJudge,
    *,
    threshold: float = 0.5,
    maximize: Literal["outcome", "score"] = "outcome",
    unfinished_penalty: float = 0.0,
) -> RewardRule:
    """Returns the rule whose only judge has the name "judge"."""
    shaping = Shaping(
        shares=(Share(judge="judge", weight=1.0, normalize="none"),),
        threshold=threshold,
        maximize=maximize,
        unfinished_penalty=unfinished_penalty,
    )
    return RewardRule(judges={"judge": judge}, shaping=shaping)
