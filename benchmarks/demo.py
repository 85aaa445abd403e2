"""Runs the default pipeline from scratch on several seeds and records scores, cost and seconds.

python -m benchmarks.demo 0 1 2        # writes benchmarks/results/demo.json
python -m benchmarks.demo 0 --recipe recipes/reasoning-smollm2.yaml    # reasoning-smollm2.json

Writes the results after every seed. A call that was interrupted goes on where it stopped; the seed
it stopped in has no pipeline_seconds.
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.intervals import in_words, mean_interval, span
from grpo.params.parameters import BASE, read_params
from grpo.params.recipes import resolved_text
from grpo.report.words import listed
from grpo.runtime.artifacts.files import digest, read_json, write_json
from grpo.runtime.artifacts.tables import GREEDY_SCORE, SCORE
from grpo.runtime.markdown import markdown_table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
WORK = ROOT / ".work" / "demo"
DEFAULT = Path("params.yaml")
MOST_POINTS = 10.0  # by which the share of the seconds may exceed that of the FLOPs, in percent
SERVERS = ("PREFECT_API_URL", "MLFLOW_TRACKING_URI")


def main() -> None:
    """Runs each seed in a clone of the committed revision."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__)
    parser.add_argument("seeds", nargs="+", type=int, metavar="SEED")
    parser.add_argument("--recipe", default=str(DEFAULT), help="a file of the repository")
    chosen = parser.parse_args()
    recipe = Path(chosen.recipe)
    out = RESULTS / f"{'demo' if recipe == DEFAULT else recipe.stem}.json"
    revision = revision_of("HEAD")
    for seed in chosen.seeds:
        workspace = WORK / f"{out.stem}-{revision[:10]}-{seed}"
        record_run(out, recipe, revision, seed, run_seed(seed, recipe, revision, workspace))
        shutil.rmtree(workspace)
    results = read_json(out)
    print(
        *(each(results) for each in (table, reference_table, judges_table, times_table)), sep="\n\n"
    )


def record_run(out: Path, recipe: Path, revision: str, seed: int, run: dict[str, Any]) -> None:
    """Adds a seed's run to the results, from which it removes runs of other revisions."""
    stored: dict[str, Any] = read_json(out) if out.exists() else {}
    runs = stored["runs"] if stored.get("revision") == revision else {}
    runs |= {str(seed): run}
    seeds = " ".join(sorted(runs, key=int))
    command = f"python -m benchmarks.demo {seeds} --recipe {recipe.as_posix()}"
    about = {"revision": revision, "command": command, "machine": machine()}
    write_json(out, {**about, "runs": runs})


def run_seed(seed: int, recipe: Path, revision: str, workspace: Path) -> dict[str, Any]:
    """Returns the report's numbers and the seconds of one run.

    Args:
      workspace: A clone that an interrupted call left, or a folder to be made.
    """
    is_resumed = workspace.exists()
    if not is_resumed:
        workspace.parent.mkdir(parents=True, exist_ok=True)
        with fresh_clone(revision, workspace.parent) as clone:
            params = resolved_text(clone / recipe).replace("seed: 0\n", f"seed: {seed}\n", 1)
            (clone / "params.yaml").write_text(params)
            clone.rename(workspace)
    seconds = time_module(workspace, "flows.reproduce")
    usage = read_usage(workspace)
    summary = json.loads(output_of(workspace, "grpo", "summary", "--json"))
    return {
        "metrics": read_json(workspace / "artifacts" / "report" / "metrics.json"),
        "seconds_of_arms": {name: arm["seconds"] for name, arm in summary["arms"].items()},
        "seconds_to_reference": {
            name: arm["seconds_to_reference"] for name, arm in summary["arms"].items()
        },
        "pipeline_seconds": None if is_resumed else round(seconds, 1),
        "stage_cpu_seconds": round(sum(each["cpu_seconds"] for each in usage), 1),
        "peak_bytes": max(each["peak_bytes"] for each in usage),
        "dvc_lock_sha256": digest([], (workspace / "dvc.lock").read_text()),
        "families": family_scores(workspace),
        **_advised(workspace, recipe),
    }


