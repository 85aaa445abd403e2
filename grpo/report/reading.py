"""Reads scores, costs, credit and updates of the rounds in the parameters."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pandera.pandas as pa

from grpo.errors import ArtifactError, brief
from grpo.params.parameters import BASE, LinkSpec, Parameters
from grpo.runtime.artifacts.files import read_json
from grpo.runtime.artifacts.tables import (
    CREDIT,
    EVALUATION,
    PROMPTS,
    REWARDS,
    ROLLOUTS,
    is_count,
    read_profile,
    read_table,
    wrong_cell,
)

COST = ("flops", "sampled_steps", "trained_steps", "judge_calls")
SCORES = ("greedy", "mean_at_k", "pass_at_k")
CURVES = ("reward_mean", "uniform_group_fraction", "clip_fraction", "kl_to_start")
STEPS = ("step", "rollouts", "reward_std_within", "trained_rollouts", "advantage_abs_mean")
AUDITS = ("audit_cosine", "audit_norm_ratio")  # NaN for updates without an audit
KINDS_IN_BUDGET = ("profile", "sampling", "update")


@dataclass(frozen=True, kw_only=True)
class Run:
    """Artifacts of a run that the report reads."""

    params: Parameters
    profile: pd.DataFrame  # without rows if no profile was sampled
    costs: pd.DataFrame  # columns stage, kind, round and COST; one row per stage with a cost
    scores: dict[str, Any]  # by policy: k, and value, low, high of each of `score_names`
    rates: pd.DataFrame  # success rate by evaluation prompt (row) and policy (column)
    rollouts: dict[str, pd.DataFrame]  # by round, with reward, credit and outcome rate
    updates: dict[str, pd.DataFrame]  # by round
    steps: dict[str, pd.DataFrame]  # by round: columns STEPS, NaN for missing numbers
    selections: dict[str, dict[str, int | float]]  # by round with a selection: its counts

    @property
    def score_names(self) -> tuple[str, ...]:
        """The SCORES that the evaluation reports."""
        return score_names(self.params)

    @property
    def arms(self) -> list[str]:
        """The arms with rounds, in the order of params.yaml; the first is the reference."""
        return [arm for arm in self.params.arms if self.params.rounds_of(arm)]

    def chain(self, arm: str) -> list[str]:
        """Returns the policies from the base to the arm's last round.

        Rounds of another arm, from which this one starts, are among them.
        """
        return self.params.chain(arm)


def read_run(artifacts: Path, params: Parameters) -> Run:
    """Returns the artifacts of the rounds in `params`; ignores files of other rounds.

    Raises:
      ArtifactError: If a file is missing, broken, or inconsistent with the others.
    """
    policies = [BASE, *params.rounds]
    _require_held_out(artifacts / "prompts")
    profile = read_profile(artifacts / "profile" / "prompts.parquet")
    evaluations = artifacts / "evaluations"
    return Run(
        params=params,
        profile=profile,
        costs=_read_costs(artifacts, list(params.rounds)),
        scores={
            name: _read_scores(evaluations / f"{name}.json", score_names(params))
            for name in policies
        },
        rates=_read_rates(evaluations, policies),
        rollouts={name: read_rollouts(artifacts, name, profile) for name in params.rounds},
        updates={
            name: _read_numbers(
                artifacts / "training" / name / "updates.csv", ("update", *CURVES, *AUDITS)
            )
            for name in params.rounds
        },
        steps={
            name: _read_numbers(artifacts / "training" / name / "steps.csv", STEPS)
            for name in params.rounds
        },
        selections=_read_selections(artifacts, params),
    )


def _require_held_out(prompts: Path) -> None:
    """Raises ArtifactError if an evaluation prompt is also a training prompt."""
    trained = set(read_table(prompts / "train.parquet", PROMPTS)["prompt"])
    held_out = prompts / "eval.parquet"
    table = read_table(held_out, PROMPTS)
    seen = np.flatnonzero(table["prompt"].isin(trained))
    if len(seen):
        error = wrong_cell(table, held_out, int(seen[0]), "prompt", "no prompt of train.parquet")
        raise ArtifactError(f"{error}; rerun the stage prepare")


def score_names(params: Parameters) -> tuple[str, ...]:
    """Returns the SCORES that an evaluation reports."""
    is_greedy = params.modality.has_greedy
    return tuple(name for name in SCORES if name != "greedy" or is_greedy)


def link_name(link: LinkSpec) -> str:
    """Returns the name in `rloo` or `{rloo: {low: 0.2}}`."""
    return link if isinstance(link, str) else next(iter(link))


def _read_costs(artifacts: Path, rounds: Sequence[str]) -> pd.DataFrame:
    """Returns one row per stage with a cost, in pipeline order."""
    rows = [
        _cost_row("base", "warmup", "", artifacts / "training" / BASE / "summary.json"),
        _cost_row("profile", "profile", "", artifacts / "profile" / "summary.json"),
        _cost_row("evaluate-base", "evaluation", "", artifacts / "evaluations" / f"{BASE}.json"),
    ]
    for name in rounds:
        sampled = artifacts / "rollouts" / name / "summary.json"
        trained = artifacts / "training" / name / "summary.json"
        evaluated = artifacts / "evaluations" / f"{name}.json"
        rows.append(_cost_row(f"rollout@{name}", "sampling", name, sampled))
        rows.append(_cost_row(f"train@{name}", "update", name, trained))
        rows.append(_cost_row(f"evaluate@{name}", "evaluation", name, evaluated))
        audit = _cost_row(f"audit@{name}", "audit", name, trained, key="audit_cost")
        if any(audit[each] for each in COST):
            rows.append(audit)
    # Counts of a large run exceed 64 bits.
    return pd.DataFrame(rows).astype(dict.fromkeys(COST, object))


def _cost_row(stage: str, kind: str, name: str, path: Path, *, key: str = "cost") -> dict[str, Any]:
    return {"stage": stage, "kind": kind, "round": name, **read_cost(path, key)}


def read_cost(path: Path, key: str = "cost") -> dict[str, int]:
    """Returns the COST counts in a stage's summary.

    Raises:
      ArtifactError: If the file or a count is missing, or a count is not an integer >= 0.
    """
    cost = _field(path, read_json(path), key)
    counts = {each: _field(path, cost, each) for each in COST}
    for each, count in counts.items():
        if not is_count(count):
            raise ArtifactError(
                f"{path}: {key}.{each} must be a whole number >= 0, got {brief(repr(count))}"
            )
    return counts


def _read_scores(path: Path, names: Sequence[str]) -> Any:
    scores = read_json(path)
    numbers = {"k": _field(path, scores, "k")}
    for name in names:
        for part in ("value", "low", "high"):
            numbers[f"{name}.{part}"] = _field(path, _field(path, scores, name), part)
    for where, number in numbers.items():
        if type(number) not in (int, float):
            raise ArtifactError(
                f"{path}: {where} must be a number, got {brief(repr(number))}; rerun the evaluation"
            )
    return scores


def _read_rates(evaluations: Path, policies: Sequence[str]) -> pd.DataFrame:
    """Returns success rates by prompt (row) and policy (column)."""
    columns = {}
    for name in policies:
        path = evaluations / f"{name}.parquet"
        table = read_table(path, EVALUATION).set_index("prompt_id").sort_index()
        columns[name] = table["successes"] / table["rollouts"]
        if not columns[name].index.equals(columns[BASE].index):
            raise ArtifactError(
                f"{path}: must hold the prompts of {evaluations / BASE}.parquet, "
                "got others; rerun the evaluation"
            )
    return pd.DataFrame(columns)


def read_rollouts(artifacts: Path, name: str, profile: pd.DataFrame) -> pd.DataFrame:
    """Returns the rollouts of a round with outcome, reward, status, credit and outcome_rate.

    Args:
      profile: Schema PROFILE; without rows, no prompt has an outcome rate.

    Raises:
      ArtifactError: If a file is missing, broken, or inconsistent with the others.
    """
    table = artifacts / "rollouts" / name / "table.parquet"
    rollouts = read_table(table, ROLLOUTS)
    rewards = _by_rollout(artifacts / "rewards" / f"{name}.parquet", REWARDS)
    credit = _by_rollout(artifacts / "training" / name / "credit.parquet", CREDIT)
    if set(rewards.index) != set(rollouts["rollout_id"]):
        raise ArtifactError(
            f"{artifacts / 'rewards' / name}.parquet: must score the rollouts of {table}; "
            f"run the stage score@{name}"
        )
    joined = rollouts.join(rewards, on="rollout_id").join(credit, on="rollout_id")
    # The credit table has no row for a rollout that no update used.
    joined = joined.fillna({"advantage": 0.0, "weight": 0.0, "trained_steps": 0.0})
    rate = profile.set_index("prompt_id")["outcome_rate"].rename("outcome_rate")
    joined = joined.join(rate, on="prompt_id")
    unknown = joined.loc[joined["outcome_rate"].isna(), "prompt_id"]
    if len(unknown) and len(profile):
        raise ArtifactError(
            f"{table}: prompt_id={unknown.iloc[0]!r} must be in the profile; run the stage profile"
        )
    return joined


def _read_selections(artifacts: Path, params: Parameters) -> dict[str, dict[str, int | float]]:
    """Returns the selection counts of each round whose arm has a selection."""
    selections = {}
    for name, each in params.rounds.items():
        if params.arms[each.arm].selection:
            path = artifacts / "rollouts" / name / "summary.json"
            counts = _field(path, read_json(path), "selection")
            for count in ("skipped", "sampled", "reused", "oversampling_factor"):
                _field(path, counts, count)
            selections[name] = counts
    return selections


def _by_rollout(path: Path, schema: pa.DataFrameSchema) -> pd.DataFrame:
    return read_table(path, schema).set_index("rollout_id").drop(columns="prompt_id")


def _read_numbers(path: Path, columns: Sequence[str]) -> pd.DataFrame:
    """Returns a CSV table of a train stage with the given columns as float64."""
    try:
        table = pd.read_csv(path)
    except FileNotFoundError:
        raise ArtifactError(f"{path}: no such file; run the stage that writes it") from None
    except (pd.errors.EmptyDataError, pd.errors.ParserError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path}: must be CSV, {error}; delete it and rerun") from None
    missing = [name for name in columns if name not in table.columns]
    if missing:
        raise ArtifactError(f"{path}: column {missing[0]!r} is missing; rerun the stage train")
    for name in columns:
        wrong = pd.to_numeric(table[name], errors="coerce").isna() & table[name].notna()
        if wrong.any():
            row = int(wrong.argmax())
            raise ArtifactError(
                f"{path}: row {row}, column {name!r} must be a number, got {table[name][row]!r}; "
                "rerun the stage train"
            )
    return table.astype(dict.fromkeys(columns, np.float64))


def _field(path: Path, content: Any, key: str) -> Any:
    if not isinstance(content, dict) or key not in content:
        raise ArtifactError(f"{path}: {key!r} is missing; rerun the stage that writes it")
    return content[key]
