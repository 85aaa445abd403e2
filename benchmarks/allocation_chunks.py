"""Compares robot policies trained on three chunks per rollout with training on all chunks.

python -m benchmarks.allocation_chunks 10 11     # runs missing stages, then writes the results
python -m benchmarks.allocation_chunks           # tables and figure from the results

allocation_chunks.yaml has the arms, which all run on the same seeds. Task, base and evaluation are
those of recipes/manipulation.yaml. The runs of a seed are under .work/ and resume after an
interruption; remove that folder after a change of code. Writes results/allocation_chunks.json and
docs/allocation_chunks.svg. For the cost of updates of larger policies, in which gradients dominate,
see benchmarks/chunk_costs.py.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.figure import Figure

from benchmarks.allocation_tokens import draw_curve, gains_by_cost, share_to_reach
from benchmarks.demo import ROOT
from benchmarks.figures import save_figure
from benchmarks.intervals import in_words, mean_interval, span
from benchmarks.seeds import record_seeds
from benchmarks.workspaces import make_workspace, peak_bytes, round_seconds, run_stages
from grpo.modalities.action_chunks.phase_metrics import evenness
from grpo.params.recipes import read_content
from grpo.params.yaml import parse_yaml
from grpo.report.reading import GROUP, read_rollouts, read_round_costs
from grpo.report.style import styled
from grpo.report.words import listed
from grpo.runtime.artifacts.files import read_json
from grpo.runtime.artifacts.stored_iterations import iterations_of
from grpo.runtime.artifacts.tables import EVALUATION, PROFILE, empty_table, read_table
from grpo.runtime.markdown import markdown_table

ARMS = ROOT / "benchmarks" / "allocation_chunks.yaml"
WORK = ROOT / ".work" / "allocation_chunks"
FIGURE = ROOT / "docs" / "allocation_chunks.svg"
ROUNDS = 4
EVALUATED = (2, 4)
REFERENCE, MASKED = "all", "uniform"  # with which arms are compared
BY_PHASE = ("pcm", "pcm_ht")  # arms whose phases the results include
PHASE_COUNTS = ("chunks", "trained_chunks")
PROFILED = ("phases", "contrast_rank_correlation", "variance_by_gradient")
COSTS = {
    "cpu_seconds": ("processor seconds, simulation included", 1.0),
    "trained_chunks": ("thousand chunks backpropagated", 1e3),
}
Point = dict[str, float]
Runs = dict[str, dict[str, Any]]


def main() -> None:
    """Runs the given seeds and shows the results of all finished seeds."""
    arms = parse_yaml(ARMS.read_text())
    found = record_seeds(
        "allocation_chunks", arms, run_seed, lambda runs: {"summary": summarize(runs)}
    )
    save_figure(draw(found["runs"]), FIGURE)
    print(table(found))


def run_seed(seed: int) -> dict[str, Any]:
    """Returns each arm's curve and final success rate by prompt, and the profile's phases."""
    workspace = WORK / str(seed)
    params = parameters(seed)
    make_workspace(workspace, params)
    skipped = [f"evaluate@{name}" for name in params["rounds"] if _number(name) not in EVALUATED]
    seconds, artifacts = run_stages(workspace, skipped), workspace / "artifacts"
    peaks = peak_bytes(workspace)
    curves, rates = {}, {"base": _rates(artifacts, "base")}
    for arm in params["arms"]:
        spent = chunks = flops = train = 0.0
        points = [{**_score(artifacts, "base"), "cpu_seconds": 0.0, "trained_chunks": 0.0}]
        for number in range(1, ROUNDS + 1):
            name = f"{arm}-{number}"
            cost = read_round_costs(artifacts, name).update
            chunks, flops = chunks + cost["trained_steps"], flops + cost["flops"]
            of_round = round_seconds(workspace, seconds, name)
            train, spent = train + of_round.training, spent + of_round.total
            if number in EVALUATED:
                point = _score(artifacts, name) | {"cpu_seconds": round(spent, 1)}
                point |= {"trained_chunks": chunks, "train_flops": flops}
                peak = {"train_peak_bytes": peaks[f"train@{name}"]}
                points.append({**point, "train_cpu_seconds": round(train, 2), **peak})
        curves[arm] = points
        rates[arm] = _rates(artifacts, f"{arm}-{ROUNDS}")
    profile = read_json(artifacts / "profile" / "summary.json")
    phases = {name: profile[name] for name in PROFILED}
    keep = {arm: _keep(artifacts, f"{arm}-{ROUNDS}") for arm in curves if arm in BY_PHASE}
    found = {"curves": curves, "rates": rates, "profile": phases, "keep": keep}
    return {**found, "variance_by_advantage": _variance_by_advantage(artifacts, f"{REFERENCE}-1")}


def parameters(seed: int) -> dict[str, Any]:
    """Returns the recipe with the benchmark's arms for a seed and four rounds per arm."""
    params = read_content(ROOT / "recipes" / "manipulation.yaml")
    changes = parse_yaml(ARMS.read_text())
    arms = {name: {**params["arms"][REFERENCE], **change} for name, change in changes.items()}
    rounds = {
        f"{arm}-{number}": {
            "arm": arm,
            "start": "base" if number == 1 else f"{arm}-{number - 1}",
            "phase": number,
        }
        for arm in arms
        for number in range(1, ROUNDS + 1)
    }
    # No arm reads the profile, but the results include its phases.
    profile = params["profile"] | {"when": "always"}
    return {**params, "seed": seed, "profile": profile, "arms": arms, "rounds": rounds}


