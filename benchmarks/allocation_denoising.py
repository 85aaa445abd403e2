"""Compares reward, FLOPs and CPU seconds of denoising arms over three rounds.

python -m benchmarks.allocation_denoising 0 1 2    # runs missing stages, then writes the results
python -m benchmarks.allocation_denoising          # table and figure from the results

The arms are in allocation_denoising.yaml; task, base and evaluation are those of
recipes/glyphs.yaml. The runs of a seed are under .work/ and resume after an interruption; remove
that folder after a change of code. Writes results/allocation_denoising.json,
docs/allocation_denoising.svg and, for seed 0, docs/allocation_denoising.png.
"""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from PIL import Image

from benchmarks.allocation_tokens import COSTS, draw_curve, gains_by_cost, share_to_reach
from benchmarks.demo import ROOT
from benchmarks.figures import save_figure
from benchmarks.seeds import record_seeds
from benchmarks.workspaces import make_workspace, peak_bytes, round_seconds, run_stages
from grpo.params.recipes import read_content
from grpo.params.yaml import parse_yaml
from grpo.report.style import MARKERS, styled
from grpo.runtime.artifacts.files import read_json
from grpo.runtime.artifacts.stored_iterations import IterationFiles, iterations_of
from grpo.runtime.artifacts.tables import EVALUATION_SAMPLES, read_table
from grpo.runtime.artifacts.tensors import read_tensors
from grpo.runtime.markdown import markdown_table

ARMS = ROOT / "benchmarks" / "allocation_denoising.yaml"
WORK = ROOT / ".work" / "allocation_denoising"
FIGURE = ROOT / "docs" / "allocation_denoising.svg"
SHEET = ROOT / "docs" / "allocation_denoising.png"
ROUNDS = 3
REFERENCE = "flow"
Point = dict[str, float]
Runs = dict[str, dict[str, list[Point]]]


def main() -> None:
    """Runs the given seeds and shows the results of all finished seeds."""
    arms = parse_yaml(ARMS.read_text())
    found = record_seeds("allocation_denoising", arms, run_seed, lambda runs: {})["runs"]
    save_figure(draw(found), FIGURE)
    print(table(found))


def run_seed(seed: int) -> dict[str, list[Point]]:
    """Returns the curve of each arm: a point for the base, then one per round."""
    workspace = WORK / str(seed)
    params = parameters(seed)
    make_workspace(workspace, params)
    seconds = run_stages(workspace)
    peaks = peak_bytes(workspace)
    artifacts = workspace / "artifacts"
    curves: dict[str, list[Point]] = {}
    for arm in params["arms"]:
        flops = spent = 0.0
        points = [_point(artifacts, "base", flops=0.0, cpu_seconds=0.0)]
        for number in range(1, ROUNDS + 1):
            name = f"{arm}-{number}"
            for folder in ("rollouts", "training"):
                flops += read_json(artifacts / folder / name / "summary.json")["cost"]["flops"]
            of_round = round_seconds(workspace, seconds, name)
            spent += of_round.total
            point = _point(artifacts, name, flops=flops, cpu_seconds=round(spent, 1))
            updates = pd.read_csv(artifacts / "training" / name / "updates.csv")
            point |= _look(updates, of_round.training, peaks[f"train@{name}"])
            points.append({**point, **_window(iterations_of(artifacts, name))})
        curves[arm] = points
    if seed == 0:
        draw_sheet(workspace, list(curves)).savefig(SHEET, dpi=60, metadata={"Software": None})
    return curves


def parameters(seed: int) -> dict[str, Any]:
    """Returns the recipe with the benchmark's arms and three rounds per arm."""
    params = read_content(ROOT / "recipes" / "glyphs.yaml")
    reference = params["arms"]["flow"]
    arms = {}
    for name, changes in parse_yaml(ARMS.read_text()).items():
        merged = {
            key: {**reference[key], **changes.get(key, {})} for key in ("sampling", "training")
        }
        objective = changes.get("objective", reference["objective"])
        arms[name] = {**reference, **merged, "objective": objective}
    rounds = {
        f"{arm}-{number}": {
            "arm": arm,
            "start": "base" if number == 1 else f"{arm}-{number - 1}",
            "phase": 2 - number % 2,
        }
        for arm in arms
        for number in range(1, ROUNDS + 1)
    }
    return {**params, "seed": seed, "arms": arms, "rounds": rounds}


def table(runs: Runs) -> str:
    """Returns a Markdown table of each arm's gain and costs: means over seeds with their range.

    Costs to reach flow are fractions of the reference's final cost at which an arm's mean curve
    reaches the reference's final mean gain, with a 95 % bootstrap interval over seeds.
    """
    titles = ["arm", "gain", "TFLOPs", "CPU s", "FLOPs to reach flow", "CPU s to reach flow"]
    titles += ["s per update", "peak MB", "reward spread, first to last round"]
    rows = list[list[str]]()
    references = [run[REFERENCE] for run in runs.values()]
    for arm in next(iter(runs.values())):
        curves = [run[arm] for run in runs.values()]
        last = [each[-1] for each in curves]
        gains = [own["mean_at_k"] - each[0]["mean_at_k"] for own, each in zip(last, curves)]
        spread = [np.mean([each[at]["reward_spread"] for each in curves]) for at in (1, -1)]
        cells = [
            arm,
            f"{np.mean(gains):+.3f} [{min(gains):+.3f}, {max(gains):+.3f}]",
            f"{_mean(last, 'flops') / 1e12:.2f}",
            f"{_mean(last, 'cpu_seconds'):.0f}",
            *(_format_share(share_to_reach(curves, references, cost)) for cost in COSTS),
            f"{_mean(last, 'train_cpu_seconds_per_update'):.2f}",
            f"{_mean(last, 'train_peak_bytes') / 2**20:.0f}",
            f"{spread[0]:.3f} to {spread[1]:.3f}",
        ]
        rows.append(cells)
    return markdown_table(titles, rows)