def family_scores(workspace: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Returns mean scores by policy and family: of the base, and of every arm's last round."""
    last = {each.arm: name for name, each in read_params(workspace / "params.yaml").rounds.items()}
    folder = workspace / "artifacts" / "evaluations"
    found = {
        each: read_json(folder / f"{name}.json") for each, name in [(BASE, BASE), *last.items()]
    }
    return {policy: summary["by_family"] for policy, summary in found.items()}


def _advised(workspace: Path, recipe: Path) -> dict[str, Any]:
    """Returns the errors of the advice about the default run; other recipes are not advised on."""
    if recipe != DEFAULT:
        return {}
    return {"errors_of_advice": advice_errors(output_of(workspace, "grpo", "advise"))}


def advice_errors(advice: str) -> dict[str, dict[str, int]]:
    """Returns the errors of the FLOPs and seconds that `grpo advise` predicted, in percent by arm.

    Args:
      advice: What `grpo advise` prints once rounds have run; without seconds, there are none.
    """
    _, _, happened = advice.partition("\nWHAT HAPPENED ")
    errors: dict[str, dict[str, int]] = {}
    for table, name, column in zip(happened.split("\nSECONDS "), ("flops", "seconds"), (3, 2)):
        for arm, cells in re.findall(r"^ *all of (\S+) (.*)$", table, re.MULTILINE):
            found = re.findall(r"([+-]\d+) %", cells)
            errors.setdefault(arm, {})[name] = int(found[column])
    return errors


@contextmanager
def fresh_clone(revision: str, inside: Path | None = None) -> Iterator[Path]:
    """Yields a fresh clone of a commit, which is deleted after the block unless it was moved.

    Args:
      inside: An existing folder; the system's temporary folder if None.
    """
    with tempfile.TemporaryDirectory(dir=inside) as folder:
        workspace = Path(folder) / "workspace"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(workspace)], check=True)
        subprocess.run(["git", "checkout", "--quiet", revision], cwd=workspace, check=True)
        yield workspace


def time_module(workspace: Path, *module: str, **environment: str) -> float:
    """Returns the seconds of `python -m MODULE ARGUMENT...` with the code of the workspace.

    PATH starts with this Python, so that stages use it. Server addresses come only from
    `environment`.
    """
    start = time.perf_counter()
    output_of(workspace, *module, **environment)
    return time.perf_counter() - start


