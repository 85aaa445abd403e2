"""Searches why sGPO does not reach GRPO's reward: without its early stop, and without its order.

python -m benchmarks.allocation_sgpo 2 3 4    # runs missing stages, then writes the results
python -m benchmarks.allocation_sgpo          # prints the table of the results

Seeds, base policies and evaluation are those of benchmarks.allocation_tokens, whose results hold
`plain` and `sgpo`. Writes results/allocation_sgpo.json.
"""

from typing import Any

import numpy as np

from benchmarks.allocation_tokens import (
    NEARLY,
    REFERENCE,
    Point,
    read_arms,
    run_seed,
    share_to_reach,
)
from benchmarks.demo import RESULTS, ROOT
from benchmarks.intervals import in_words, mean_interval
from benchmarks.seeds import record_seeds
from grpo.runtime.artifacts.files import read_json
from grpo.runtime.markdown import markdown_table

NAME = "allocation_sgpo"
SGPO = "sgpo"  # arm of benchmarks.allocation_tokens
LITTLE = 0.001  # of a mean@k


def main() -> None:
    """Runs the given seeds and writes the results of all finished seeds."""
    arms = make_arms()
    work = ROOT / ".work" / NAME
    results = record_seeds(
        NAME,
        arms,
        lambda seed: run_seed(seed, arms, work),
        lambda runs: {},
    )
    print(table(results))


def make_arms() -> dict[str, Any]:
    """Returns `sgpo` without its early stop, and that with all prompts in one phase."""
    sgpo = read_arms()[SGPO]
    drop_trivial, size_groups, _ = sgpo["curriculum"]
    training = {name: each for name, each in sgpo["training"].items() if name != "stop_on_plateau"}
    no_stop = {**sgpo, "training": training}
    sample_unsolved = {"sample_unsolved": {"fraction": 0.1}}
    one_phase = {"split_easy_to_hard": {"phases": 1}}
    curriculum = [drop_trivial, sample_unsolved, size_groups, one_phase]
    return {"no_stop": no_stop, "shuffled": {**no_stop, "phases": 1, "curriculum": curriculum}}


def table(results: dict[str, Any]) -> str:
    """Returns rewards and costs relative to `plain` on the same seeds as a Markdown table."""
    return compare_with_plain(with_originals(results), [SGPO, *results["arms"]], ["flops"])


def compare_with_plain(
    runs: list[dict[str, list[Point]]], arms: list[str], costs: list[str]
) -> str:
    """Returns rewards, and costs until the reward of `plain`, as a Markdown table.

    Args:
      runs: The points of each arm, by seed.
    """
    plain = [run[REFERENCE] for run in runs]
    rows = []
    for arm in (REFERENCE, *arms):
        own = [run[arm] for run in runs]
        gains = [points[-1]["mean_at_k"] - points[0]["mean_at_k"] for points in own]
        row = [arm, *(in_words(mean_interval(each)) for each in (gains, differences(own, plain)))]
        for cost in costs:
            whole = [a[-1][cost] / b[-1][cost] for a, b in zip(own, plain)]
            reached = [share_to_reach(own, plain, cost, of_score=each) for each in (1.0, NEARLY)]
            row += [f"{sum(whole) / len(whole):.0%}", *(in_words(each, ".0%") for each in reached)]
        rows.append(row)
    titles = ["arm", "gain in mean@8", "against plain"]
    for cost in costs:
        name = {"flops": "FLOPs", "cpu_seconds": "seconds"}[cost]
        titles += [f"{name} of plain's", f"{name} to plain"]
        titles += [f"{name} to {100 * NEARLY:.0f} % of plain"]
    return markdown_table(titles, rows)


def claims(results: dict[str, Any]) -> list[str]:
    """Returns what docs/allocation_tokens.md says of the arms beside each other."""
    runs = with_originals(results)
    own = {arm: [run[arm] for run in runs] for arm in (SGPO, *results["arms"])}
    pairs = {"stop": ("no_stop", SGPO), "order": ("shuffled", "no_stop")}
    gains = {
        name: in_words(mean_interval(differences(own[one], own[other])))
        for name, (one, other) in pairs.items()
    }
    plain = [run[REFERENCE] for run in runs]
    nearly = share_to_reach(own["shuffled"], plain, "flops", of_score=NEARLY)["value"]
    assert nearly is not None
    missed = -np.mean(differences(own["shuffled"], plain))
    assert 0 < missed < LITTLE
    spent = [b[-1]["flops"] / a[-1]["flops"] for a, b in zip(plain, own["shuffled"])]
    return [
        f"for {100 * np.mean(spent):.0f} % of its FLOPs",
        f"`no_stop` ends higher than `sgpo` by {gains['stop']}",
        f"`shuffled` ends higher than `no_stop` by {gains['order']}",
        f"misses the final mean@8 of `plain` by less than {LITTLE}",
        f"{100 * NEARLY:.0f} % of the score after {100 * nearly:.0f} % of the FLOPs of `plain`",
    ]


def with_originals(results: dict[str, Any]) -> list[dict[str, list[Point]]]:
    """Returns the arms of each seed, beside those of benchmarks.allocation_tokens."""
    others = read_json(RESULTS / "allocation_tokens.json")["runs"]
    return [{**others[seed], **run} for seed, run in results["runs"].items()]


def differences(own: list[list[Point]], others: list[list[Point]]) -> list[float]:
    """Returns the differences of the final mean@k, by seed."""
    return [a[-1]["mean_at_k"] - b[-1]["mean_at_k"] for a, b in zip(own, others)]


if __name__ == "__main__":
    main()