def claims(runs: Runs) -> list[str]:
    """Returns the numbers of the findings of docs/denoising.md."""
    first = [point["first_step"] for run in runs.values() for point in run["adascope"][1:]]
    hosted = [run[arm] for run in runs.values() for arm in ("e2po", "awm_e2po")]
    between = [point["share_between_variants"] for curve in hosted for point in curve[1:]]
    return [
        f"at step {np.mean(first):.1f} of 0 to 8",
        f"{100 * np.mean(between):.0f} % of the variance within groups is between the variants",
    ]


def draw(runs: Runs) -> Figure:
    """Returns plots of the gain over FLOPs and CPU seconds, and of reward spread by round."""
    with styled():
        figure = Figure(figsize=(15.0, 5.2), layout="constrained")
        panels = figure.subplots(1, len(COSTS) + 1)
        for index, arm in enumerate(next(iter(runs.values()))):
            curves, color = [run[arm] for run in runs.values()], colormaps["tab20"](index)
            for axes, (cost, (label, unit)) in zip(panels, COSTS.items()):
                points = gains_by_cost(curves, cost)
                draw_curve(axes, points, label=arm, index=index, unit=unit, color=color)
                axes.set_xlabel(label)
            spreads = [[each["reward_spread"] for each in curve[1:]] for curve in curves]
            style = {"marker": MARKERS[index % len(MARKERS)], "color": color}
            panels[-1].plot(range(1, ROUNDS + 1), np.mean(spreads, axis=0), label=arm, **style)
        panels[0].set_ylabel("mean@4 above the base")
        panels[-1].set_xlabel("round")
        panels[-1].set_ylabel("deviation of rewards within groups")
        panels[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def draw_sheet(workspace: Path, arms: Sequence[str]) -> Figure:
    """Returns images of the base and the last policies for the same prompts and initial noise."""
    names = ["base", *(f"{arm}-{ROUNDS}" for arm in arms)]
    folder = workspace / "artifacts" / "evaluations"
    tables = [read_table(folder / f"{name}.samples.parquet", EVALUATION_SAMPLES) for name in names]
    first = tables[0].groupby("prompt_id").head(1)["rollout_id"].tolist()
    figure = Figure(figsize=(1.1 * len(names) + 1, 0.75 * len(first)), layout="constrained")
    grid = figure.subplots(len(first), len(names), squeeze=False)
    for column, (name, table_of) in enumerate(zip(names, tables)):
        rows = table_of.set_index("rollout_id")
        for axes, rollout in zip(grid[:, column], first, strict=True):
            axes.imshow(Image.open(BytesIO(rows.loc[rollout, "image"])), cmap="gray")
            axes.set(xticks=[], yticks=[])
            if column == 0:
                axes.set_ylabel(rows.loc[rollout, "prompt"], rotation=0, ha="right", va="center")
        grid[0, column].set_title(name.removesuffix(f"-{ROUNDS}"), fontsize=8)
    return figure


def _mean(points: list[Point], name: str) -> float:
    return float(np.mean([each[name] for each in points]))


def _format_share(share: dict[str, float | None]) -> str:
    value, low, high = ("-" if each is None else f"{each:.0%}" for each in share.values())
    return value if value == "-" else f"{value} [{low}, {high}]"


def _look(updates: pd.DataFrame, train_seconds: float, peak: int) -> Point:
    """Returns reward spread, seconds and memory of the updates of a round."""
    between = updates["reward_share_between_variants"].mean()
    return {
        "reward_spread": float(updates["reward_std_within"].mean()),
        **({} if np.isnan(between) else {"share_between_variants": float(between)}),
        "clip_fraction": float(updates["clip_fraction"].mean()),
        "train_cpu_seconds_per_update": round(train_seconds / len(updates), 3),
        "train_peak_bytes": peak,
    }


def _window(iterations: Sequence[IterationFiles]) -> Point:
    """Returns the mean first and the mean last trained step of a round's rollouts.

    Iterations whose tensors are not stored are left out.
    """
    stored = [read_tensors(each.tensors) for each in iterations if each.tensors.exists()]
    steps = torch.cat([each["steps"] for each in stored])
    ends = steps.cumsum(0)
    index = torch.cat([each["step_index"] for each in stored]).float()
    return {
        "first_step": float(index[ends - steps].mean()),
        "last_step": float(index[ends - 1].mean()),
    }


def _point(artifacts: Any, name: str, **costs: float) -> Point:
    score = read_json(artifacts / "evaluations" / f"{name}.json")["mean_at_k"]
    low, high = score["low"], score["high"]
    return {**costs, "mean_at_k": score["value"], "low": low, "high": high}


if __name__ == "__main__":
    main()
