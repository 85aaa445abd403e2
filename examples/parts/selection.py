"""A selection step: say here which prompts an iteration samples."""

import numpy as np
import pandas as pd

from grpo.allocation.selection import Budget, History, Selection
from grpo.objective.link import Link


def my_part(prompts: int, chance: float) -> Selection:
    """Samples `prompts` prompts; passes over one whose last group was all solved, but for `chance`.

    Args:
      chance: Probability with which such a prompt is sampled all the same.
    """

    def keep_chance(ids: list[str], history: History) -> np.ndarray:
        solved = history.get("solved", {})
        return np.array([chance if solved.get(each) else 1.0 for each in ids])

    def learn(history: History, groups: pd.DataFrame) -> History:
        is_solved = (groups["successes"] == groups["rollouts"]).astype(int)
        found = dict(zip(groups["prompt_id"], is_solved.tolist()))
        return {**history, "solved": {**history.get("solved", {}), **found}}

    return Selection(
        links=(Link("my_part", {"prompts": prompts, "chance": chance}, "prompt selection"),),
        budget=Budget("my_part", prompts, prompts, 1),
        keep_chance=keep_chance,
        learn=learn,
    )