def output_of(workspace: Path, *module: str, **environment: str) -> str:
    """Returns what `python -m MODULE ARGUMENT...` prints on stdout; see `time_module`."""
    own = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "PYTHONPATH": str(workspace),
    }
    kept = {name: value for name, value in os.environ.items() if name not in SERVERS}
    done = subprocess.run(
        [sys.executable, "-m", *module],
        cwd=workspace,
        env={**kept, **own, **environment},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return done.stdout


def read_usage(workspace: Path) -> list[dict[str, Any]]:
    """Returns the measured usage of every stage that ran."""
    return [read_json(path) for path in sorted((workspace / ".runs").glob("*.json"))]


def table(results: dict[str, Any]) -> str:
    """Returns the results as the Markdown table of docs/results.md."""
    rows: list[dict[str, str]] = []
    for seed, run in results["runs"].items():
        metrics = run["metrics"]
        k = metrics["k"]
        for name, row in {"base": metrics["base"], **metrics["arms"]}.items():
            shown = {
                f"mean@{k}": row["mean_at_k"],
                "gain over base": row.get("gain_over_base"),
                "greedy": row.get("greedy"),
                "greedy gain over base": _other_gains(row).get("greedy"),
                f"pass@{k}": row["pass_at_k"],
            }
            cells = {title: _interval(each) if each else "" for title, each in shown.items()}
            flops = f"{row['cost']['flops'] / 1e9:.0f}" if name != "base" else ""
            rows.append({"seed": seed, "policy": name, **cells, "GFLOPs": flops})
    titles = [title for title in rows[0] if any(row[title] for row in rows)]
    return markdown_table(titles, [[row[title] for title in titles] for row in rows])


def advice_table(results: dict[str, Any]) -> str:
    """Returns the errors of the advice about the default run, by seed."""
    rows = [
        [seed, arm, *(f"{errors[name]:+d} %" for name in ("flops", "seconds"))]
        for seed, run in results["runs"].items()
        for arm, errors in run["errors_of_advice"].items()
    ]
    return markdown_table(["seed", "arm", "error of FLOPs", "error of seconds"], rows)


def reference_table(results: dict[str, Any]) -> str:
    """Returns each arm relative to the reference arm, by seed; then means over the seeds."""
    rows: list[list[str]] = []
    differences: dict[str, list[float]] = {}
    for seed, run in results["runs"].items():
        for name, found in run["metrics"]["comparisons"].items():
            costs = costs_of_reference(run, name).values()
            cells = ["never" if each is None else f"{each:.0%}" for each in costs]
            rows.append([seed, name, in_words(found["difference"]), *cells])
            differences.setdefault(name, []).append(found["difference"]["value"])
    rows += [
        ["mean", name, in_words(mean_interval(found)), *[""] * 5]
        for name, found in differences.items()
    ]
    k = next(iter(results["runs"].values()))["metrics"]["k"]
    titles = ["FLOPs", "sampled steps", "seconds", "FLOPs to reach it", "seconds to reach it"]
    shares = [f"{title} / reference" for title in titles]
    return markdown_table(["seed", "arm", f"mean@{k} minus reference", *shares], rows)


def costs_of_reference(run: dict[str, Any], arm: str) -> dict[str, float | None]:
    """Returns an arm's costs as shares of the reference's whole costs.

    Those to reach the final reward of the reference are None if it is never reached.
    """
    found = run["metrics"]["comparisons"][arm]
    reached = run["seconds_to_reference"][arm]
    own, other = (run["metrics"]["arms"][name]["cost"] for name in (arm, found["reference"]))
    spent, whole = (run["seconds_of_arms"][name]["total"] for name in (arm, found["reference"]))
    return {
        "flops": own["flops"] / other["flops"],
        "sampled_steps": own["sampled_steps"] / other["sampled_steps"],
        "seconds": spent / whole,
        "flops_to_reach": found["flops"] / other["flops"] if found["reached"] else None,
        "seconds_to_reach": reached and reached / whole,
    }


def claims(results: dict[str, Any]) -> list[str]:
    """Returns what README and pages say of `composed` and of the pipeline's seconds."""
    runs = results["runs"].values()
    shares = percent_of_reference(results, "composed")
    reached = shares["seconds_to_reach"]
    known, never = reached.dropna(), reached.index[reached.isna()]
    found = []
    if len(known):
        percent = listed([f"{each:.0f}" for each in known])
        found.append(f"on {_seeds(known.index)} after {percent} % of the seconds of `plain`")
    if len(never):
        found.append(f"on {_seeds(never)} never")
    flops, seconds = (span(shares[name].tolist()) for name in ("flops", "seconds"))
    above = [run["metrics"]["comparisons"]["composed"]["difference"]["value"] for run in runs]
    return [
        f"{flops} % of the FLOPs of `plain` and {seconds} % of its seconds",
        ", ".join(found),
        f"by {min(above):+.3f} to {max(above):+.3f} in mean@8",
        f"{span([run['pipeline_seconds'] for run in runs], '.1f')} seconds",
    ]


def gap_claims(results: dict[str, Any]) -> list[str]:
    """Returns by how much each arm's share of the seconds exceeds its share of the FLOPs."""
    found = []
    for arm in ("composed", "sgpo"):
        shares = percent_of_reference(results, arm)
        points = shares["seconds"] - shares["flops"]
        found.append(f"{span(points.tolist(), '.1f')} points above its share of the FLOPs")
        found += [
            f"`{arm}` misses it on seed {seed}, by {each - MOST_POINTS:.1f} points"
            for seed, each in points.items()
            if each > MOST_POINTS
        ]
    return found


def advice_claims(results: dict[str, Any]) -> list[str]:
    """Returns the largest error of predicted seconds."""
    found = [
        (errors["seconds"], arm, seed)
        for seed, run in results["runs"].items()
        for arm, errors in run["errors_of_advice"].items()
    ]
    error, arm, seed = max(found, key=lambda each: abs(each[0]))
    return [f"The largest error is {error:+d} %, for `{arm}` on seed {seed}"]


def pretrained_claims(results: dict[str, Any]) -> list[str]:
    """Returns what pages say of the pretrained model: costs of `composed`, and its base."""
    shares = percent_of_reference(results, "composed")
    flops, seconds = (span(shares[name].tolist()) for name in ("flops", "seconds"))
    base = [100 * run["metrics"]["base"]["mean_at_k"]["value"] for run in results["runs"].values()]
    return [
        f"{seconds} % of the seconds of `plain` and {flops} % of its FLOPs",
        f"The base solves {span(base)} % of the rollouts",
    ]


def share_claims(results: dict[str, Any]) -> list[str]:
    """Returns what the page of results says of tokens, of seconds by part and of greedy rewards."""
    composed, sgpo = (
        span(percent_of_reference(results, arm)["sampled_steps"].tolist())
        for arm in ("composed", "sgpo")
    )
    of_plain, sampling, update, above, below, greedy = [], [], [], [], [], []
    for run in results["runs"].values():
        own, plain = (run["seconds_of_arms"][arm] for arm in ("composed", "plain"))
        of_plain.append(100 * plain["sampling"] / plain["total"])
        sampling.append(100 * own["sampling"] / plain["sampling"])
        update.append(100 * own["update"] / plain["update"])
        arms = run["metrics"]["arms"]
        greedy.append(arms["composed"]["greedy"]["value"] - arms["plain"]["greedy"]["value"])
        compared = run["metrics"]["comparisons"]
        above.append(compared["composed"]["difference"]["value"])
        below.append(-compared["sgpo"]["difference"]["value"])
    mean = mean_interval(above)
    lower = "all three" if min(below) > 0 else f"{sum(each > 0 for each in below)} of {len(below)}"
    return [
        f"Sampling takes {span(of_plain)} % of the seconds of `plain`",
        f"samples {composed} % of the tokens in {span(sampling)} % of the sampling",
        f"computes its updates in {span(update)} % of the update seconds",
        f"samples {sgpo} % as many tokens as `plain`",
        f"The interval over seeds is [{mean['low']:+.3f}, {mean['high']:+.3f}]",
        f"`sgpo` ends below `plain` on {lower} seeds, by {span(below, '.3f')}",
        f"above those of `plain`, too, by {span(greedy, '.3f')}",
    ]


def percent_of_reference(results: dict[str, Any], arm: str) -> pd.DataFrame:
    """Returns an arm's costs in percent of the reference's, a row per seed."""
    costs = {seed: costs_of_reference(run, arm) for seed, run in results["runs"].items()}
    return pd.DataFrame.from_dict(costs, orient="index", dtype=float) * 100


def _seeds(numbers: pd.Index) -> str:
    return f"seed{'s' * (len(numbers) > 1)} {listed([*numbers])}"


def judges_table(results: dict[str, Any]) -> str:
    """Returns each judge's mean score of the base and of every arm, and the paired gain."""
    titles = ["seed", "arm", "score", "base", "after", "gain over base"]
    rows = [
        [seed, name, score, *map(_interval, (run["metrics"]["base"][score], arm[score], gain))]
        for seed, run in results["runs"].items()
        for name, arm in run["metrics"]["arms"].items()
        for score, gain in _other_gains(arm).items()
        if score.startswith((SCORE, GREEDY_SCORE))
    ]
    return markdown_table(titles, rows)


def families_table(results: dict[str, Any], measures: dict[str, str]) -> str:
    """Returns the base's mean scores by family and each arm's gains, over the seeds.

    Args:
      measures: Names of scores by their title.
    """
    runs = [run["families"] for run in results["runs"].values()]
    arms = [name for name in runs[0] if name != BASE]
    rows = []
    for family in runs[0][BASE]:
        cells = [family]
        for measure in measures.values():
            base = [run[BASE][family][measure] for run in runs]
            cells.append(f"{fmean(base):.3f}")
            for arm in arms:
                gains = [run[arm][family][measure] for run in runs] - np.array(base)
                cells.append(in_words(mean_interval(gains.tolist())))
        rows.append(cells)
    policies = (BASE, *(f"{arm} - {BASE}" for arm in arms))
    titles = [f"{title}: {policy}" for title in measures for policy in policies]
    return markdown_table(["family", *titles], rows)


def _other_gains(row: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Returns the gains besides that of mean@k; results of earlier revisions have none."""
    gains: dict[str, dict[str, float]] = row.get("other_gains_over_base", {})
    return gains


def times_table(results: dict[str, Any]) -> str:
    """Returns each arm's seconds by part, and FLOPs and seconds relative to the reference arm."""
    parts = ("start_up", "sampling", "judging", "update", "weights", "other", "total")
    rows: list[list[str]] = []
    for seed, run in results["runs"].items():
        costs = {name: arm["cost"]["flops"] for name, arm in run["metrics"]["arms"].items()}
        reference = next(iter(costs))  # of one arm, itself
        for each in run["metrics"]["comparisons"].values():
            reference = each["reference"]
        whole = run["seconds_of_arms"][reference]["total"]
        for name, spent in run["seconds_of_arms"].items():
            cells = [f"{spent[part]:.1f}" for part in parts]
            shares = [
                spent["start_up"] / spent["total"],
                costs[name] / costs[reference],
                spent["total"] / whole,
            ]
            rows.append([seed, name, *cells, *(f"{share:.0%}" for share in shares)])
    named = [part.replace("_", " ") for part in parts]
    titles = ["seed", "arm", *named, "start-up share", "FLOPs / reference", "seconds / reference"]
    return markdown_table(titles, rows)


def _interval(score: dict[str, float]) -> str:
    return f"{score['value']:.3f} [{score['low']:.3f}, {score['high']:.3f}]"


def revision_of(name: str) -> str:
    """Returns the commit hash of a git revision name."""
    command = ["git", "-C", str(ROOT), "rev-parse", name]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def machine() -> dict[str, Any]:
    """Returns the properties of this machine that affect measured seconds."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_at_end": round(os.getloadavg()[2], 2),
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.partition(": ")[2] for line in lines if line.startswith("model name"))


if __name__ == "__main__":
    main()