def summarize(runs: Runs) -> dict[str, Any]:
    """Returns, by arm, paired differences in success with t intervals over seeds, and costs."""
    summary = {}
    references = [run["curves"][REFERENCE] for run in runs.values()]
    full = [each[-1] for each in references]
    for arm in _arms(runs):
        curves = [run["curves"][arm] for run in runs.values()]
        last = [each[-1] for each in curves]
        summary[arm] = {
            "gain": _difference(runs, arm, "base"),
            "against_all": _difference(runs, arm, REFERENCE),
            "against_uniform": _difference(runs, arm, MASKED),
            "chunks_of_all": _ratio(last, full, "trained_chunks"),
            "train_flops_of_all": _ratio(last, full, "train_flops"),
            "train_seconds_of_all": _ratio(last, full, "train_cpu_seconds"),
            "seconds_of_all": _ratio(last, full, "cpu_seconds"),
            "seconds_to_reach_all": share_to_reach(curves, references, "cpu_seconds"),
            "chunks_to_reach_all": share_to_reach(curves, references, "trained_chunks"),
        }
    return summary


def table(results: dict[str, Any]) -> str:
    """Returns a Markdown table of final paired differences in success and of relative costs."""
    titles = ["arm", "gain over the base", f"against `{REFERENCE}`", f"against `{MASKED}`"]
    titles += ["chunks", "FLOPs of updates", "seconds of training", "seconds in all"]
    rows = list[list[str]]()
    differences = {"gain": "base", "against_all": REFERENCE, "against_uniform": MASKED}
    shares = ("chunks_of_all", "train_flops_of_all", "train_seconds_of_all", "seconds_of_all")
    for arm, row in results["summary"].items():
        cells = ["" if arm == other else in_words(row[name]) for name, other in differences.items()]
        rows.append([arm, *cells, *(f"{row[name]:.0%}" for name in shares)])
    return markdown_table(titles, rows)


def claims(results: dict[str, Any]) -> list[str]:
    """Returns the numbers of the findings of docs/action-chunks.md."""
    runs, summary = results["runs"].values(), results["summary"]
    by_all, by_uniform = (
        {arm: f"{abs(row[name]['value']):.3f}" for arm, row in summary.items()}
        for name in ("against_all", "against_uniform")
    )
    by_gradient = [100 * run["profile"]["variance_by_gradient"] for run in runs]
    by_advantage = [100 * run["variance_by_advantage"] for run in runs]
    gains = [np.subtract(run["rates"][REFERENCE], run["rates"]["base"]).mean() for run in runs]
    ranks = [f"{run['profile']['contrast_rank_correlation']:+.1f}" for run in runs]
    masked = [
        np.subtract(run["rates"][arm], run["rates"]["base"]).mean()
        for run in runs
        for arm in run["curves"]
        if arm != REFERENCE
    ]
    return [
        f"it ends {by_all['advantage']} below `all`",
        f"with {by_all['pcm_ht']} below",
        f"they end {by_uniform['pcm']} and {by_uniform['pcm_ht']} below `uniform`",
        f"the rank correlation of the two over its four or five phases is {listed(ranks)}",
        f"those of the masked arms {span(masked, '+.2f')}",
        f"keep {span(by_gradient)} % of the variance of uniform masking",
        f"choosing by them leaves {span(by_advantage)} %",
        f"The gain of one seed is {span(gains, '+.2f')} for the same arm `all`",
    ]


