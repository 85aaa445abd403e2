"""Evaluation metrics on held-out prompts: mean@k, pass@k and greedy, with intervals."""

import json
from typing import Any

import numpy as np
import pandas as pd

from grpo.params.parameters import Parameters
from grpo.runtime.artifacts.tables import GREEDY_SCORE, SCORE
from grpo.runtime.seeds import derive_seed

METRICS = ("greedy", "mean_at_k", "pass_at_k")
# With fewer prompts not even a gain on every prompt is significant: 2 * 0.5**n < 0.05 of a sign
# test needs n >= 6. A bootstrap cannot tell: its interval has zero width if all prompts agree.
LEAST_PROMPTS = 6


def evaluate_prompts(
    prompts: pd.DataFrame, sampled: pd.DataFrame, greedy: pd.DataFrame | None
) -> pd.DataFrame:
    """Returns per-prompt results under the schema EVALUATION.

    Args:
      prompts: Schema PROMPTS.
      sampled: Schema REWARDS, k rollouts per prompt.
      greedy: Schema REWARDS, one rollout per prompt; None: the policy has no greedy decoding.
    """
    counts = sampled.groupby("prompt_id", as_index=False).agg(
        rollouts=("outcome", "size"), successes=("outcome", "sum")
    )
    counts["successes"] = counts["successes"].astype("int64")
    table = counts.assign(greedy=np.nan)
    if greedy is not None:
        best = greedy[["prompt_id", "outcome"]].rename(columns={"outcome": "greedy"})
        best = best.merge(_mean_scores(greedy, GREEDY_SCORE), on="prompt_id")
        table = counts.merge(best, on="prompt_id", validate="1:1")
    table = table.merge(_mean_scores(sampled, SCORE), on="prompt_id")
    table = table.merge(prompts[["prompt_id", "family"]], on="prompt_id", validate="1:1")
    return table.sort_values("prompt_id", ignore_index=True)


def _mean_scores(rewards: pd.DataFrame, prefix: str) -> pd.DataFrame:
    """Returns each prompt's mean score of each judge, in columns that begin with `prefix`."""
    scores = [name for name in rewards if str(name).startswith(SCORE)]
    means = rewards[["prompt_id", *scores]].groupby("prompt_id", as_index=False).mean()
    return means.rename(columns={name: prefix + str(name).removeprefix(SCORE) for name in scores})


def per_prompt_metrics(table: pd.DataFrame) -> pd.DataFrame:
    """Returns the available METRICS of each prompt, and its mean scores if there are any."""
    values = pd.DataFrame(
        {
            "greedy": table["greedy"],
            "mean_at_k": table["successes"] / table["rollouts"],
            "pass_at_k": (table["successes"] > 0).astype(float),
            **{
                str(name): table[name]
                for name in table
                if str(name).startswith((SCORE, GREEDY_SCORE))
            },
        }
    )
    return values.dropna(axis="columns", how="all")


def summarize_evaluation(
    table: pd.DataFrame, *, confidence: float, resamples: int, seed: int
) -> dict[str, Any]:
    """Returns means with percentile-bootstrap intervals over prompts, and means by family."""
    values = per_prompt_metrics(table)
    # All policies use the same resampled prompts, so that their differences are paired.
    generator = np.random.default_rng(derive_seed(seed, "evaluation"))
    drawn = generator.integers(len(values), size=(resamples, len(values)))
    tail = (1 - confidence) / 2
    summary: dict[str, Any] = {"k": int(table["rollouts"].max())}
    for metric in values:
        column = values[metric].to_numpy()
        low, high = np.quantile(column[drawn].mean(axis=1), [tail, 1 - tail])
        summary[str(metric)] = {
            "value": float(column.mean()),
            "low": float(low),
            "high": float(high),
        }
    summary["by_family"] = _means_by(table["family"], values)
    return summary


def mean_rewards(rewards: pd.DataFrame) -> dict[str, float]:
    """Returns the means of the outcome and of each judge's score.

    Args:
      rewards: Schema REWARDS, one rollout per prompt.
    """
    names = ["outcome", *(each for each in map(str, rewards) if each.startswith(SCORE))]
    return {name: float(rewards[name].mean()) for name in names}


def means_by_kind(table: pd.DataFrame, prompts: pd.DataFrame) -> dict[str, dict[str, float]]:
    """Returns means by the field `kind` of the entries of prompts; empty if there is none.

    Args:
      table: Schema EVALUATION.
      prompts: Schema PROMPTS.
    """
    entries = prompts.set_index("prompt_id").loc[table["prompt_id"], "entry"].map(json.loads)
    found = [each.get("kind") for each in entries]
    kinds = [each if isinstance(each, str) else None for each in found]
    by_row = pd.Series(kinds, index=table.index, dtype=object)
    return _means_by(by_row, per_prompt_metrics(table))


def _means_by(group: pd.Series, values: pd.DataFrame) -> dict[str, dict[str, float]]:
    return {
        str(name): {str(metric): float(mean) for metric, mean in row.items()}
        for name, row in values.groupby(group).mean().iterrows()
    }


def remark_on_prompts(params: Parameters) -> str | None:
    """Returns a warning if the evaluation has too few prompts to compare policies, else None."""
    number = getattr(params.task, "eval_prompts", None)  # a file of prompts has any number
    if number is None or number >= LEAST_PROMPTS:
        return None
    return (
        f"task.eval_prompts: no difference is beyond chance on fewer than {LEAST_PROMPTS} prompts, "
        f"got {number}"
    )
