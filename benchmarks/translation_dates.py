"""Measures rewards of several judges without references on dates in ten languages.

python -m benchmarks.translation_dates 0 1 2 3 4   # runs missing stages, then writes the results
python -m benchmarks.translation_dates             # prints the tables of the results

The arms are in translation_dates.yaml and differ in their reward. All arms of a seed start from the
same base policy. The runs of a seed are under .work/ and resume after an interruption; remove that
folder after a change of code. Writes results/translation_dates.json.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.demo import ROOT
from benchmarks.intervals import in_words, mean_interval, span
from benchmarks.seeds import record_seeds
from benchmarks.translation import (
    BASE,
    FREE,
    Run,
    languages_table,
    parameters,
    run_of,
    scores_of,
    set_judges,
    share_base,
    share_evaluation,
    summarize,
)
from benchmarks.workspaces import make_workspace, run_stages
from grpo.params.parameters import read_params
from grpo.params.yaml import parse_yaml
from grpo.report.judges import measure_influence
from grpo.report.reading import read_run
from grpo.report.words import listed
from grpo.runtime.markdown import markdown_table

SPEC = Path(__file__).with_suffix(".yaml")
WORK = ROOT / ".work" / "translation_dates"
WATCHED = ("embeddings", "language", "copying", "length")
OF_REFERENCES = ("chrf", "exact")
PAIRS = (("normalized", "models"), ("raw", "normalized"), ("parser", "raw"))
LOSS = "repaired"  # the arm of translation.yaml whose other settings all arms have


def main() -> None:
    """Runs the given seeds and prints the tables of all finished seeds."""
    results = record_seeds(
        "translation_dates",
        read_spec(),
        run_seed,
        lambda runs: {"summary": summarize(runs, PAIRS)},
    )
    made = (scores_table, differences_table, influence_table, languages_table)
    print(*(each(results) for each in made), sep="\n\n")


def read_spec() -> dict[str, Any]:
    """Returns the arms and what differs from benchmarks.translation."""
    found: dict[str, Any] = parse_yaml(SPEC.read_text())
    return found


def run_seed(seed: int) -> dict[str, Run]:
    """Returns the scores of the base policy and of every arm, and what the arms cost."""
    runs, first = dict[str, Run](), None
    for name in read_spec()["arms"]:
        workspace = WORK / str(seed) / name
        make_workspace(workspace, arm_parameters(seed, name))
        if first is not None:
            share_base(first, workspace)
            share_evaluation(first, workspace)
        cpu_seconds = run_stages(workspace)
        if first is None:
            first = workspace
            runs[BASE] = scores_of(workspace, BASE) | watched(workspace, BASE)
        runs[name] = run_of(workspace, LOSS, cpu_seconds) | watched(workspace, f"{LOSS}-1")
        runs[name]["influence"] = influence(workspace)
    return runs


def arm_parameters(seed: int, name: str) -> dict[str, Any]:
    """Returns the parameters of one arm. Every judge is in the reward or in the evaluation."""
    spec = read_spec()
    arm = spec["arms"][name]
    params = parameters(seed, FREE, [LOSS])
    params["task"] |= spec["task"]
    params["policy"]["base"]["warmup"] |= spec["warmup"]
    params["policy"]["max_steps"] = spec["max_steps"]
    weights = {FREE: 0.0, **arm["weights"]}  # the parser decides the outcome, also without weight
    judges = (FREE, *WATCHED, *OF_REFERENCES)
    set_judges(params, weights, spec["score_ranges"], judges, normalize=arm["normalize"])
    loss = params["arms"][LOSS]
    *others, group_size = loss["curriculum"]
    assert [*group_size] == ["fix_group_size"]
    loss["curriculum"] = [*others, {"fix_group_size": {"rollouts": spec["rollouts"]}}]
    loss["sampling"] = {**loss["sampling"], "temperature": spec["temperature"]}
    loss["training"] = {**loss["training"], "iterations_per_round": spec["iterations"]}
    return params


def watched(workspace: Path, name: str) -> Run:
    """Returns mean scores of the judges in WATCHED and of exact matches, sampled and greedy."""
    table = pd.read_parquet(workspace / "artifacts" / "evaluations" / f"{name}.parquet")
    columns = [f"{kind}score.{each}" for each in (*WATCHED, "exact") for kind in ("", "greedy_")]
    return {"watched": {each: float(table[each].mean()) for each in columns}}


def influence(workspace: Path) -> dict[str, float]:
    """Returns each judge's share of the spread of rewards within groups; empty for one judge."""
    run = read_run(workspace / "artifacts", read_params(workspace / "params.yaml"))
    return {each.judge: each.share for each in measure_influence(run, LOSS)}


