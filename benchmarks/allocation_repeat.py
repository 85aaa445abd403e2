"""Repeats `plain` and `composed` of benchmarks.allocation_tokens on other seeds, after changes.

python -m benchmarks.allocation_repeat 44 45 46    # runs missing stages, then writes the results
python -m benchmarks.allocation_repeat             # prints the table of the results

Sampling has become faster since that benchmark ran. Base policies and evaluation are as there.
Writes results/allocation_repeat.json.
"""

from typing import Any

import numpy as np

from benchmarks.allocation_sgpo import compare_with_plain, differences
from benchmarks.allocation_tokens import REFERENCE, read_arms, run_seed, share_to_reach
from benchmarks.demo import ROOT
from benchmarks.intervals import in_words, mean_interval
from benchmarks.seeds import record_seeds

NAME = "allocation_repeat"
ARM = "composed"


def main() -> None:
    """Runs the given seeds and writes the results of all finished seeds."""
    arms = {name: each for name, each in read_arms().items() if name in (REFERENCE, ARM)}
    work = ROOT / ".work" / NAME
    results = record_seeds(NAME, arms, lambda seed: run_seed(seed, arms, work), lambda runs: {})
    print(table(results))


def table(results: dict[str, Any]) -> str:
    """Returns rewards and costs relative to `plain` as a Markdown table."""
    return compare_with_plain([*results["runs"].values()], [ARM], ["flops", "cpu_seconds"])


def claims(results: dict[str, Any]) -> list[str]:
    """Returns what docs/allocation_tokens.md says of the target, and of the way to it."""
    runs = [*results["runs"].values()]
    own, plain = ([run[arm] for run in runs] for arm in (ARM, REFERENCE))
    reached = share_to_reach(own, plain, "cpu_seconds")
    gains = [
        float(np.mean([points[index]["mean_at_k"] - points[0]["mean_at_k"] for points in curves]))
        for curves, index in ((own, 1), (plain, -1))
    ]
    seconds = [
        float(np.mean([points[index]["cpu_seconds"] for points in curves]))
        for curves, index in ((own, 1), (plain, -1))
    ]
    paces = []
    for curves in (own, plain):
        taken, steps = (
            sum(points[-1][name] for points in curves)
            for name in ("rollout_seconds", "sampled_steps")
        )
        paces.append(f"{taken / steps * 1e6:.0f}")
    return [
        f"after {in_words(reached, '.0%')} of the seconds",
        f"the difference is {in_words(mean_interval(differences(own, plain)))}",
        f"after {seconds[0] / seconds[1]:.0%} of the seconds it has {gains[0] / gains[1]:.0%}",
        f"takes {paces[0]} µs instead of {paces[1]}",
    ]


if __name__ == "__main__":
    main()
