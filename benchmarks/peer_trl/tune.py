"""Finds the fastest settings of each side, which `benchmarks.peer_trl` uses.

python -m benchmarks.peer_trl.tune PYTHON_OF_TRL   # writes benchmarks/results/peer_trl_tuning.json
"""

import json
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.peer_trl.processes import measure, results
from benchmarks.peer_trl.workload import SIZES, Scenario
from grpo.runtime.artifacts.files import read_json, write_json
from grpo.runtime.markdown import markdown_table

TUNING = Path(__file__).parents[1] / "results" / "peer_trl_tuning.json"
ROWS = (8, 16, 32, 64)  # per forward pass
REPEATS = {"0.1M": 3, "3M": 5, "30M": 1}  # in turn; medians are used
TIE = 0.03  # smaller relative differences are ignored
KEY = ("side", "size", "settings")
SIDES = ("ours", "theirs")
FULL_WARMUPS = 2  # if code is compiled
OTHER_SIZES = ("0.1M", "3M")
OTHERS: dict[str, list[dict[str, Any]]] = {  # at OTHER_SIZES, with the fastest number of rows
    "ours": [{"compile": True}],
    "theirs": [
        {"torch_compile": True},
        {"cache_implementation": "static"},
        {"use_transformers_continuous_batching": True},
    ],
}


def main(python: str) -> None:
    """Measures every candidate REPEATS times, except those that the file has."""
    runs: list[dict[str, Any]] = read_json(TUNING)["runs"] if TUNING.exists() else []

    def try_out(side: str, size: str, settings: dict[str, Any], repeat: int = 0) -> None:
        key = {"side": side, "size": size, "settings": settings, "repeat": repeat}
        if any(key.items() <= run.items() for run in runs):
            return
        scenario = Scenario(size=size, settings=settings)
        if any("compile" in name for name in settings):
            scenario = replace(scenario, full_warmups=FULL_WARMUPS)
        measured = measure(side, scenario, python)
        runs.append({**key, **measured})
        print(runs[-1], flush=True)
        write_json(TUNING, results("benchmarks.peer_trl.tune PYTHON_OF_TRL", python, runs=runs))

    for size, repeats in REPEATS.items():
        for repeat, rows, side in product(range(repeats), ROWS, SIDES):
            try_out(side, size, {"rows": rows}, repeat)
    for size, (side, others) in product(OTHER_SIZES, OTHERS.items()):
        rows = fastest(runs, size)[side]["rows"]
        for each in others:
            try_out(side, size, {"rows": rows, **each})
    print(table(read_json(TUNING)))


def read_fastest(size: str) -> dict[str, dict[str, Any]]:
    """Returns the fastest settings of both sides from the committed file."""
    return fastest(read_json(TUNING)["runs"], size)


def fastest(runs: list[dict[str, Any]], size: str) -> dict[str, dict[str, Any]]:
    """Returns the settings of each side with the least CPU time.

    For TRL: among candidates within TIE of the fastest, the one with the least memory. For ours:
    the fastest candidate with no more memory than that. Settings other than rows are excluded: they
    gain little, or take minutes before the first update.
    """
    ours, theirs = (
        [
            run
            for run in medians(runs)
            if (run["side"], run["size"]) == (side, size) and set(run["settings"]) == {"rows"}
        ]
        for side in SIDES
    )
    limit = (1 + TIE) * min(run["total_cpu_seconds"] for run in theirs)
    tied = [run for run in theirs if run["total_cpu_seconds"] <= limit]
    chosen = min(tied, key=lambda run: run["growth_bytes"])
    small = [run for run in ours if run["growth_bytes"] <= chosen["growth_bytes"]]
    return {
        "ours": min(small, key=lambda run: run["total_cpu_seconds"])["settings"],
        "theirs": chosen["settings"],
    }


def medians(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns one run per candidate with the median of each number over repeats."""
    candidates: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        candidates.setdefault(json.dumps([run[name] for name in KEY]), []).append(run)
    return [
        {
            name: value if name in KEY else median(run[name] for run in repeats)
            for name, value in repeats[0].items()
        }
        for repeats in candidates.values()
    ]


def table(content: dict[str, Any]) -> str:
    """Returns a Markdown table of candidates; those that `benchmarks.peer_trl` uses are bold."""
    titles = ["size", "side", "settings", "CPU s per update", "added memory, GB", "warm-up, s"]
    runs, rows = content["runs"], list[list[str]]()
    for run in sorted(medians(runs), key=lambda run: (list(SIZES).index(run["size"]), run["side"])):
        settings = ", ".join(f"{name} {value}" for name, value in sorted(run["settings"].items()))
        if run["settings"] == fastest(runs, run["size"])[run["side"]]:
            settings = f"**{settings}**"
        cells = [
            run["size"],
            {"ours": "ours", "theirs": "TRL"}[run["side"]],
            settings,
            f"{run['total_cpu_seconds']:.2f}",
            f"{run['growth_bytes'] / 1e9:.2f}",
            f"{run['warmup_seconds']:.0f}" if "warmup_seconds" in run else "",
        ]
        rows.append(cells)
    return markdown_table(titles, rows)


def claims(content: dict[str, Any]) -> list[str]:
    """Returns our CPU time as shares of TRL's with its static cache, where that was tried."""
    shares = list[str]()
    for run in medians(content["runs"]):
        if run["settings"].get("cache_implementation") == "static":
            chosen = fastest(content["runs"], run["size"])["ours"]
            (ours,) = [
                each["total_cpu_seconds"]
                for each in medians(content["runs"])
                if (each["side"], each["size"], each["settings"]) == ("ours", run["size"], chosen)
            ]
            size = run["size"].replace("M", " M")
            shares.append(f"{ours / run['total_cpu_seconds']:.2f} at {size}")
    return [" and ".join(shares)]


if __name__ == "__main__":
    main(sys.argv[1])
