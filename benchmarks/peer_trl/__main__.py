"""Runs both sides in turn, each repeat in two new processes, and writes the measurements.

python -m benchmarks.peer_trl PYTHON_OF_TRL 5    # writes benchmarks/results/peer_trl.json
"""

import statistics
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.intervals import span
from benchmarks.peer_trl.processes import Measured, measure, results
from benchmarks.peer_trl.tune import SIDES, read_fastest
from benchmarks.peer_trl.workload import SIZES, Scenario
from grpo.runtime.artifacts.files import read_json, write_json
from grpo.runtime.markdown import markdown_table

OUT = Path(__file__).parents[1] / "results" / "peer_trl.json"
PARTS = ("generation", "scoring", "update", "total")
# The same work at every size, then variations: longer prompts and uniform groups.
SCENARIOS: list[dict[str, Any]] = [
    *({"size": size} for size in SIZES),
    *({"size": size, "longest_prompt": 256} for size in SIZES),
    {"size": "3M", "uniform_fraction": 0.5},
]


def main(python: str, repeats: int) -> None:
    """Measures scenarios that the file lacks and prints the table of docs/speed.md."""
    plans = [plan(**chosen) for chosen in SCENARIOS]
    stored = [{side: asdict(each) for side, each in scenarios.items()} for scenarios in plans]
    known = read_json(OUT)["scenarios"] if OUT.exists() else []
    measured = [each for each in known if each["scenario"] in stored]
    for scenarios, as_stored in zip(plans, stored):
        if any(each["scenario"] == as_stored for each in measured):
            continue
        measured.append({"scenario": as_stored, **compare(scenarios, python, repeats)})
        measured.sort(key=lambda each: stored.index(each["scenario"]))
        command = f"benchmarks.peer_trl PYTHON_OF_TRL {repeats}"
        write_json(OUT, results(command, python, scenarios=measured))
    print(table(read_json(OUT)))


def plan(size: str, **others: Any) -> dict[str, Scenario]:
    """Returns the scenario of each side; `others` override the defaults of Scenario."""
    return {
        side: Scenario(size=size, settings=settings, **others)
        for side, settings in read_fastest(size).items()
    }


def compare(scenarios: dict[str, Scenario], python: str, repeats: int) -> dict[str, Any]:
    """Returns the runs of both sides and their ratios."""
    runs: dict[str, list[Measured]] = {side: [] for side in SIDES}
    for repeat in range(repeats):
        for side in SIDES if repeat % 2 == 0 else reversed(SIDES):
            runs[side].append(measure(side, scenarios[side], python))
            print(scenarios[side], runs[side][-1], flush=True)
    weights = {run["weights"] for side in SIDES for run in runs[side]}
    assert len(weights) == 1, weights
    counted = measure("theirs", replace(scenarios["theirs"], counts_flops=True), python)
    flops = {"ours": runs["ours"][0]["flops"], "theirs": counted["flops"]}
    return {**runs, "flops": flops, "ratio": ratios(runs, flops)}


def ratios(runs: dict[str, list[Measured]], flops: dict[str, float]) -> dict[str, Any]:
    """Returns ours / theirs: ratios of medians by part, and the range of the total's ratios."""
    medians = {part: _median(runs["ours"], part) / _median(runs["theirs"], part) for part in PARTS}
    pairs = [
        ours["total_cpu_seconds"] / theirs["total_cpu_seconds"]
        for ours, theirs in zip(runs["ours"], runs["theirs"])
    ]
    memory = {
        kind: max(each[kind] for each in runs["ours"]) / max(each[kind] for each in runs["theirs"])
        for kind in ("peak_bytes", "growth_bytes")
    }
    values = {**medians, **memory, "flops": flops["ours"] / flops["theirs"]}
    return {
        **{name: round(value, 3) for name, value in values.items()},
        "total_of_pairs": [round(min(pairs), 3), round(max(pairs), 3)],
    }


def table(content: dict[str, Any]) -> str:
    """Returns a Markdown table of medians of both sides and their ratio, by part."""
    rows = list[list[str]]()
    for each in content["scenarios"]:
        what, ratio = _describe(each["scenario"]["ours"]), each["ratio"]
        for part in PARTS:
            ours, theirs = (_median(each[side], part) for side in SIDES)
            low, high = ratio["total_of_pairs"]
            of_pairs = f" [{low:.2f}, {high:.2f}]" if part == "total" else ""
            seconds = [f"{each:.3f}" for each in (ours, theirs)]
            rows.append([what, f"{part}, CPU s", *seconds, f"{ratio[part]:.2f}{of_pairs}"])
        flops = [f"{each['flops'][side] / 1e9:.0f}" for side in SIDES]
        rows.append([what, "GFLOPs", *flops, f"{ratio['flops']:.2f}"])
        for kind, name in (("growth_bytes", "added memory"), ("peak_bytes", "peak memory")):
            most = [f"{max(run[kind] for run in each[side]) / 1e9:.2f}" for side in SIDES]
            rows.append([what, f"{name}, GB", *most, f"{ratio[kind]:.2f}"])
    return markdown_table(["what", "part", "ours", "TRL", "ratio"], rows)


def claims(content: dict[str, Any]) -> list[str]:
    """Returns what pages say of the ratios; README.md has the first."""
    found = {_describe(each["scenario"]["ours"]): each["ratio"] for each in content["scenarios"]}
    short, long = (
        [found[size + prompts] for size in SIZES] for prompts in ("", ", prompts up to 256")
    )
    totals = [span([ratio["total"] for ratio in ratios], ".2f") for ratios in (short, long)]
    highest = max(ratio["total_of_pairs"][1] for ratio in found.values())
    return [
        f"{totals[0]} of TRL's CPU time with prompts up to 64 tokens and {totals[1]} with prompts"
        " up to 256",
        f"The highest ratio of a pair is {highest:.2f}",
        f"FLOPs are {span([ratio['flops'] for ratio in short], '.2f')} of TRL's",
    ]


def _median(runs: list[Measured], part: str) -> float:
    return statistics.median(run[f"{part}_cpu_seconds"] for run in runs)


def _describe(scenario: dict[str, Any]) -> str:
    """Returns the name of a scenario."""
    words = [scenario["size"]]
    if scenario["longest_prompt"] != Scenario(size="", settings={}).longest_prompt:
        words.append(f"prompts up to {scenario['longest_prompt']}")
    if scenario["uniform_fraction"]:
        words.append(f"{scenario['uniform_fraction']:.0%} dead groups")
    return ", ".join(words)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
