"""Measures what a reward of embeddings teaches with and without guards against its shortcuts.

python -m benchmarks.translation_guards 0 1 2   # after benchmarks.translation 0 1 2
python -m benchmarks.translation_guards         # writes the table from the results

Policies start from the bases of benchmarks.translation. Writes results/translation_guards.json.
"""

from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.demo import ROOT
from benchmarks.seeds import in_words, mean_interval, record_seeds
from benchmarks.translation import BASE, FREE, WORK, parameters, share_base
from benchmarks.workspaces import make_workspace, run_stages
from grpo.params.yaml import parse_yaml
from grpo.runtime.markdown import markdown_table

ARMS = Path(__file__).with_suffix(".yaml")
GUARDS = ROOT / ".work" / "translation_guards"
SCALE = {"embeddings": [0.8, 1.0]}  # raw scores that map to 0 and to 1
WATCHED = ("embeddings", "copying", "language", "length", "chrf", FREE)
Run = dict[str, float]


def main() -> None:
    """Runs the given seeds and writes the results of all finished seeds."""
    results = record_seeds(
        "translation_guards", read_arms(), run_seed, lambda runs: {"summary": summarize(runs)}
    )
    print(table(results))


def read_arms() -> dict[str, Any]:
    """Returns the file of arms."""
    found: dict[str, Any] = parse_yaml(ARMS.read_text())
    return found


def run_seed(seed: int) -> dict[str, Run]:
    """Returns the mean score of every judge over sampled translations, base first."""
    runs = dict[str, Run]()
    for name, weights in read_arms()["arms"].items():
        workspace = GUARDS / str(seed) / name
        params = guarded_parameters(seed, weights)
        make_workspace(workspace, params)
        share_base(WORK / str(seed) / FREE, workspace)
        run_stages(workspace, {"evaluate-base"} if runs else ())
        runs = runs or {BASE: _means(workspace, BASE)}
        runs[name] = _means(workspace, "repaired-1")
    return runs


def guarded_parameters(seed: int, weights: dict[str, float]) -> dict[str, Any]:
    """Returns the parameters of one arm, whose round is repaired-1."""
    written = read_arms()
    params = parameters(seed, FREE, ["repaired"])
    judges = [{"judge": each, "model": None, "score_range": SCALE.get(each)} for each in WATCHED]
    params["reward"] |= {
        "judges": [
            {**each, "weight": weights[each["judge"]], "normalize": "none"}
            for each in judges
            if each["judge"] in weights
        ],
        "maximize": "score",
    }
    params["evaluation"]["judges"] = [each for each in judges if each["judge"] not in weights]
    arm = params["arms"]["repaired"]
    arm["curriculum"][0]["split_at_random"]["prompts_per_phase"] = written["prompts"]
    arm["sampling"] = {**arm["sampling"], "temperature": 1.0}
    arm["training"] = {**arm["training"], "iterations_per_round": written["iterations"]}
    return params


def _means(workspace: Path, name: str) -> Run:
    table = pd.read_parquet(workspace / "artifacts" / "evaluations" / f"{name}.parquet")
    return {each: float(table[f"score.{each}"].mean()) for each in WATCHED}


def summarize(runs: dict[str, dict[str, Run]]) -> dict[str, Any]:
    """Returns means over seeds with 95 % t intervals, of scores and of changes from the base."""
    seeds = list(runs.values())
    return {
        arm: {
            each: {
                "score": mean_interval([run[arm][each] for run in seeds]),
                "change": mean_interval([run[arm][each] - run[BASE][each] for run in seeds]),
            }
            for each in WATCHED
        }
        for arm in seeds[0]
    }


def table(results: dict[str, Any]) -> str:
    """Returns the scores of the base and of each arm."""
    rows = [
        [arm, *(in_words(row[each]["score"], ".3f") for each in WATCHED)]
        for arm, row in results["summary"].items()
    ]
    return markdown_table(["policy", *WATCHED], rows)


if __name__ == "__main__":
    main()
