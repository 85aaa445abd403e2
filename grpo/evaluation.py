"""How good a policy is on held-out prompts: greedy, mean@k and pass@k, with intervals."""

from typing import Any

import numpy as np
import pandas as pd

from grpo.seeds import derive_seed

METRICS = ("greedy", "mean_at_k", "pass_at_k")


def evaluate_prompts(
    prompts: pd.DataFrame, greedy: pd.DataFrame, sampled: pd.DataFrame
) -> pd.DataFrame:
    """Returns per-prompt results under the schema EVALUATION.

    Args:
      prompts: Schema PROMPTS.
      greedy: Schema REWARDS, one rollout per prompt.
      sampled: Schema REWARDS, k rollouts per prompt.
    """
    counts = sampled.groupby("prompt_id", as_index=False).agg(
        rollouts=("outcome", "size"), successes=("outcome", "sum")
    )
    counts["successes"] = counts["successes"].astype("int64")
    best = greedy[["prompt_id", "outcome"]].rename(columns={"outcome": "greedy"})
    table = counts.merge(best, on="prompt_id", validate="1:1")
    table = table.merge(prompts[["prompt_id", "family"]], on="prompt_id", validate="1:1")
    return table.sort_values("prompt_id", ignore_index=True)


def per_prompt_metrics(table: pd.DataFrame) -> pd.DataFrame:
    """Returns greedy, mean@k and pass@k of each prompt, columns as METRICS."""
    return pd.DataFrame(
        {
            "greedy": table["greedy"],
            "mean_at_k": table["successes"] / table["rollouts"],
            "pass_at_k": (table["successes"] > 0).astype(float),
        }
    )


def summarize_evaluation(
    table: pd.DataFrame, *, confidence: float, resamples: int, seed: int
) -> dict[str, Any]:
    """Returns means with percentile-bootstrap intervals over prompts, and means by family."""
    values = per_prompt_metrics(table)
    # The same resampled prompts for every policy: differences of policies stay paired.
    generator = np.random.default_rng(derive_seed(seed, "evaluation"))
    drawn = generator.integers(len(values), size=(resamples, len(values)))
    tail = (1 - confidence) / 2
    summary: dict[str, Any] = {"k": int(table["rollouts"].max())}
    for metric in METRICS:
        column = values[metric].to_numpy()
        low, high = np.quantile(column[drawn].mean(axis=1), [tail, 1 - tail])
        summary[metric] = {"value": float(column.mean()), "low": float(low), "high": float(high)}
    families = values.groupby(table["family"]).mean()
    summary["by_family"] = {
        str(family): {metric: float(row[metric]) for metric in METRICS}
        for family, row in families.iterrows()
    }
    return summary
