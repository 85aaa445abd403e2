"""What a summary says where nothing was scored: how many rollouts have which status."""

import pandas as pd

SCORED, UNSCORED = "scored", "unscored"


def unscored(rewards: pd.DataFrame) -> dict[str, dict[str, int]]:
    """Returns the part of a summary that only a stage has of which no rollout was scored.

    Args:
      rewards: Schema REWARDS.
    """
    statuses = rewards["status"].value_counts()
    if SCORED in statuses:
        return {}
    return {UNSCORED: {str(status): int(number) for status, number in statuses.items()}}
