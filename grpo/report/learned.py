"""Results that say little although no stage failed: nothing was scored, learned or measured."""

from pathlib import Path

import pandas as pd

from grpo.artifacts.banners import Banner
from grpo.artifacts.tables import CREDIT, EVALUATION, REWARDS, read_table
from grpo.evaluation import LEAST_PROMPTS
from grpo.params.parameters import BASE, Parameters

SCORED = "scored"


def find_empty_results(artifacts: Path, params: Parameters) -> list[Banner]:
    """Returns what makes the numbers of a finished run say little.

    Raises:
      ArtifactError: If a table is broken, or the base was not evaluated.
    """
    found = []
    for name, reason in why_nothing_was_learned(artifacts, params).items():
        statuses = read_table(_rewards(artifacts, name), REWARDS)["status"].value_counts()
        if SCORED not in statuses:
            total = statuses.sum()
            text = f"All {total} rollouts are {_count(statuses)}; their rewards mean nothing."
            found.append(Banner(title=f"score@{name} scored nothing", text=text))
        if reason:
            text = f"No rollout had an advantage, because {reason}."
            found.append(Banner(title=f"train@{name} learned nothing", text=text))
    prompts = len(read_table(artifacts / "evaluations" / f"{BASE}.parquet", EVALUATION))
    if prompts < LEAST_PROMPTS:
        text = (
            f"There are {prompts}; with fewer than {LEAST_PROMPTS} no difference is beyond chance, "
            "whatever an interval says. Raise task.eval_prompts."
        )
        found.append(Banner(title="Too few evaluation prompts", text=text))
    return found


def why_nothing_was_learned(artifacts: Path, params: Parameters) -> dict[str, str | None]:
    """Returns by finished round why no rollout of it had an advantage; None if one had.

    Raises:
      ArtifactError: If a table is broken.
    """
    reasons = {}
    for name in params.rounds:
        rewarded, credited = (
            _rewards(artifacts, name),
            artifacts / f"training/{name}/credit.parquet",
        )
        if rewarded.exists() and credited.exists():  # if not, a stage failed, which is said
            credit = read_table(credited, CREDIT)
            learned = bool((credit["advantage"] * credit["weight"]).any())
            reasons[name] = None if learned else _why_nothing(read_table(rewarded, REWARDS))
    return reasons


def _rewards(artifacts: Path, name: str) -> Path:
    return artifacts / "rewards" / f"{name}.parquet"


def _why_nothing(rewards: pd.DataFrame) -> str:
    """Returns what kept every group from teaching."""
    statuses = rewards["status"].value_counts()
    if SCORED not in statuses:
        return f"none was scored ({_count(statuses)})"
    groups = rewards.groupby("prompt_id")["reward"]
    if (groups.min() == groups.max()).all():
        low, high = rewards["reward"].min(), rewards["reward"].max()
        known = f"all {low:g}" if low == high else f"{low:g} to {high:g} over groups"
        return f"rewards were equal within every group ({known})"
    return "the selection or the objective left none of the groups that were mixed"


def _count(statuses: pd.Series) -> str:
    return ", ".join(f"{status} ({number})" for status, number in statuses.items())
