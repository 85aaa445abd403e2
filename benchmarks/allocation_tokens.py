"""What each way of spending compute costs until it has learned what plain GRPO has learned.

python -m benchmarks.allocation_tokens 0 1 2 3 4   # runs what is missing, then writes the results
python -m benchmarks.allocation_tokens             # writes table and figure from the results

The arms are in allocation_tokens.yaml; task, base policy and evaluation are those of params.yaml.
A seed's runs lie under .work/ and are taken up again after an interruption; remove that folder when
the code has changed. Writes results/allocation_tokens.json and docs/allocation_tokens.svg.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from matplotlib.figure import Figure
from scipy import stats

from benchmarks.demo import RESULTS, ROOT, machine, revision_of
from benchmarks.workspaces import make_workspace, run_stages
from grpo.artifacts.files import read_json, write_json
from grpo.params import Parameters, read_params
from grpo.report.comparison import Curve, cost_to_reach
from grpo.report.reading import uses_profile

ARMS = Path(__file__).with_suffix(".yaml")
OUT = RESULTS / "allocation_tokens.json"
FIGURE = ROOT / "docs" / "allocation_tokens.svg"
WORK = ROOT / ".work" / "allocation_tokens"
REFERENCE = "uniform"
SCORES = ("mean_at_k", "greedy", "pass_at_k")
Point = dict[str, float]


def main() -> None:
    """Runs the seeds that are asked for and writes what all finished seeds say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.allocation_tokens")
    parser.add_argument("seeds", nargs="*", type=int, metavar="SEED")
    chosen = parser.parse_args()
    runs: dict[str, Any] = read_json(OUT)["runs"] if OUT.exists() else {}
    for seed in chosen.seeds:
        runs[str(seed)] = run_seed(seed)
        write_json(
            OUT,
            {
                "command": f"python -m benchmarks.allocation_tokens {' '.join(sorted(runs))}",
                "revision": revision_of("HEAD"),
                "machine": machine(),
                "arms": yaml.safe_load(ARMS.read_text()),
                "runs": runs,
                "summary": summarize(runs),
            },
        )
    results = read_json(OUT)
    draw(results["runs"]).savefig(FIGURE, metadata={"Date": None})
    print(table(results))


def run_seed(seed: int) -> dict[str, list[Point]]:
    """Returns, per arm, what every policy of its chain had cost and reached; the base first."""
    params = parameters(seed)
    workspace = WORK / str(seed)
    make_workspace(workspace, params)
    cpu_seconds = run_stages(workspace)
    typed = read_params(workspace / "params.yaml")
    return {arm: curve(workspace, typed, cpu_seconds, arm) for arm in typed.arms}


def parameters(seed: int) -> dict[str, Any]:
    """Returns params.yaml with this benchmark's arms, and a round for each of their passes."""
    params: dict[str, Any] = yaml.safe_load((ROOT / "params.yaml").read_text())
    params |= {"seed": seed, "arms": {}, "rounds": {}}
    for name, arm in yaml.safe_load(ARMS.read_text())["arms"].items():
        phases = arm.pop("phase_of_round")
        params["arms"][name] = arm
        for index, phase in enumerate(phases, start=1):
            start = f"{name}-{index - 1}" if index > 1 else "base"
            params["rounds"][f"{name}-{index}"] = {"arm": name, "start": start, "phase": phase}
    return params


def curve(
    workspace: Path, params: Parameters, cpu_seconds: dict[str, float], arm: str
) -> list[Point]:
    """Returns the points of one arm; a profile that it uses is paid before its first round."""
    artifacts = workspace / "artifacts"
    total = dict.fromkeys(("flops", "sampled_steps", "trained_steps", "cpu_seconds"), 0.0)

    def pay(stage: str, summary: Path) -> None:
        for name, value in read_json(artifacts / summary)["cost"].items():
            total[name] += value
        total["cpu_seconds"] += cpu_seconds[stage]

    if uses_profile(params, arm):
        pay("profile", Path("profile/summary.json"))
    points = [_point(artifacts, "base", total)]
    for name in params.rounds_of(arm):
        pay(f"rollout@{name}", Path(f"rollouts/{name}/summary.json"))
        pay(f"train@{name}", Path(f"training/{name}/summary.json"))
        total["cpu_seconds"] += cpu_seconds[f"score@{name}"]
        points.append(_point(artifacts, name, total))
    return points


def summarize(runs: dict[str, dict[str, list[Point]]]) -> dict[str, Any]:
    """Returns means over seeds with 95 % t intervals, arm by arm against the reference."""
    arms = list(next(iter(runs.values())))
    return {arm: _summary([run[arm] for run in runs.values()], _targets(runs)) for arm in arms}


def _targets(runs: dict[str, dict[str, list[Point]]]) -> list[list[Point]]:
    return [run[REFERENCE] for run in runs.values()]


