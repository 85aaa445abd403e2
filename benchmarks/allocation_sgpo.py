"""Searches why sGPO does not reach GRPO's reward: without its early stop, and without its order.

python -m benchmarks.allocation_sgpo 2 3 4    # runs missing stages, then writes the results
python -m benchmarks.allocation_sgpo          # prints the table of the results

Seeds, base policies and evaluation are those of benchmarks.allocation_tokens, whose results hold
`plain` and `sgpo`. Writes results/allocation_sgpo.json.
"""

from pathlib import Path
from typing import Any

from benchmarks.allocation_tokens import read_arms, run_seed
from benchmarks.demo import RESULTS, ROOT
from benchmarks.intervals import in_words, mean_interval
from benchmarks.seeds import record_seeds
from grpo.runtime.artifacts.files import read_json
from grpo.runtime.markdown import markdown_table

NAME = "allocation_sgpo"
COMPARED = ("plain", "sgpo")  # of benchmarks.allocation_tokens


def main() -> None:
    """Runs the given seeds and writes the results of all finished seeds."""
    arms = read_arms(Path(__file__).with_suffix(".yaml"))
    work = ROOT / ".work" / NAME
    results = record_seeds(
        NAME,
        arms,
        lambda seed: run_seed(seed, arms, work),
        lambda runs: {},
    )
    print(table(results))


def table(results: dict[str, Any]) -> str:
    """Returns rewards and costs relative to `plain` on the same seeds as a Markdown table."""
    others = read_json(RESULTS / "allocation_tokens.json")["runs"]
    runs = {seed: {**others[seed], **run} for seed, run in results["runs"].items()}
    rows = []
    for arm in (*COMPARED, *results["arms"]):
        ends = [run[arm][-1] for run in runs.values()]
        plain = [run["plain"][-1] for run in runs.values()]
        gains = [run[arm][-1]["mean_at_k"] - run[arm][0]["mean_at_k"] for run in runs.values()]
        against = [own["mean_at_k"] - other["mean_at_k"] for own, other in zip(ends, plain)]
        flops = [own["flops"] / other["flops"] for own, other in zip(ends, plain)]
        scores = [in_words(mean_interval(each)) for each in (gains, against)]
        rows.append([arm, *scores, f"{sum(flops) / len(flops):.0%}"])
    return markdown_table(["arm", "gain in mean@8", "against plain", "FLOPs of plain's"], rows)


if __name__ == "__main__":
    main()
