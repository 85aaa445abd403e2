"""Searches why composed learns less than GRPO with a pretrained model that solves little.

python -m benchmarks.allocation_pretrained 0 1 2    # runs missing stages, then writes the results
python -m benchmarks.allocation_pretrained          # prints the table of the results

Base, task and evaluation are those of recipes/reasoning-smollm2.yaml; its results on the same seeds
(benchmarks.demo) hold `plain`. Writes results/allocation_pretrained.json.
"""

from typing import Any

import numpy as np

from benchmarks.allocation_tokens import Point, make_rounds, run_arms
from benchmarks.demo import RESULTS, ROOT
from benchmarks.intervals import in_words, mean_interval
from benchmarks.seeds import record_seeds
from grpo.params.recipes import read_content
from grpo.runtime.artifacts.files import read_json
from grpo.runtime.markdown import markdown_table

NAME = "allocation_pretrained"
RECIPE = ROOT / "recipes" / "reasoning-smollm2.yaml"
PLAIN, COMPOSED, DROPPING = "plain", "composed", "plain_rloo"
ROUNDS = 4  # of composed, twice as many as in the recipe


def main() -> None:
    """Runs the given seeds and writes the results of all finished seeds."""
    arms, rounds = make_arms(), make_rounds(DROPPING, 1) | make_rounds(COMPOSED, ROUNDS)
    params = read_content(RECIPE) | {"arms": arms, "rounds": rounds}
    work = ROOT / ".work" / NAME
    results = record_seeds(
        NAME,
        arms,
        lambda seed: run_arms(work / str(seed), {**params, "seed": seed}, {*rounds}),
        lambda runs: {},
    )
    print(table(results))


def make_arms() -> dict[str, Any]:
    """Returns `composed`, and `plain` with the objective of `composed`, which drops groups."""
    arms = read_content(RECIPE)["arms"]
    composed, plain = arms[COMPOSED], arms[PLAIN]
    return {COMPOSED: composed, DROPPING: {**plain, "objective": composed["objective"]}}


def table(results: dict[str, Any]) -> str:
    """Returns rewards and FLOPs relative to `plain` on the same seeds as a Markdown table."""
    plain = of_plain(results)
    rows = [_row(PLAIN, [*plain.values()], plain)]
    for arm in (DROPPING, COMPOSED):
        per_round = results["arms"][arm]["training"]["iterations_per_round"]
        for index in range(1, len(next(iter(results["runs"].values()))[arm])):
            points = [run[arm][index] for run in results["runs"].values()]
            rows.append(_row(f"{arm}, {index * per_round} iterations", points, plain))
    seeds = [f"seed {seed}" for seed in plain]
    titles = ["arm", "gain in mean@4", "against plain", *seeds, "FLOPs of plain's"]
    return markdown_table(titles, rows)


def claims(results: dict[str, Any]) -> list[str]:
    """Returns by how much the arm without uniform groups ends above or below `plain`."""
    plain = of_plain(results)
    ends = {seed: run[DROPPING][-1] for seed, run in results["runs"].items()}
    apart = [ends[seed]["mean_at_k"] - plain[seed]["mean_at_k"] for seed in ends]
    return [f"differs from that of `plain` by {in_words(mean_interval(apart))}"]


def of_plain(results: dict[str, Any]) -> dict[str, Point]:
    """Returns the final mean@4 of `plain`, its gain over the base and its FLOPs, by seed."""
    known = read_json(RESULTS / f"{RECIPE.stem}.json")["runs"]
    found = {}
    for seed in results["runs"]:
        metrics = known[seed]["metrics"]
        end = metrics["arms"][PLAIN]
        found[seed] = {
            "mean_at_k": end["mean_at_k"]["value"],
            "gain": end["gain_over_base"]["value"],
            "flops": end["cost"]["flops"],
        }
    return found


def _row(name: str, points: list[Point], plain: dict[str, Point]) -> list[str]:
    scores = [each["mean_at_k"] for each in points]
    apart = [score - each["mean_at_k"] for score, each in zip(scores, plain.values())]
    gains = [each["gain"] + difference for each, difference in zip(plain.values(), apart)]
    share = np.mean([each["flops"] / of["flops"] for each, of in zip(points, plain.values())])
    cells = [in_words(mean_interval(each)) for each in (gains, apart)]
    return [name, *cells, *(f"{score:.3f}" for score in scores), f"{share:.0%}"]


if __name__ == "__main__":
    main()
