"""Searches why sGPO does not reach GRPO's reward: without its early stop, and without its order.

python -m benchmarks.allocation_sgpo 2 3 4    # runs missing stages, then writes the results
python -m benchmarks.allocation_sgpo          # prints the table of the results

Seeds, base policies and evaluation are those of benchmarks.allocation_tokens, whose results hold
`plain` and `sgpo`. Writes results/allocation_sgpo.json.
"""

from typing import Any

from benchmarks.allocation_tokens import REFERENCE, read_arms, run_seed
from benchmarks.demo import RESULTS, ROOT
from benchmarks.intervals import in_words, mean_interval
from benchmarks.seeds import record_seeds
from grpo.runtime.artifacts.files import read_json
from grpo.runtime.markdown import markdown_table

NAME = "allocation_sgpo"
SGPO = "sgpo"  # arm of benchmarks.allocation_tokens


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
    others = read_json(RESULTS / "allocation_tokens.json")["runs"]
    runs = {seed: {**others[seed], **run} for seed, run in results["runs"].items()}
    rows = []
    for arm in (REFERENCE, SGPO, *results["arms"]):
        ends = [run[arm][-1] for run in runs.values()]
        plain = [run[REFERENCE][-1] for run in runs.values()]
        gains = [run[arm][-1]["mean_at_k"] - run[arm][0]["mean_at_k"] for run in runs.values()]
        against = [own["mean_at_k"] - other["mean_at_k"] for own, other in zip(ends, plain)]
        flops = [own["flops"] / other["flops"] for own, other in zip(ends, plain)]
        scores = [in_words(mean_interval(each)) for each in (gains, against)]
        rows.append([arm, *scores, f"{sum(flops) / len(flops):.0%}"])
    return markdown_table(["arm", "gain in mean@8", "against plain", "FLOPs of plain's"], rows)


if __name__ == "__main__":
    main()