def _summary(curves: list[list[Point]], references: list[list[Point]]) -> dict[str, Any]:
    last = [points[-1] for points in curves]
    ends = [points[-1] for points in references]
    shares = {
        cost: [_share(own, other, cost) for own, other in zip(curves, references)]
        for cost in ("flops", "cpu_seconds")
    }
    return {
        "gain": _interval([p[-1]["mean_at_k"] - p[0]["mean_at_k"] for p in curves]),
        "against_reference": _interval(
            [own["mean_at_k"] - other["mean_at_k"] for own, other in zip(last, ends)]
        ),
        "greedy_gain": _interval([p[-1]["greedy"] - p[0]["greedy"] for p in curves]),
        "pass_gain": _interval([p[-1]["pass_at_k"] - p[0]["pass_at_k"] for p in curves]),
        "flops_of_reference": _interval([a["flops"] / b["flops"] for a, b in zip(last, ends)]),
        "cpu_seconds_of_reference": _interval(
            [a["cpu_seconds"] / b["cpu_seconds"] for a, b in zip(last, ends)]
        ),
        "reached": sum(each is not None for each in shares["flops"]),
        "flops_to_reach": _interval_if_all(shares["flops"]),
        "cpu_seconds_to_reach": _interval_if_all(shares["cpu_seconds"]),
    }


def _share(own: list[Point], reference: list[Point], cost: str) -> float | None:
    """Returns the arm's cost at the reference's last reward, as a share of the reference's."""
    names = tuple(str(index) for index in range(len(own)))
    line = Curve(arm="", policies=names, costs=tuple(point[cost] for point in own))
    values = {name: point["mean_at_k"] for name, point in zip(names, own)}
    reached = cost_to_reach(line, values, reference[-1]["mean_at_k"])
    return None if reached is None else reached / reference[-1][cost]


def _interval(values: list[float]) -> dict[str, float | None]:
    """Returns mean and 95 % t interval over seeds; one seed has no interval."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return {"value": mean, "low": None, "high": None}
    half = float(stats.sem(values) * stats.t.ppf(0.975, len(values) - 1))
    return {"value": mean, "low": mean - half, "high": mean + half}


def _interval_if_all(values: list[float | None]) -> dict[str, float | None] | None:
    known = [value for value in values if value is not None]
    return _interval(known) if len(known) == len(values) else None


def _point(artifacts: Path, name: str, cost: dict[str, float]) -> Point:
    scores = read_json(artifacts / "evaluations" / f"{name}.json")
    return {**cost, **{score: scores[score]["value"] for score in SCORES}}


def draw(runs: dict[str, dict[str, list[Point]]]) -> Figure:
    """Returns reward against FLOPs and against processor seconds, mean over seeds."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for side, (cost, label, unit) in zip(
        axes, [("flops", "GFLOPs", 1e9), ("cpu_seconds", "processor seconds", 1.0)]
    ):
        for index, arm in enumerate(next(iter(runs.values()))):
            curves = np.array(
                [[[p[cost], p["mean_at_k"]] for p in run[arm]] for run in runs.values()]
            )
            gains = curves[:, :, 1] - curves[:, :1, 1]
            style = "-o" if index < 10 else "--s"
            x = curves[:, :, 0].mean(axis=0) / unit
            line = side.plot(x, gains.mean(axis=0), style, markersize=3, label=arm)[0]
            spread = gains.std(axis=0, ddof=1) / math.sqrt(len(gains)) if len(gains) > 1 else 0
            low, high = gains.mean(axis=0) - spread, gains.mean(axis=0) + spread
            side.fill_between(x, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
        side.set_xlabel(f"{label}, sampling + updates + profile")
        side.grid(alpha=0.3)
    axes[0].set_ylabel("mean@8 above the base policy")
    axes[1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def table(results: dict[str, Any]) -> str:
    """Returns the summary as the Markdown table of the page."""
    lines = [
        "| arm | gain in mean@8 | against uniform | greedy | pass@8 | FLOPs | processor seconds "
        "| seeds that reach uniform | FLOPs to reach it |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    seeds = len(results["runs"])
    for arm, row in results["summary"].items():
        gains = (row[name] for name in ("gain", "against_reference", "greedy_gain", "pass_gain"))
        costs = (row[name] for name in ("flops_of_reference", "cpu_seconds_of_reference"))
        reach = row["flops_to_reach"]
        cells = [
            arm,
            *(_words(each, "+.3f") for each in gains),
            *(_words(each, ".0%") for each in costs),
            f"{row['reached']} of {seeds}",
            _words(reach, ".0%") if reach else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _words(interval: dict[str, float | None], form: str) -> str:
    known = [format(value, form) for value in interval.values() if value is not None]
    return known[0] if len(known) == 1 else f"{known[0]} [{known[1]}, {known[2]}]"


if __name__ == "__main__":
    main()
