"""Results that say little although no stage failed: nothing was scored, learned or measured."""

from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from grpo.params.parameters import BASE, Parameters
from grpo.runtime.artifacts.files import read_json
from grpo.runtime.artifacts.marks import Banner
from grpo.runtime.artifacts.tables import (
    CREDIT,
    EVALUATION,
    REWARDS,
    UNSCORED,
    read_table,
    unscored,
)
from grpo.sampling.evaluation import LEAST_PROMPTS


def find_empty_results(artifacts: Path, params: Parameters) -> list[Banner]:
    """Returns what makes the numbers of a finished run say little.

    Raises:
      ArtifactError: If a table is broken, or the base was not evaluated.
    """
    found = [
        _scored_nothing(stage, counts) for stage, counts in _unscored(artifacts, params).items()
    ]
    for name, reason in why_nothing_was_learned(artifacts, params).items():
        counts = unscored(read_table(_rewards(artifacts, name), REWARDS)).get(UNSCORED)
        if counts:
            found.append(_scored_nothing(f"score@{name}", counts))
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


def _scored_nothing(stage: str, counts: Mapping[str, int]) -> Banner:
    text = f"All {sum(counts.values())} rollouts are {_count(counts)}; their rewards mean nothing."
    return Banner(title=f"{stage} scored nothing", text=text)


def _unscored(artifacts: Path, params: Parameters) -> dict[str, dict[str, int]]:
    """Returns the number of rollouts by status of a profile and evaluations without a score."""
    summaries = {
        "profile": artifacts / "profile" / "summary.json",
        **{
            f"evaluate@{name}": artifacts / "evaluations" / f"{name}.json"
            for name in (BASE, *params.rounds)
        },
    }
    read = {stage: read_json(path) for stage, path in summaries.items() if path.exists()}
    return {
        stage: each[UNSCORED]
        for stage, each in read.items()
        if isinstance(each, dict) and UNSCORED in each
    }


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
    counts = unscored(rewards).get(UNSCORED)
    if counts:
        return f"none was scored ({_count(counts)})"
    groups = rewards.groupby("prompt_id")["reward"]
    if (groups.min() == groups.max()).all():
        low, high = rewards["reward"].min(), rewards["reward"].max()
        known = f"all {low:g}" if low == high else f"{low:g} to {high:g} over groups"
        return f"rewards were equal within every group ({known})"
    return "the selection or the objective left none of the groups that were mixed"


def _count(statuses: Mapping[str, int]) -> str:
    return ", ".join(f"{status} ({number})" for status, number in statuses.items())
