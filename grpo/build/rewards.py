"""Judges and rewards from parameters."""

from grpo.params import Reward
from grpo.rewards.base import Judge, Reader
from grpo.scoring import RewardRule


def build_reward(reward: Reward) -> RewardRule:
    """Returns how rollouts are judged.

    Raises:
      MissingExtraError: If the judge's package is not installed.
    """
    return RewardRule(
        judge=_find_judge(reward),
        read=_find_reader(reward),
        answer_pattern=reward.answer_pattern,
        threshold=reward.threshold,
        maximize=reward.maximize,
        unfinished_penalty=reward.unfinished_penalty,
        timeout_seconds=reward.timeout_seconds,
    )


def _find_judge(reward: Reward) -> Judge:
    # Imported here: a judge's packages take a second that runs with another judge need not wait.
    match reward.judge:
        case "reasoning_gym":
            from grpo.rewards.reasoning import score_answer

            return score_answer
        case "math":
            from grpo.rewards.math import verify_math

            return verify_math
        case "ocr":
            from grpo.rewards.ocr import score_text

            return score_text


def _find_reader(reward: Reward) -> Reader | None:
    if reward.judge != "ocr":
        return None
    from grpo.rewards.ocr import read_texts

    return read_texts
