"""What denoising arms learn in three rounds, for which FLOPs and processor seconds.

python -m benchmarks.allocation_denoising 0 1 2    # runs what is missing, then writes the results
python -m benchmarks.allocation_denoising          # prints the table of the results

The arms are in allocation_denoising.yaml; task, base and evaluation are those of
recipes/glyphs.yaml. A seed's runs lie under .work/ and are taken up again after an interruption;
remove that folder when the code has changed. Writes results/allocation_denoising.json.
"""

import argparse
from typing import Any

import numpy as np
import pandas as pd
import yaml

from benchmarks.demo import RESULTS, ROOT, machine, revision_of
from benchmarks.workspaces import make_workspace, peak_bytes, run_stages
from grpo.artifacts.files import read_json, write_json

ARMS = ROOT / "benchmarks" / "allocation_denoising.yaml"
OUT = RESULTS / "allocation_denoising.json"
WORK = ROOT / ".work" / "allocation_denoising"
ROUNDS = 3
Point = dict[str, float]
Runs = dict[str, dict[str, list[Point]]]


def main() -> None:
    """Runs the seeds that are asked for and writes what all finished seeds say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.allocation_denoising")
    parser.add_argument("seeds", nargs="*", type=int, metavar="SEED")
    for seed in parser.parse_args().seeds:
        points = run_seed(seed)
        # Read as late as this: seeds may run beside each other.
        runs: Runs = read_json(OUT)["runs"] if OUT.exists() else {}
        runs[str(seed)] = points
        command = f"python -m benchmarks.allocation_denoising {' '.join(sorted(runs))}"
        about = {"command": command, "revision": revision_of("HEAD"), "machine": machine()}
        write_json(OUT, {**about, "arms": yaml.safe_load(ARMS.read_text()), "runs": runs})
    print(table(read_json(OUT)["runs"]))


def run_seed(seed: int) -> dict[str, list[Point]]:
    """Returns the curve of each arm: base first, then a point per round."""
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
            by_stage = {each: seconds[f"{each}@{name}"] for each in ("rollout", "score", "train")}
            spent += sum(by_stage.values())
            point = _point(artifacts, name, flops=flops, cpu_seconds=round(spent, 1))
            updates = pd.read_csv(artifacts / "training" / name / "updates.csv")
            points.append({**point, **_look(updates, by_stage["train"], peaks[f"train@{name}"])})
        curves[arm] = points
    return curves


def parameters(seed: int) -> dict[str, Any]:
    """Returns the recipe with the benchmark's arms and three rounds of each."""
    params = yaml.safe_load((ROOT / "recipes" / "glyphs.yaml").read_text())
    reference = params["arms"]["flow"]
    arms = {}
    for name, changes in yaml.safe_load(ARMS.read_text()).items():
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
    """Returns Markdown: the gain after each round, its mean and range over seeds, and the cost."""
    titles = ["arm", *(f"round {each}" for each in range(1, ROUNDS + 1))]
    titles += ["TFLOPs", "CPU s", "reward spread, first to last round"]
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for arm in next(iter(runs.values())):
        curves = [run[arm] for run in runs.values()]
        gains = np.array([[p["mean_at_k"] - c[0]["mean_at_k"] for p in c[1:]] for c in curves])
        cells = [f"{g.mean():+.3f} [{g.min():+.3f}, {g.max():+.3f}]" for g in gains.T]
        flops = np.mean([curve[-1]["flops"] for curve in curves]) / 1e12
        spent = np.mean([curve[-1]["cpu_seconds"] for curve in curves])
        spread = [np.mean([curve[at]["reward_spread"] for curve in curves]) for at in (1, -1)]
        cost = [f"{flops:.2f}", f"{spent:.0f}", f"{spread[0]:.2f} to {spread[1]:.2f}"]
        lines.append(f"| {' | '.join([arm, *cells, *cost])} |")
    return "\n".join(lines)


def _look(updates: pd.DataFrame, train_seconds: float, peak: int) -> Point:
    """Returns what the updates of a round were like: spread of rewards, seconds, memory."""
    between = updates["reward_share_between_variants"].mean()
    return {
        "reward_spread": float(updates["reward_std_within"].mean()),
        **({} if np.isnan(between) else {"share_between_variants": float(between)}),
        "clip_fraction": float(updates["clip_fraction"].mean()),
        "train_cpu_seconds_per_update": round(train_seconds / len(updates), 3),
        "train_peak_bytes": peak,
    }


def _point(artifacts: Any, name: str, **costs: float) -> Point:
    score = read_json(artifacts / "evaluations" / f"{name}.json")["mean_at_k"]
    low, high = score["low"], score["high"]
    return {**costs, "mean_at_k": score["value"], "low": low, "high": high}


if __name__ == "__main__":
    main()