def advantage_claims(results: dict[str, Any]) -> list[str]:
    """Returns what the page of `steps_by_advantage` says of the arm `advantage`."""
    found = results["summary"]["advantage"]
    below, above = -found["against_all"]["value"], found["against_uniform"]["value"]
    return [f"ended {below:.3f} below all chunks and {above:.3f} above three chunks"]


def draw(runs: Runs) -> Figure:
    """Returns plots of the gain in success over seconds and over trained chunks."""
    with styled():
        figure = Figure(figsize=(11.0, 4.6), layout="constrained")
        panels = figure.subplots(1, len(COSTS), sharey=True)
        for index, arm in enumerate(_arms(runs)):
            curves = [run["curves"][arm] for run in runs.values()]
            color = colormaps["tab10"](index)
            for axes, (cost, (label, unit)) in zip(panels, COSTS.items()):
                points = gains_by_cost(curves, cost)
                draw_curve(axes, points, label=arm, index=index, unit=unit, color=color)
                axes.set_xlabel(label)
        panels[0].set_ylabel("success above the base, mean@4")
        panels[-1].legend(loc="lower right")
    return figure


def _arms(runs: Runs) -> list[str]:
    return list(next(iter(runs.values()))["curves"])


def _difference(runs: Runs, arm: str, other: str) -> dict[str, float | None]:
    """Returns the mean difference in success with a 95 % t interval over seeds."""
    means = [np.mean(np.subtract(run["rates"][arm], run["rates"][other])) for run in runs.values()]
    return mean_interval([float(each) for each in means])


def _rates(artifacts: Path, name: str) -> list[float]:
    """Returns the success rate by prompt, ordered by prompt."""
    table_of = read_table(artifacts / "evaluations" / f"{name}.parquet", EVALUATION)
    ordered = table_of.sort_values("prompt_id")
    rates: list[float] = (ordered["successes"] / ordered["rollouts"]).tolist()
    return rates


def _score(artifacts: Path, name: str) -> Point:
    scores = read_json(artifacts / "evaluations" / f"{name}.json")
    return {each: scores[each]["value"] for each in ("mean_at_k", "greedy")}


def _variance_by_advantage(artifacts: Path, name: str) -> float:
    """Returns mean(|advantage|)^2 / mean(advantage^2) over the rollouts of a round.

    This is the variance of masking by advantage relative to uniform masking
    (docs/methods/steps_by_advantage.md).
    """
    joined = read_rollouts(iterations_of(artifacts, name), empty_table(PROFILE))
    by_group = joined.groupby(GROUP)["reward"]
    deviation = by_group.transform("std", ddof=0)
    score = ((joined["reward"] - by_group.transform("mean")) / deviation)[deviation > 0]
    return evenness(score.abs().tolist()) or 0.0


def _keep(artifacts: Path, name: str) -> list[dict[str, Any]]:
    """Returns the training statistics of a round by phase, of all its iterations."""
    tables = [pd.read_csv(each.record / "phases.csv") for each in iterations_of(artifacts, name)]
    rows = combine_phases(tables).replace({np.nan: None}).to_dict("records")
    return [{str(name): value for name, value in row.items()} for row in rows]


def combine_phases(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Returns the phases.csv of a round from those of its iterations.

    Counts are summed, shares and contrasts averaged with the weights of the counts, and `keep` is
    that at the end of the round.
    """
    first, last = tables[0], tables[-1]
    if len(tables) == 1:
        return first
    weights = np.array([each["chunks"] for each in tables], dtype=np.float64)
    combined = {"phase": first["phase"]}
    for name in first.columns.drop("phase"):
        values = np.array([each[name] for each in tables], dtype=np.float64)
        known = np.where(np.isnan(values), 0.0, weights)
        with np.errstate(invalid="ignore"):
            mean = (np.nan_to_num(values) * known).sum(axis=0) / known.sum(axis=0)
        combined[name] = values.sum(axis=0).astype(int) if name in PHASE_COUNTS else mean
    return pd.DataFrame({**combined, "keep": last["keep"]})[list(first.columns)]


def _ratio(own: list[Point], reference: list[Point], name: str) -> float:
    return float(np.sum([each[name] for each in own]) / np.sum([each[name] for each in reference]))


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])


if __name__ == "__main__":
    main()
