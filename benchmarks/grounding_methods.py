"""Compares Group Revision with GRPO on grounding, at equal FLOPs.

python -m benchmarks.grounding_methods 0 1 2 3 4   # runs missing stages, then writes the results
python -m benchmarks.grounding_methods             # writes table and figure from the results

The arms are in grounding_methods.yaml. The runs of a seed are under .work/ and resume after an
interruption; remove that folder after a change of code. Writes results/grounding_methods.json and
docs/grounding_methods.svg.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from benchmarks.allocation_tokens import draw_curve
from benchmarks.demo import ROOT
from benchmarks.figures import save_figure
from benchmarks.intervals import in_words, mean_interval
from benchmarks.seeds import record_seeds
from benchmarks.workspaces import commands_in_order, make_workspace, run_stages
from grpo.params.parameters import BASE, read_params
from grpo.params.recipes import read_content
from grpo.params.yaml import parse_yaml
from grpo.report.reading import read_run
from grpo.report.revisions import measure_revisions
from grpo.report.style import styled
from grpo.runtime.artifacts.files import read_json
from grpo.runtime.artifacts.tables import EVALUATION, read_table
from grpo.runtime.markdown import markdown_table

SPEC = Path(__file__).with_suffix(".yaml")
RECIPE = ROOT / "recipes" / "grounding.yaml"
FIGURE = ROOT / "docs" / "grounding_methods.svg"
WORK = ROOT / ".work" / "grounding_methods"
REFERENCE = "grpo"
SAMPLED, GREEDY = "score.boxes", "greedy_score.boxes"
# Parts of the evaluation's prompts, by the base's rollouts of them.
PARTS = ("all", "hard half", "never solved")
REVISED = ("first_error", "error", "better", "drift")  # of Revised
MEASURES = {
    **{f"IoU, {part}": (SAMPLED, part) for part in PARTS},
    **{f"greedy IoU, {part}": (GREEDY, part) for part in PARTS},
}
Point = dict[str, float]
Runs = dict[str, dict[str, list[Point]]]


def main() -> None:
    """Runs the given seeds and writes the results of all finished seeds."""
    results = record("grounding_methods", read_spec())
    save_figure(draw(results["runs"]), FIGURE)
    print(table(results), revisions_table(results), sep="\n\n")


def record(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Runs the given seeds of a benchmark and returns the results of all finished seeds."""
    return record_seeds(
        name,
        spec,
        lambda seed: run_seed(seed, spec, ROOT / ".work" / name),
        lambda runs: {"summary": summarize(runs)},
    )


def read_spec() -> dict[str, Any]:
    """Returns the arms, and what differs from the recipe."""
    spec: dict[str, Any] = parse_yaml(SPEC.read_text())
    spec.pop("shared")
    return spec


def run_seed(seed: int, spec: dict[str, Any], work: Path) -> dict[str, list[Point]]:
    """Returns, per arm, cumulative FLOPs and scores after each round, the base first."""
    params = parameters(seed, spec)
    workspace = work / str(seed)
    make_workspace(workspace, params)
    run_stages(workspace)
    artifacts = workspace / "artifacts"
    base = read_evaluation(artifacts, BASE)
    run = read_run(artifacts, read_params(workspace / "params.yaml"))
    revised = measure_revisions(run)
    curves = {}
    for arm in params["arms"]:
        flops, points = 0.0, [point(0.0, base, base)]
        for name in (each for each in params["rounds"] if params["rounds"][each]["arm"] == arm):
            for folder in ("rollouts", "training"):
                flops += read_json(artifacts / folder / name / "summary.json")["cost"]["flops"]
            found = point(flops, read_evaluation(artifacts, name), base)
            if name in revised:
                found |= {each: getattr(revised[name], each) for each in REVISED}
            points.append(found)
        curves[arm] = points
    return curves


def train_arms(seed: int, arms: Collection[str] = ()) -> Path:
    """Runs a seed's base and arms, without evaluations, and returns the workspace of `run_seed`."""
    params = parameters(seed, read_spec())
    workspace = WORK / str(seed)
    make_workspace(workspace, params)
    wanted = {*arms, *(name for name, each in params["rounds"].items() if each["arm"] in arms)}
    names = [name for name, _, _ in commands_in_order(workspace)]
    of_others = [name for name in names if "@" in name and name.partition("@")[2] not in wanted]
    run_stages(workspace, {*of_others, *(name for name in names if name.startswith("evaluate"))})
    return workspace


def parameters(seed: int, spec: dict[str, Any]) -> dict[str, Any]:
    """Returns the recipe with a benchmark's arms, rounds and a judge of distances."""
    params: dict[str, Any] = read_content(RECIPE)
    params |= {"seed": seed, "arms": spec["arms"], "rounds": {}}
    params["task"]["revised_pairs"] = spec["revised_pairs"]
    params["policy"]["base"]["warmup"]["updates"] = spec["warmup_updates"]
    params["reward"] |= spec.get("reward", {})
    (boxes,) = params["reward"]["judges"]
    params["reward"]["judges"].append({**boxes, "judge": "box_distance", "weight": 0.0})
    for arm in spec["arms"]:
        for index in range(1, spec["rounds"] + 1):
            start = f"{arm}-{index - 1}" if index > 1 else BASE
            params["rounds"][f"{arm}-{index}"] = {"arm": arm, "start": start, "phase": 1}
    return params


