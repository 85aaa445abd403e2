"""Judges and rewards from parameters."""

from grpo.params import Reward
from grpo.rewards.base import Judge
from grpo.rewards.math import require_math_verify, verify_math
from grpo.rewards.reasoning import score_answer
from grpo.scoring import RewardRule

JUDGES: dict[str, Judge] = {"reasoning_gym": score_answer, "math": verify_math}


def build_reward(reward: Reward) -> RewardRule:
    """Returns how rollouts are judged.

    Raises:
      MissingExtraError: If the judge's package is not installed.
    """
    if reward.judge == "math":
        require_math_verify()
    return RewardRule(
        judge=JUDGES[reward.judge],
        answer_pattern=reward.answer_pattern,
        threshold=reward.threshold,
        unfinished_penalty=reward.unfinished_penalty,
        timeout_seconds=reward.timeout_seconds,
    )