def influence_table(results: dict[str, Any]) -> str:
    """Returns each judge's mean share of the spread of rewards within groups."""
    runs = [*results["runs"].values()]
    judges = (FREE, *WATCHED[:2])
    rows = [
        [
            arm,
            *(
                f"{100 * np.mean([run[arm]['influence'][each] for run in runs]):.0f} %"
                for each in judges
            ),
        ]
        for arm in runs[0]
        if arm != BASE and runs[0][arm]["influence"]
    ]
    return markdown_table(["arm", *judges], rows)


def scores_table(results: dict[str, Any]) -> str:
    """Returns means over seeds of the base's scores, and the changes by every arm."""
    runs = list(results["runs"].values())
    titles = ["policy", "right dates", "right dates, greedy", "chrF++", "chrF++, greedy", *WATCHED]

    def scores(run: Run) -> list[float]:
        shown = [run[each] for each in ("reward_mean", "reward_greedy", "chrf_mean", "chrf_greedy")]
        return [*shown, *(run["watched"][f"score.{each}"] for each in WATCHED)]

    base = np.array([scores(run[BASE]) for run in runs])
    rows = [[BASE, *(f"{each:.3f}" for each in base.mean(axis=0))]]
    for arm in (each for each in runs[0] if each != BASE):
        changes = np.array([scores(run[arm]) for run in runs]) - base
        rows.append([arm, *(in_words(mean_interval(each.tolist())) for each in changes.T)])
    return markdown_table(titles, rows)


def differences_table(results: dict[str, Any]) -> str:
    """Returns the differences between arms in right dates and in chrF++, paired by seed."""
    measures = ("reward_mean", "chrf_mean", "chrf_greedy")
    rows = [
        [name, *(in_words(row[each]) for each in measures)]
        for name, row in results["summary"]["differences"].items()
    ]
    titles = ["difference", "right dates, mean@8", "chrF++, mean@8", "chrF++, greedy"]
    return markdown_table(titles, rows)


def claims(results: dict[str, Any]) -> list[str]:
    """Returns the numbers of the text of docs/translation.md about dates."""
    runs = results["runs"]

    def by_seed(arm: str, score: Callable[[Run], float]) -> str:
        return listed([f"{score(run[arm]) - score(run[BASE]):+.3f}" for run in runs.values()])

    def copies(arm: str) -> str:
        return f"{100 * (1 - runs['4'][arm]['watched']['score.copying']):.0f} %"

    def shares(arm: str) -> str:
        return span([100 * run[arm]["influence"][FREE] for run in runs.values()])

    def seconds(*arms: str) -> str:
        return span([run[arm]["cpu_seconds"] for run in runs.values() for arm in arms])

    return [
        f"by {by_seed('models', lambda run: run['watched']['score.language'])}, and right dates",
        f"and right dates by {by_seed('models', lambda run: run['reward_mean'])}.",
        f"On seed 4 {copies('models')} of the translations of `models` are copies of the source",
        f"(of the base {copies(BASE)})",
        f"{copies('normalized')} of the translations of `normalized`",
        f"{shares('normalized')} % of the spread in `normalized` and {shares('raw')} % in `raw`",
        f"takes {seconds('parser')} s of processor time for an arm's training",
        f"with `embeddings` it takes {seconds('models', 'normalized', 'raw')} s",
    ]


if __name__ == "__main__":
    main()
