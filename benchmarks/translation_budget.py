"""Compares `composed` of benchmarks.translation with `repaired` at about the same FLOPs.

python -m benchmarks.translation_budget 10   # runs missing stages, then writes the results
python -m benchmarks.translation_budget      # prints the table of the results

`composed` has more iterations than in benchmarks.translation, about as many as the FLOPs of
`repaired` pay for. The runs of a seed are under .work/ and resume after an interruption; remove
that folder after a change of code. Writes results/translation_budget.json.
"""

from typing import Any

from benchmarks.demo import ROOT
from benchmarks.intervals import in_words, mean_interval, span
from benchmarks.seeds import record_seeds
from benchmarks.translation import FREE, SCORES, Run, gain, parameters, run_arms
from grpo.runtime.markdown import markdown_table

WORK = ROOT / ".work" / "translation_budget"
ITERATIONS = {"repaired": 45, "composed": 55}


def main() -> None:
    """Runs the given seeds and prints the table of all finished seeds."""
    results = record_seeds("translation_budget", ITERATIONS, run_seed, lambda runs: {})
    print(table(results))


def run_seed(seed: int) -> dict[str, Run]:
    """Returns scores, cost and temperatures of the base policy and of both arms."""
    params = parameters(seed, FREE, [*ITERATIONS])
    for arm, iterations in ITERATIONS.items():
        training = params["arms"][arm]["training"]
        params["arms"][arm]["training"] = {**training, "iterations_per_round": iterations}
    return run_arms(WORK / str(seed), params, ITERATIONS)


def table(results: dict[str, Any]) -> str:
    """Returns gains and FLOPs of both arms, and their differences within seeds."""
    runs = list(results["runs"].values())
    rows = []
    for arm, iterations in results["arms"].items():
        gains = [mean_interval([gain(run, arm, key) for run in runs]) for key in SCORES]
        flops = mean_interval([run[arm]["cost"]["flops"] / 1e9 for run in runs])
        rows.append([arm, str(iterations), *map(in_words, gains), in_words(flops, ".0f")])
    differences = [mean_interval([_difference(run, key) for run in runs]) for key in SCORES]
    share = in_words(mean_interval([_share(run, "flops") for run in runs]), ".0f")
    rows.append(["composed - repaired", "", *map(in_words, differences), f"{share} %"])
    titles = ["arm", "iterations", "chrF++, mean@8", "chrF++, greedy", "GFLOPs"]
    return markdown_table(titles, rows)


def claims(results: dict[str, Any]) -> list[str]:
    """Returns the numbers of the text of docs/translation.md."""
    by_seed = {seed: _difference(run, "mean") for seed, run in results["runs"].items()}
    last = min(by_seed, key=lambda seed: by_seed[seed])
    others = [each for seed, each in by_seed.items() if seed != last]
    share = _share(results["runs"][last], "flops")
    more = [_share(run, "cpu_seconds") - 100 for run in results["runs"].values()]
    return [
        f"On seed {last} `composed` gains {-by_seed[last]:.3f} less than `repaired`, for"
        f" {share:.0f} % of its FLOPs",
        f"on the others the difference is {span(others, '+.3f')}",
        f"{span(more)} % more processor time",
    ]


def _difference(run: dict[str, Run], score: str) -> float:
    return gain(run, "composed", score) - gain(run, "repaired", score)


def _share(run: dict[str, Run], cost: str) -> float:
    """Returns what `composed` takes of the FLOPs or seconds of `repaired`, in percent."""
    own, other = (run[arm]["cost"] | run[arm] for arm in ("composed", "repaired"))
    return float(100 * own[cost] / other[cost])


if __name__ == "__main__":
    main()
