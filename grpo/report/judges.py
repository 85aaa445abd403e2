"""The influence of each judge on training, and its agreement with the judges of an evaluation."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from grpo.report.reading import Run
from grpo.runtime.artifacts.tables import SCORE, is_judged
from grpo.sampling.shaping import Shaping, reward_parts
from grpo.wiring.shaping import build_shaping


class Influence(NamedTuple):
    """A judge's part in the rewards of an arm's rollouts."""

    judge: str
    first_mean: float  # of its scores in the arm's first iteration
    last_mean: float  # in its last
    spread: float  # of its scores within groups: the mean standard deviation
    share: float  # of the spread that all judges add to rewards within groups


def correlate_judges(run: Run, policy: str) -> dict[tuple[str, str], float]:
    """Returns Pearson's correlation of mean scores over evaluation prompts, by pair of judges.

    A pair is a judge of the reward and one of `evaluation.judges`. It is NaN if a score is the same
    for every prompt.
    """

    def scores(judge: str) -> pd.Series:
        return run.per_prompt[SCORE + judge][policy]

    return {
        (of_reward.judge, other.judge): _correlate(scores(of_reward.judge), scores(other.judge))
        for of_reward in run.params.reward.judges
        for other in run.params.evaluation.judges
    }


def _correlate(first: pd.Series, second: pd.Series) -> float:
    if first.nunique() == 1 or second.nunique() == 1:
        return float("nan")
    return float(first.corr(second))


def measure_influence(run: Run, arm: str) -> list[Influence]:
    """Returns the influence of each judge of the reward; empty if there is only one judge.

    Advantages depend only on differences within a group, so that equal weights do not mean equal
    influence.
    """
    shaping = build_shaping(run.params)
    names = [each.judge for each in shaping.shares]
    if len(names) == 1:
        return []
    rollouts = [run.rollouts[name] for name in run.chain(arm)[1:]]
    rounds = [each[is_judged(each)] for each in rollouts]
    spreads = pd.concat([_spreads(each, shaping) for each in rounds]).mean()
    total = spreads[names].sum() or np.nan
    return [
        Influence(
            judge=name,
            first_mean=_mean_score(rounds, name, 0),
            last_mean=_mean_score(rounds, name, -1),
            spread=float(spreads[SCORE + name]),
            share=float(spreads[name] / total),
        )
        for name in names
    ]


def _spreads(rollouts: pd.DataFrame, shaping: Shaping) -> pd.DataFrame:
    """Returns the deviations within each group of what judges add, and of their scores."""
    group = rollouts["iteration"].astype(str) + " " + rollouts["prompt_id"]
    scores = rollouts.assign(prompt_id=group).reset_index(drop=True)
    parts = pd.DataFrame(reward_parts(scores, shaping))
    raw = scores[[SCORE + each.judge for each in shaping.shares]]
    return pd.concat([parts, raw], axis=1).groupby(group.to_numpy()).std(ddof=0)


def _mean_score(rounds: Sequence[pd.DataFrame], judge: str, index: int) -> float:
    """Returns the mean score in the first (0) or last (-1) iteration."""
    rollouts = rounds[index]
    iteration = sorted(rollouts["iteration"].unique())[index]
    return float(rollouts.loc[rollouts["iteration"] == iteration, SCORE + judge].mean())