def read_evaluation(artifacts: Path, name: str) -> pd.DataFrame:
    """Returns the evaluation of a policy by prompt_id."""
    path = artifacts / "evaluations" / f"{name}.parquet"
    return read_table(path, EVALUATION).set_index("prompt_id")


def point(flops: float, found: pd.DataFrame, base: pd.DataFrame) -> Point:
    """Returns the mean scores of an evaluation on each of PARTS."""
    rows = {
        "all": pd.Series(True, index=base.index),
        "hard half": base[SAMPLED].rank(method="first") <= len(base) / 2,
        "never solved": (base["successes"] == 0) & (base["greedy"] == 0),
    }
    scores = {
        name: float(found.loc[base.index[rows[part]], score].mean())
        for name, (score, part) in MEASURES.items()
    }
    return {"flops": flops, **scores}


def summarize(runs: Runs) -> dict[str, Any]:
    """Returns gains at the FLOPs that all arms reach, and differences from the reference.

    Means over seeds, with 95 % t intervals.
    """
    gains = {seed: gains_at_equal_flops(run) for seed, run in runs.items()}
    summary: dict[str, Any] = {
        arm: {
            name: {
                "gain": mean_interval([each[arm][name] for each in gains.values()]),
                "against_reference": mean_interval(
                    [each[arm][name] - each[REFERENCE][name] for each in gains.values()]
                ),
            }
            for name in MEASURES
        }
        for arm in next(iter(runs.values()))
    }
    for arm, found in summary.items():
        curves = [run[arm] for run in runs.values()]
        if REVISED[0] in curves[0][1]:
            found["revisions"] = {
                name: [mean_interval(list(each)) for each in zip(*_by_round(curves, name))]
                for name in REVISED
            }
    return summary


def _by_round(curves: list[list[Point]], name: str) -> list[list[float]]:
    """Returns a number of revisions by seed and round."""
    return [[each[name] for each in points[1:]] for points in curves]


def gains_at_equal_flops(run: dict[str, list[Point]]) -> dict[str, Point]:
    """Returns each arm's gains over the base, interpolated at the smallest final FLOPs."""
    budget = min(points[-1]["flops"] for points in run.values())
    return {
        arm: {
            name: float(
                np.interp(
                    budget, [each["flops"] for each in points], [each[name] for each in points]
                )
            )
            - points[0][name]
            for name in MEASURES
        }
        for arm, points in run.items()
    }


def draw(runs: Runs) -> Figure:
    """Returns plots of the gain in IoU over FLOPs, sampled and greedy."""
    with styled():
        figure = Figure(figsize=(11.5, 7.5), layout="constrained")
        grid = figure.subplots(2, len(PARTS), sharex=True)
        for axes, name in zip(grid.flat, MEASURES):
            for index, arm in enumerate(_in_order(next(iter(runs.values())))):
                points = np.array(
                    [
                        [[each["flops"], each[name] - run[arm][0][name]] for each in run[arm]]
                        for run in runs.values()
                    ]
                )
                draw_curve(axes, points, label=arm, index=index, unit=1e12, color=f"C{index}")
            axes.set_title(name)
        for axes in grid[-1]:
            axes.set_xlabel("TFLOPs")
        for axes in grid[:, 0]:
            axes.set_ylabel("above the base")
        grid[0, -1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def table(results: dict[str, Any]) -> str:
    """Returns the summary as the Markdown table of docs/methods/group_revision.md."""
    rows = []
    for arm in _in_order(results["summary"]):
        found = results["summary"][arm]
        cells = [in_words(found[name]["gain"], "+.3f") for name in MEASURES]
        rows.append([arm, *cells])
        if arm != REFERENCE:
            differences = [in_words(found[name]["against_reference"], "+.3f") for name in MEASURES]
            rows.append([f"{arm} - {REFERENCE}", *differences])
    return markdown_table(["arm", *MEASURES], rows)


def _in_order(arms: Collection[str]) -> list[str]:
    """Returns arms in the order of the file of arms."""
    return [name for name in read_spec()["arms"] if name in arms]


def revisions_table(results: dict[str, Any]) -> str:
    """Returns what revisions improved, by arm and round, as a Markdown table."""
    rows = []
    for arm in _in_order(results["summary"]):
        found = results["summary"][arm]
        if "revisions" in found:
            by_round = zip(*(found["revisions"][name] for name in REVISED))
            for index, cells in enumerate(by_round, start=1):
                rows.append([arm, str(index), *(in_words(each, ".3f") for each in cells)])
    titles = ["error of first answers", "of revisions", "better than the first"]
    return markdown_table(["arm", "round", *titles, "sum of a group's advantages"], rows)


def claims(results: dict[str, Any]) -> list[str]:
    """Returns what the page says of the hard half after as many rounds, that is, as many groups."""
    runs = results["runs"].values()

    def difference(arm: str, other: str = REFERENCE, rounds: int = 2, part: str = PARTS[1]) -> str:
        name = f"IoU, {part}"
        found = [run[arm][2][name] - run[other][rounds][name] for run in runs]
        return in_words(mean_interval(found), "+.3f")

    arms = [arm for arm in _in_order(results["summary"]) if arm != REFERENCE]
    return [
        *(f"{difference(arm)} for `{arm}`" for arm in arms),
        f"on all prompts it is {difference('mixed', part=PARTS[0])}",
        f"not above it ({difference('revision', rounds=1)})",
        f"`mixed` is above `repaired` by {difference('mixed', 'repaired')}",
        f"`published` and `repaired` differ by {difference('published', 'repaired')}",
    ]


if __name__ == "__main__":
    main()
