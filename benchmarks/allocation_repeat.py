"""Repeats `plain` and `composed` of benchmarks.allocation_tokens later, on other seeds.

python -m benchmarks.allocation_repeat 44 45 46    # runs missing stages, then writes the results
python -m benchmarks.allocation_repeat             # prints the table of the results

Base policies and evaluation are made as there. Writes results/allocation_repeat.json.
"""

from typing import Any

from benchmarks.allocation_sgpo import compare_with_plain, differences
from benchmarks.allocation_tokens import (
    NEARLY,
    REFERENCE,
    known_share,
    reach_at_equal_pace,
    read_arms,
    run_seed,
    seconds_per_step,
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
    share, lower, higher = (
        f"{known_share(own, plain, 'cpu_seconds', of_score=each):.0%}"
        for each in (1.0, 1 - SHIFT, 1 + SHIFT)
    )
    of_flops = f"{known_share(own, plain, 'flops'):.0%}"
    pace, other = (1e6 * seconds_per_step(curves) for curves in (own, plain))
    base, end = (sum(points[each]["mean_at_k"] for points in plain) for each in (0, -1))
    nearly = (NEARLY * end - base) / (end - base)
    (revision,) = {each["revision"][:7] for each in results["measured"].values()}
    return [
        f"measured at {revision} on another processor",
        f"after {in_words(share_to_reach(own, plain, 'cpu_seconds'), '.0%')} of the seconds",
        f"which is about {100 * nearly:.0f} % of its gain",
        f"{of_flops} of the FLOPs and {share} of the seconds",
        f"the difference is {in_words(mean_interval(differences(own, plain)))}",
        f"were {SHIFT:.1%} lower or higher, the estimate would be {lower} or {higher}",
        f"takes {pace:.0f} µs, one of `plain` {other:.0f}",
        f"{pace / other - 1:.0%} more",
        f"it would have the score after {reach_at_equal_pace(results['runs']):.0%} of the seconds",
    ]


if __name__ == "__main__":
    main()
