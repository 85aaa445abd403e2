"""Difficulty profile: the base policy's outcome rate on every prompt."""

from collections.abc import Mapping

import pandas as pd

from grpo.runtime.artifacts.tables import is_judged, known_prompts
from grpo.types import Cost


def profile_prompts(
    rollouts: pd.DataFrame, rewards: pd.DataFrame, prompts: pd.DataFrame
) -> pd.DataFrame:
    """Returns rollouts, successes, outcome rate and lengths per prompt under the schema PROFILE.

    A prompt without judged rollouts has 0 rollouts: its difficulty is unknown.

    Args:
      rollouts: Schema ROLLOUTS, of the base policy.
      rewards: Schema REWARDS, of the same rollouts; unjudged rollouts are ignored.
      prompts: Schema PROMPTS.
    """
    judged = rewards.loc[is_judged(rewards), ["rollout_id", "outcome"]]
    joined = rollouts.merge(judged, on="rollout_id", validate="1:1")
    joined["solved_steps"] = joined["steps"].where(joined["outcome"] > 0)
    counts = joined.groupby("prompt_id", as_index=False).agg(
        rollouts=("outcome", "size"),
        successes=("outcome", "sum"),
        mean_steps=("steps", "mean"),
        solved_steps=("solved_steps", "mean"),
    )
    counts = counts.merge(
        prompts[["prompt_id", "family"]], how="right", on="prompt_id", validate="1:1"
    )
    whole = ["rollouts", "successes"]
    counts[whole] = counts[whole].fillna(0).astype("int64")
    counts["outcome_rate"] = counts["successes"] / counts["rollouts"]
    return counts.sort_values("prompt_id", ignore_index=True)


def summarize_profile(
    profile: pd.DataFrame, cost: Cost, steps: Mapping[str, object]
) -> dict[str, object]:
    """Returns the metrics of a profile that `dvc metrics show` prints.

    Args:
      steps: Metrics per step of the rollouts.
    """
    rate = known_prompts(profile)["outcome_rate"]
    return {
        "cost": vars(cost),
        "rollouts": int(profile["rollouts"].sum()),
        "mean_outcome_rate": float(rate.mean()),
        "trivial_fraction": float((rate == 1).mean()),
        "unsolved_fraction": float((rate == 0).mean()),
        **steps,
    }
