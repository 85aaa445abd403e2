"""Repeats `plain` and `composed` of benchmarks.allocation_tokens on other seeds, after changes.

python -m benchmarks.allocation_repeat 44 45 46    # runs missing stages, then writes the results
python -m benchmarks.allocation_repeat             # prints the table of the results

Sampling has become faster since that benchmark ran. Base policies and evaluation are as there.
Writes results/allocation_repeat.json.
"""

from typing import Any

from benchmarks.allocation_sgpo import compare_with_plain
from benchmarks.allocation_tokens import REFERENCE, read_arms, run_seed
from benchmarks.demo import ROOT
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


if __name__ == "__main__":
    main()
