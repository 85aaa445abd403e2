"""Conversion of judges' scores into outcomes, rewards and improvements."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pandas as pd
from jaxtyping import Float
from numpy.typing import NDArray

from grpo.runtime.artifacts.tables import FIRST_SCORE, SCORE, is_judged
from grpo.schema import Normalization

EPSILON = 1e-6  # in units of a score
DECIDED = "is_decided"  # whether the first judge gave a score


@dataclass(frozen=True, kw_only=True)
class Share:
    """The part of a judge in the reward."""

    judge: str
    weight: float
    normalize: Normalization  # of its scores, within the rollouts of a prompt


@dataclass(frozen=True, kw_only=True)
class Overlong:
    """DAPO's soft penalty on the length of rollouts."""

    max_steps: int  # from here on the penalty is whole
    buffer_steps: int  # before max_steps, in which it rises
    penalty: float  # in units of reward

    def of(self, steps: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns penalty * min(max((steps - start) / buffer_steps, 0), 1). [Yu et al., eq. 13]

        start = max_steps - buffer_steps; the paper's penalty is 1.
        """
        start = self.max_steps - self.buffer_steps
        return self.penalty * np.clip((steps - start) / self.buffer_steps, 0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class Shaping:
    """The mapping from scores to outcome and reward; the first judge decides the outcome."""

    shares: tuple[Share, ...]
    threshold: float  # the outcome is 1 if the first judge's score is at least this
    maximize: Literal["outcome", "score"]  # what the first judge adds to the reward
    unfinished_penalty: float  # in units of reward
    overlong: Overlong | None = None
    keeps_score: bool = False  # whether the score of a single judge is stored

    def without_shaping(self) -> "Shaping":
        """Returns the mapping whose reward is the first judge's score.

        Scores that training maximizes are stored, for they say more than outcomes.
        """
        first = replace(self.shares[0], weight=1.0, normalize="none")
        return Shaping(
            shares=(first,),
            threshold=self.threshold,
            maximize="score",
            unfinished_penalty=0.0,
            keeps_score=self.maximize == "score",
        )

    def outcomes(self, scores: pd.DataFrame) -> NDArray[np.float64]:
        """Returns the outcome of each rollout; see `reward_rollouts`."""
        score = scores[SCORE + self.shares[0].judge].to_numpy(np.float64)
        return (scores[DECIDED].to_numpy(bool) & (score >= self.threshold)).astype(np.float64)

    def penalties(self, rollouts: pd.DataFrame) -> NDArray[np.float64]:
        """Returns what is subtracted from the reward of each rollout.

        Args:
          rollouts: Columns is_finished and steps.
        """
        unfinished = np.where(rollouts["is_finished"], 0.0, self.unfinished_penalty)
        if self.overlong is None:
            return unfinished
        return unfinished + self.overlong.of(rollouts["steps"].to_numpy(np.int64))


def reward_rollouts(scores: pd.DataFrame, shaping: Shaping) -> pd.DataFrame:
    """Returns the scores with the columns outcome and reward.

    Args:
      scores: Columns prompt_id, is_finished, steps, status, DECIDED and one with SCORE and its name
        for each judge; all rollouts of the prompts, if scores are normalized within them.
    """
    outcome = shaping.outcomes(scores)
    parts = reward_parts(scores.assign(outcome=outcome), shaping)
    reward = sum(parts.values()) - shaping.penalties(scores)
    return scores.assign(outcome=outcome, reward=reward)


def reward_parts(
    scores: pd.DataFrame, shaping: Shaping
) -> Mapping[str, Float[np.ndarray, " rollout"]]:
    """Returns what each judge adds to the reward of each rollout, by its name.

    Args:
      scores: Columns prompt_id, status, outcome, and the scores of each judge.
    """
    parts = {}
    counts = is_judged(scores).to_numpy()
    for index, share in enumerate(shaping.shares):
        decides = index == 0 and shaping.maximize == "outcome"
        values = scores["outcome" if decides else SCORE + share.judge].to_numpy(np.float64)
        parts[share.judge] = share.weight * normalize(
            values, scores["prompt_id"], counts, share.normalize
        )
    return parts


def normalize(
    values: Float[np.ndarray, " rollout"],
    prompts: "pd.Series[str]",
    counts: NDArray[np.bool_],
    kind: Normalization,
) -> Float[np.ndarray, " rollout"]:
    """Returns values that are normalized within the rollouts of a prompt. [GDPO]

    A z-score divides by the population's deviation + EPSILON, as `scale_by_group_std` does; it is 0
    where all are equal. A rank is the share of the other rollouts that are worse, ties count half.

    Args:
      counts: Rollouts that are judged; the others get 0 and do not affect the rest.
    """
    if kind == "none":
        return values
    groups = pd.Series(values[counts]).groupby(prompts.to_numpy()[counts])
    if kind == "rank":
        others = groups.transform("size") - 1
        found = ((groups.rank() - 1) / others).where(others > 0, 0.5)
    else:
        mean, deviation = groups.transform("mean"), groups.transform("std", ddof=0)
        # Compared exactly: the mean of equal floats need not equal them.
        differ = groups.transform("max") > groups.transform("min")
        found = ((values[counts] - mean) / (deviation + EPSILON)).where(differ, 0.0)
    normalized = np.zeros_like(values)
    normalized[counts] = found
    return normalized


def improvements(
    rollouts: pd.DataFrame, rewards: pd.DataFrame, judge: str
) -> Float[np.ndarray, " rollout"]:
    """Returns max(0, (e_1 - e) / e_1), e = 1 - score, for each rollout. [Group Revision]

    It is 0 without a first answer, and if the first answer has no error.

    Args:
      rollouts: Schema ROLLOUTS, with first answers.
      rewards: Schema REWARDS, the same rows.
    """
    before = 1 - rollouts[FIRST_SCORE].to_numpy(np.float64)
    after = 1 - rewards[SCORE + judge].to_numpy(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        removed = (before - after) / before
    return np.where(before > 0, removed, 0.0).clip(min=0.0)
