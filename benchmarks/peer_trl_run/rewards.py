"""Compares the rewards of both sides on many seeds, two runs side by side; nothing is timed.

python -m benchmarks.peer_trl_run.rewards PYTHON_OF_TRL 11.6M 0 1 2 3 4 5 6 7 8

Writes benchmarks/results/peer_trl_run_rewards.json. Runs that the file has are not repeated.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

from benchmarks.demo import RESULTS, machine, revision_of
from benchmarks.intervals import in_words
from benchmarks.peer_trl.processes import versions
from benchmarks.peer_trl_run.__main__ import THEIRS, interval
from benchmarks.peer_trl_run.runs import run_ours, run_theirs, score_of_base
from benchmarks.peer_trl_run.settings import SAME
from grpo.runtime.artifacts.files import read_json, write_json

OUT = RESULTS / "peer_trl_run_rewards.json"
AT_ONCE = 2


def main(python: str, size: str, seeds: list[int]) -> None:
    """Adds the runs that the file lacks and prints the differences."""
    runs: dict[str, dict[str, dict[str, float]]] = read_json(OUT)["runs"] if OUT.exists() else {}
    ours, lock = runs.setdefault(size, {}), Lock()

    def measure(seed: int) -> None:
        if str(seed) in ours:
            return
        found = {
            "base": score_of_base(size, seed)["reward"],
            SAME: run_ours(size, seed, SAME, goal=None)["reward"],
            THEIRS: run_theirs(size, seed, python)["reward"],
        }
        with lock:
            ours[str(seed)] = found
            write_json(OUT, {**_about(python), "runs": runs, **conclude(runs)})
            print(size, seed, found, flush=True)

    with ThreadPoolExecutor(AT_ONCE) as threads:
        list(threads.map(measure, seeds))
    print(conclude(runs))


def conclude(runs: dict[str, dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Returns, by size, 95 % t intervals over seeds of each side's gain and of the difference."""
    return {
        "differences": {
            size: {
                "seeds": len(seeds),
                **{
                    f"{side} - {other}": interval(
                        [run[side] - run[other] for run in seeds.values()]
                    )
                    for side, other in ((SAME, "base"), (THEIRS, "base"), (SAME, THEIRS))
                },
            }
            for size, seeds in runs.items()
        }
    }


def claims(results: dict[str, Any]) -> list[str]:
    """Returns what docs/speed.md says of these seeds."""
    found, runs = results["differences"]["11.6M"], results["runs"]["11.6M"]
    theirs, ours, difference = (
        in_words(found[name]) for name in ("trl - base", "same - base", "same - trl")
    )
    seed, worst = min(runs.items(), key=lambda each: each[1][SAME])
    return [
        f"TRL changes mean@8 by {theirs} and `same` by {ours}; the difference is {difference}",
        f"seed, {seed}, on which `same` fell from {worst['base']:.3f} to {worst[SAME]:.3f}",
    ]


def _about(python: str) -> dict[str, Any]:
    return {
        "command": "python -m benchmarks.peer_trl_run.rewards PYTHON_OF_TRL SIZE SEED...",
        "revision": revision_of("HEAD"),
        "machine": machine(),
        "versions": versions(python),
    }


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], [int(seed) for seed in sys.argv[3:]])
