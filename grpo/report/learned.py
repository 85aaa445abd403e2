"""Warnings about a finished run: no rollout was scored, no signal, or too few eval prompts."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from grpo.params.parameters import BASE, Parameters
from grpo.report.reading import GROUP, concat_iterations
from grpo.runtime.artifacts.files import read_json
from grpo.runtime.artifacts.marks import Banner
from grpo.runtime.artifacts.stored_iterations import IterationFiles, first_iteration, iterations_of
from grpo.runtime.artifacts.tables import (
    CREDIT,
    EVALUATION,
    REWARDS,
    UNSCORED,
    is_judged,
    read_table,
    read_tables,
    unscored,
)
from grpo.sampling.evaluation import LEAST_PROMPTS


def find_empty_results(artifacts: Path, params: Parameters) -> list[Banner]:
    """Returns a banner per problem that makes the numbers of a finished run inconclusive.

    Raises:
      ArtifactError: If a table is broken, or the base was not evaluated.
    """
    found = [
        _scored_nothing(stage, counts) for stage, counts in _unscored(artifacts, params).items()
    ]
    for name, reason in explain_missing_signal(artifacts, params).items():
        counts = unscored(_read_rewards(iterations_of(artifacts, name))).get(UNSCORED)
        if counts:
            found.append(_scored_nothing(f"score@{name}", counts))
        if reason:
            text = f"No rollout had an advantage, because {reason}."
            found.append(Banner(title=f"train@{name} learned nothing", text=text))
    prompts = len(read_table(artifacts / "evaluations" / f"{BASE}.parquet", EVALUATION))
    if prompts < LEAST_PROMPTS:
        text = (
            f"There are {prompts}; with fewer than {LEAST_PROMPTS}, no difference is significant, "
            "whatever the intervals. Raise task.eval_prompts."
        )
        found.append(Banner(title="Too few evaluation prompts", text=text))
    return found


def _scored_nothing(stage: str, counts: Mapping[str, int]) -> Banner:
    text = f"All {sum(counts.values())} rollouts are {_count(counts)}; ignore their rewards."
    return Banner(title=f"{stage} scored nothing", text=text)


def _unscored(artifacts: Path, params: Parameters) -> dict[str, dict[str, int]]:
    """Returns rollouts by status for the profile and the evaluations in which none was scored."""
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


def explain_missing_signal(artifacts: Path, params: Parameters) -> dict[str, str | None]:
    """Returns, by finished round, why no rollout had an advantage; None if any had one.

    Raises:
      ArtifactError: If a table is broken.
    """
    reasons = {}
    for name in params.rounds:
        first = first_iteration(artifacts, name)
        if first.rewards.exists() and first.credit.exists():  # if not, a stage failed
            files = iterations_of(artifacts, name)
            credit = pd.concat(read_tables([each.credit for each in files], CREDIT))
            learned = bool((credit["advantage"] * credit["weight"]).any())
            reasons[name] = None if learned else _explain(_read_rewards(files))
    return reasons


def _read_rewards(files: Sequence[IterationFiles]) -> pd.DataFrame:
    """Returns the rewards of all iterations of a round, with the column iteration."""
    return concat_iterations(read_tables([each.rewards for each in files], REWARDS))


def _explain(rewards: pd.DataFrame) -> str:
    """Returns why no group had a signal."""
    counts = unscored(rewards).get(UNSCORED)
    if counts:
        return f"none was scored ({_count(counts)})"
    rewards = rewards[is_judged(rewards)]
    groups = rewards.groupby(GROUP)["reward"]
    if (groups.min() == groups.max()).all():
        low, high = rewards["reward"].min(), rewards["reward"].max()
        known = f"all {low:g}" if low == high else f"{low:g} to {high:g} over groups"
        return f"rewards were equal within every group ({known})"
    return "the selection or the objective dropped every mixed group"


def _count(statuses: Mapping[str, int]) -> str:
    return ", ".join(f"{status} ({number})" for status, number in statuses.items())
