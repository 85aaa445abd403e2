"""Reads scores, costs, credit and updates of the rounds in the parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from grpo.errors import ArtifactError, brief
from grpo.params.parameters import BASE, LinkSpec, Parameters
from grpo.runtime.artifacts.files import read_json
from grpo.runtime.artifacts.stored_iterations import IterationFiles, count_iterations, iterations_of
from grpo.runtime.artifacts.tables import (
    CREDIT,
    EVALUATION,
    GREEDY_SCORE,
    PROMPTS,
    REWARDS,
    ROLLOUTS,
    SCORE,
    is_count,
    known_prompts,
    read_profile,
    read_table,
    read_tables,
    wrong_cell,
)
from grpo.sampling.evaluation import per_prompt_metrics

COST = ("flops", "sampled_steps", "trained_steps", "judge_calls")
SCORES = ("greedy", "mean_at_k", "pass_at_k")
CURVES = ("reward_mean", "uniform_group_fraction", "clip_fraction", "kl_to_start")
OPTIONAL_CURVES = ("grad_norm", "entropy_mean")  # drawn if a round recorded them
STEPS = ("step", "rollouts", "reward_std_within", "trained_rollouts", "advantage_abs_mean")
AUDITS = ("audit_cosine", "audit_norm_ratio")  # NaN for updates without an audit
KINDS_IN_BUDGET = ("profile", "sampling", "update")
ROLLOUT = ["iteration", "rollout_id"]  # what identifies a rollout of a round
GROUP = ["iteration", "prompt_id"]  # what identifies a group of a round


@dataclass(frozen=True, kw_only=True)
class Run:
    """Artifacts of a run that the report reads."""

    params: Parameters
    profile: pd.DataFrame  # without rows if no profile was sampled
    costs: pd.DataFrame  # columns stage, kind, round and COST; one row per stage and kind of work
    scores: dict[str, Any]  # by policy: k, and value, low, high of each of `reported_scores`
    per_prompt: dict[
        str, pd.DataFrame
    ]  # by name in `reported_scores`: evaluation prompt (row) and policy (column)
    evaluated: dict[str, pd.DataFrame]  # by policy: table EVALUATION, by prompt_id in its order
    iterations: dict[str, list[IterationFiles]]  # by round
    rollouts: dict[str, pd.DataFrame]  # by round, of all iterations: see `read_rollouts`
    updates: dict[str, pd.DataFrame]  # by round, of all iterations
    steps: dict[str, pd.DataFrame]  # by round: STEPS, a row per iteration and step; NaN: missing
    selections: dict[str, dict[str, int | float]]  # by round with a selection: its counts
    plateaus: dict[str, int]  # planned iterations, by round that has ended on a plateau
    temperatures: dict[str, list[float]]  # by round whose temperature may rise: of its iterations

    @property
    def rates(self) -> pd.DataFrame:
        """Success rate by evaluation prompt (row) and policy (column)."""
        return self.per_prompt["mean_at_k"]

    @property
    def families(self) -> pd.Series:
        """Family by evaluation prompt."""
        return self.evaluated[BASE]["family"]

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
    profile = known_prompts(read_profile(artifacts / "profile" / "prompts.parquet"))
    evaluations = artifacts / "evaluations"
    evaluated = _read_evaluated(evaluations, policies)
    iterations = {name: iterations_of(artifacts, name) for name in params.rounds}
    return Run(
        params=params,
        profile=profile,
        costs=_read_costs(artifacts, list(params.rounds)),
        scores={
            name: _read_scores(evaluations / f"{name}.json", reported_scores(params))
            for name in policies
        },
        per_prompt=_per_prompt(evaluations, evaluated, reported_scores(params)),
        evaluated=evaluated,
        iterations=iterations,
        rollouts={name: read_rollouts(files, profile) for name, files in iterations.items()},
        updates={
            name: _read_numbers(
                artifacts / "training" / name / "updates.csv",
                ("update", *CURVES, *AUDITS),
                optional=OPTIONAL_CURVES,
            )
            for name in params.rounds
        },
        steps={
            name: pd.concat([_read_numbers(each.record / "steps.csv", STEPS) for each in files])
            for name, files in iterations.items()
        },
        selections={
            name: _read_selection(files)
            for name, files in iterations.items()
            if params.arms[params.rounds[name].arm].selection
        },
        plateaus=_read_plateaus(artifacts, list(params.rounds)),
        temperatures={
            name: [_read_temperature(each.record / "sampling.json") for each in files]
            for name, files in iterations.items()
            if params.find_arm(params.rounds[name].arm).sampling.num_levels > 1
        },
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


def judge_scores(params: Parameters) -> dict[str, str]:
    """Returns titles of the judges' mean scores, if an evaluation has them.

    It has none if there is one judge and training maximizes its outcome.
    """
    names = [each.judge for each in params.judges("evaluation").values()]
    if len(names) == 1 and params.reward.maximize == "outcome":
        return {}
    sampled = {SCORE + each: f"{each}, sampled" for each in names}
    greedy = {GREEDY_SCORE + each: f"{each}, greedy" for each in names}
    return sampled | (greedy if params.modality.has_greedy else {})


def reported_scores(params: Parameters) -> tuple[str, ...]:
    """Returns the names of all scores in the report: `score_names`, then `judge_scores`."""
    return (*score_names(params), *judge_scores(params))


def link_name(link: LinkSpec) -> str:
    """Returns the name in `rloo` or `{rloo: {low: 0.2}}`."""
    return link if isinstance(link, str) else next(iter(link))


def _read_costs(artifacts: Path, rounds: Sequence[str]) -> pd.DataFrame:
    """Returns one row per stage and kind of work with a cost, in pipeline order."""
    rows = [
        _cost_row("base", "warmup", "", artifacts / "training" / BASE / "summary.json"),
        _cost_row("profile", "profile", "", artifacts / "profile" / "summary.json"),
        _cost_row("evaluate-base", "evaluation", "", artifacts / "evaluations" / f"{BASE}.json"),
    ]
    for name in rounds:
        sampled = artifacts / "rollouts" / name / "summary.json"
        trained = artifacts / "training" / name / "summary.json"
        evaluated = artifacts / "evaluations" / f"{name}.json"
        of_round = read_round_costs(artifacts, name)
        rows.append(_cost_row(f"rollout@{name}", "sampling", name, sampled))
        if of_round.has_later_sampling:
            row = {"stage": f"train@{name}", "kind": "sampling", "round": name}
            rows.append({**row, **of_round.later_sampling})
        row = {"stage": f"train@{name}", "kind": "update", "round": name}
        rows.append({**row, **of_round.update})
        rows.append(_cost_row(f"evaluate@{name}", "evaluation", name, evaluated))
        audit = _cost_row(f"audit@{name}", "audit", name, trained, key="audit_cost")
        if any(audit[each] for each in COST):
            rows.append(audit)
    # Counts of a large run exceed 64 bits.
    return pd.DataFrame(rows).astype(dict.fromkeys(COST, object))


def _cost_row(stage: str, kind: str, name: str, path: Path, *, key: str = "cost") -> dict[str, Any]:
    return {"stage": stage, "kind": kind, "round": name, **read_cost(path, key)}


@dataclass(frozen=True, kw_only=True)
class RoundCosts:
    """The COST counts of a round by kind of work, of all its iterations."""

    sampling: dict[str, int]
    later_sampling: dict[str, int]  # the part of `sampling` that the stage train@ did
    update: dict[str, int]  # without the sampling in train@

    @property
    def has_later_sampling(self) -> bool:
        """Whether iterations after the first sampled."""
        return any(self.later_sampling.values())


def read_round_costs(artifacts: Path, name: str) -> RoundCosts:
    """Returns the costs of a round; the sampling of its later iterations counts as sampling.

    Raises:
      ArtifactError: If a summary is missing or invalid.
    """
    first = read_cost(artifacts / "rollouts" / name / "summary.json")
    path = artifacts / "training" / name / "summary.json"
    whole = read_cost(path)
    later = dict.fromkeys(COST, 0)
    if count_iterations(path) > 1:
        later = read_cost(path, "sampling_cost")
    update = {each: whole[each] - later[each] for each in COST}
    for each, count in update.items():
        if count < 0:
            raise ArtifactError(
                f"{path}: sampling_cost.{each} must be at most cost.{each}, {whole[each]}, got "
                f"{later[each]}; rerun the stage train"
            )
    return RoundCosts(
        sampling={each: first[each] + later[each] for each in COST},
        later_sampling=later,
        update=update,
    )


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


def _read_evaluated(evaluations: Path, policies: Sequence[str]) -> dict[str, pd.DataFrame]:
    """Returns the results of each policy by prompt_id, all of the same prompts."""
    found = {}
    for name in policies:
        path = evaluations / f"{name}.parquet"
        found[name] = read_table(path, EVALUATION).set_index("prompt_id").sort_index()
        if not found[name].index.equals(found[BASE].index):
            raise ArtifactError(
                f"{path}: must hold the prompts of {evaluations / BASE}.parquet, "
                "got others; rerun the evaluation"
            )
    return found


def _per_prompt(
    evaluations: Path, evaluated: Mapping[str, pd.DataFrame], scores: Sequence[str]
) -> dict[str, pd.DataFrame]:
    """Returns, by score, its value by prompt (row) and policy (column)."""
    found = {name: per_prompt_metrics(table) for name, table in evaluated.items()}
    for name, table in found.items():
        missing = [each for each in scores if each not in table]
        if missing:
            path = evaluations / f"{name}.parquet"
            raise ArtifactError(f"{path}: column {missing[0]!r} is missing; rerun the evaluation")
    return {
        score: pd.DataFrame({name: table[score] for name, table in found.items()})
        for score in scores
    }


def read_rollouts(iterations: Sequence[IterationFiles], profile: pd.DataFrame) -> pd.DataFrame:
    """Returns a round's rollouts with outcome, reward, status, credit, outcome_rate and iteration.

    A prompt may be sampled in several iterations; GROUP names the columns that tell groups apart.

    Args:
      iterations: Of one round.
      profile: Schema PROFILE; without rows, no prompt has an outcome rate.

    Raises:
      ArtifactError: If a file is missing, broken, or inconsistent with the others.
    """
    tables = read_tables([each.table for each in iterations], ROLLOUTS)
    rewards = read_tables([each.rewards for each in iterations], REWARDS)
    credit = read_tables([each.credit for each in iterations], CREDIT)
    for each, drawn, judged in zip(iterations, tables, rewards, strict=True):
        if set(judged["rollout_id"]) != set(drawn["rollout_id"]):
            stage = f"train@{each.round}" if each.index else f"score@{each.round}"
            raise ArtifactError(
                f"{each.rewards}: must score the rollouts of {each.table}; run the stage {stage}"
            )
    joined = concat_iterations(tables)
    for other in (rewards, credit):
        indexed = concat_iterations(other).set_index(ROLLOUT).drop(columns="prompt_id")
        joined = joined.join(indexed, on=ROLLOUT)
    # The credit table has no row for a rollout that no update used.
    joined = joined.fillna({"advantage": 0.0, "weight": 0.0, "trained_steps": 0.0})
    rate = profile.set_index("prompt_id")["outcome_rate"].rename("outcome_rate")
    joined = joined.join(rate, on="prompt_id")
    unknown = joined[joined["outcome_rate"].isna()]
    if len(unknown) and len(profile):
        first = unknown.iloc[0]
        raise ArtifactError(
            f"{iterations[first['iteration']].table}: prompt_id={first['prompt_id']!r} must be in "
            "the profile; run the stage profile"
        )
    return joined


def concat_iterations(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Returns the tables of all iterations as one, with the column iteration, from 0."""
    numbered = [each.assign(iteration=number) for number, each in enumerate(tables)]
    return pd.concat(numbered, ignore_index=True)


