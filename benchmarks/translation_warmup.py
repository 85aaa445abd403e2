"""Tests whether a base that is too weak explains the missed targets of benchmarks.translation.

python -m benchmarks.translation_warmup 13   # runs missing stages, then writes the results
python -m benchmarks.translation_warmup      # prints the table of the results

The arms without references run again on a seed, from a base with a longer warm-up. The runs of a
seed are under .work/ and resume after an interruption; remove that folder after a change of code.
Writes results/translation_warmup.json.
"""

from typing import Any

from benchmarks.demo import RESULTS, ROOT
from benchmarks.seeds import record_seeds
from benchmarks.translation import (
    BASE,
    FREE,
    Run,
    gain,
    parameters,
    rank_of,
    read_arms,
    run_arms,
)
from grpo.runtime.artifacts.files import read_json
from grpo.runtime.markdown import markdown_table

WORK = ROOT / ".work" / "translation_warmup"
USUAL = RESULTS / "translation_methods.json"
UPDATES = 3500
ARMS = ["published", "repaired", "composed"]


def main() -> None:
    """Runs the given seeds and prints the table of all finished seeds."""
    results = record_seeds("translation_warmup", {"updates": UPDATES}, run_seed, lambda runs: {})
    print(table(results))


def run_seed(seed: int) -> dict[str, Run]:
    """Returns scores, cost and temperatures of the base policy and of the arms."""
    params = parameters(seed, FREE, ARMS)
    params["policy"]["base"]["warmup"]["updates"] = UPDATES
    return run_arms(WORK / str(seed), params, ARMS)


def table(results: dict[str, Any]) -> str:
    """Returns base and gains with both warm-ups."""
    by_updates = {read_arms()["warmup"]["updates"]: read_json(USUAL), UPDATES: results}
    rows = []
    for seed in results["runs"]:
        for updates, found in by_updates.items():
            run = found["runs"][seed]
            for arm in ARMS:
                languages = {name: gain(run, arm, "mean", name) for name in run[BASE]["languages"]}
                least = min(languages, key=lambda name: languages[name])
                rows.append(
                    [
                        seed,
                        str(updates),
                        f"{run[BASE]['reward_mean']:.3f}",
                        arm,
                        f"{gain(run, arm, 'mean'):+.3f}",
                        f"{least} {languages[least]:+.3f}",
                        f"{gain(run, arm, 'greedy'):+.3f}",
                        f"{rank_of(run, arm, 'chrf_mean'):+.2f}",
                    ]
                )
    titles = ["seed", "updates of warm-up", "base's reward", "arm", "gain, mean@8"]
    titles += ["least gain of a language", "gain, greedy", "rank correlation"]
    return markdown_table(titles, rows)


if __name__ == "__main__":
    main()
