"""Measures what an iteration of many prompts saves when it is sampled in two batches.

python -m benchmarks.allocation_batches 2 3 4    # runs missing stages, then writes the results
python -m benchmarks.allocation_batches          # prints the table of the results

Seeds, base policies, evaluation and the arms `plain` and `composed` are those of
benchmarks.allocation_tokens. All arms run anew, so that their seconds are of the same days and
machine. Writes results/allocation_batches.json.
"""

from typing import Any

from benchmarks.allocation_sgpo import compare_with_plain, differences
from benchmarks.allocation_tokens import REFERENCE, Point, read_arms, run_seed, share_to_reach
from benchmarks.demo import ROOT
from benchmarks.intervals import in_words, mean_interval
from benchmarks.seeds import record_seeds

NAME = "allocation_batches"
ONE, TWO = "composed", "composed_512"
ROLLOUTS_PER_BATCH = 512


def main() -> None:
    """Runs the given seeds and writes the results of all finished seeds."""
    arms = make_arms()
    work = ROOT / ".work" / NAME
    results = record_seeds(NAME, arms, lambda seed: run_seed(seed, arms, work), lambda runs: {})
    print(table(results))


def make_arms() -> dict[str, Any]:
    """Returns `plain`, `composed`, and `composed` in batches of fewer rollouts."""
    arms = read_arms()
    composed = arms[ONE]
    sampling = {**composed["sampling"], "rollouts_per_batch": ROLLOUTS_PER_BATCH}
    return {REFERENCE: arms[REFERENCE], ONE: composed, TWO: {**composed, "sampling": sampling}}


def table(results: dict[str, Any]) -> str:
    """Returns rewards and costs relative to `plain` as a Markdown table."""
    return compare_with_plain([*results["runs"].values()], [ONE, TWO], ["flops", "cpu_seconds"])


def claims(results: dict[str, Any]) -> list[str]:
    """Returns what docs/allocation_tokens.md says of the two arms."""
    runs = [*results["runs"].values()]
    own: dict[str, list[list[Point]]] = {arm: [run[arm] for run in runs] for arm in results["arms"]}
    reached = share_to_reach(own[TWO], own[REFERENCE], "cpu_seconds")
    other = share_to_reach(own[ONE], own[REFERENCE], "cpu_seconds")
    fewer = mean_interval(
        [1 - b[-1]["cpu_seconds"] / a[-1]["cpu_seconds"] for a, b in zip(own[ONE], own[TWO])]
    )
    return [
        f"after {in_words(reached, '.0%')} of the seconds of `plain`",
        f"`composed` has it after {in_words(other, '.0%')}",
        f"whole run takes {in_words(fewer, '.0%')} fewer seconds",
        f"ends apart by {in_words(mean_interval(differences(own[TWO], own[ONE])))}",
    ]


if __name__ == "__main__":
    main()