def _read_selection(iterations: Sequence[IterationFiles]) -> dict[str, int | float]:
    """Returns the sums over a round's iterations of the counts of its selection."""
    found = []
    for each in iterations:
        path = each.rollouts / "summary.json"
        counts = _field(path, read_json(path), "selection")
        summed_too = ("kept",) if len(iterations) > 1 else ()
        for count in ("skipped", "sampled", "reused", "oversampling_factor", *summed_too):
            _field(path, counts, count)
        found.append(counts)
    if len(found) == 1:
        return dict(found[0])
    names = found[0].keys() - {"oversampling_factor"}
    summed = {name: sum(each[name] for each in found) for name in sorted(names)}
    return {**summed, "oversampling_factor": summed["sampled"] / max(summed["kept"], 1)}


def _read_plateaus(artifacts: Path, rounds: Sequence[str]) -> dict[str, int]:
    """Returns the planned iterations of each round that has ended on a plateau."""
    found = {}
    for name in rounds:
        path = artifacts / "training" / name / "summary.json"
        content = read_json(path)
        if "plateau" in content:
            found[name] = int(_field(path, content["plateau"], "planned_iterations"))
    return found


def _read_temperature(path: Path) -> float:
    temperature: float = _field(path, read_json(path), "temperature")
    return temperature


def _read_numbers(
    path: Path, columns: Sequence[str], *, optional: Sequence[str] = ()
) -> pd.DataFrame:
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
    columns = [*columns, *(name for name in optional if name in table.columns)]
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
