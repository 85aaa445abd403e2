"""Repeats `plain` and `composed` of benchmarks.allocation_tokens on other seeds, after changes.

python -m benchmarks.allocation_repeat 44 45 46    # runs missing stages, then writes the results
python -m benchmarks.allocation_repeat             # prints the table of the results

Sampling has become faster since that benchmark ran. Base policies and evaluation are as there.
Writes results/allocation_repeat.json.
"""

from typing import Any

from benchmarks.allocation_sgpo import compare_with_plain, differences
from benchmarks.allocation_tokens import (
    REFERENCE,
    reach_at_equal_pace,
    read_arms,
    run_seed,
    share_to_reach,
)
from benchmarks.demo import ROOT
from benchmarks.intervals import in_words, mean_interval
from benchmarks.seeds import record_seeds

NAME = "allocation_repeat"
ARM = "composed"
SHIFT = 0.006  # of a score; about 0.003 of mean@8


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
    reached, less, more = (
        share_to_reach(own, plain, "cpu_seconds", of_score=each)
        for each in (1.0, 1 - SHIFT, 1 + SHIFT)
    )
    flops = share_to_reach(own, plain, "flops")
    paces = []
    for curves in (own, plain):
        taken, steps = (
            sum(points[-1][name] for points in curves)
            for name in ("rollout_seconds", "sampled_steps")
        )
        paces.append(taken / steps * 1e6)
    names = [in_words(each, ".0%") for each in (reached, flops, less, more)]
    share, of_flops, lower, higher = (each.partition(" [")[0] for each in names)
    return [
        f"after {names[0]} of the seconds",
        f"{of_flops} of the FLOPs and {share} of the seconds",
        f"the difference is {in_words(mean_interval(differences(own, plain)))}",
        f"were {SHIFT:.1%} lower or higher, the estimate would be {lower} or {higher}",
        f"takes {paces[0]:.0f} µs, one of `plain` {paces[1]:.0f}",
        f"{paces[0] / paces[1] - 1:.0%} more",
        f"it would have the score after {reach_at_equal_pace(results['runs']):.0%} of the seconds",
    ]


if __name__ == "__main__":
    main()
