"""Tests two explanations of the missed targets of benchmarks.translation, with its arm `repaired`.

python -m benchmarks.translation_misses 0 1 2 3 4   # runs missing stages, then writes the results
python -m benchmarks.translation_misses             # prints tables of the results

Prompts are divided by whether the base's greedy translation is the reference. Seed 3, whose base is
weak, runs again with a longer warm-up. The runs of a seed are under .work/ and resume after an
interruption; remove that folder after a change of code. Writes results/translation_misses.json.
"""

from pathlib import Path
from typing import Any

import pandas as pd
from scipy import stats

from benchmarks.demo import ROOT
from benchmarks.intervals import in_words, mean_interval
from benchmarks.seeds import record_seeds
from benchmarks.translation import BASE, FREE, parameters
from benchmarks.workspaces import make_workspace, run_stages
from grpo.runtime.markdown import markdown_table

WORK = ROOT / ".work" / "translation_misses"
ARM = "repaired"
LONGER = {3: 2200}  # updates of the warm-up of a seed that runs again; the others have 1450
SAMPLED, GREEDY, EXACT = "score.chrf", "greedy_score.chrf", "greedy_score.exact"
REWARD = f"score.{FREE}"
Run = dict[str, Any]


def main() -> None:
    """Runs the given seeds and prints the tables of all finished seeds."""
    about = {"arm": ARM, "longer": {str(seed): updates for seed, updates in LONGER.items()}}
    results = record_seeds(
        "translation_misses", about, run_seed, lambda runs: {"summary": summarize(runs)}
    )
    print(split_table(results), base_table(results), sep="\n\n")


def run_seed(seed: int) -> dict[str, Run]:
    """Returns what came of a seed, and with a longer warm-up if LONGER has it."""
    found = {"usual": _run(seed, WORK / str(seed))}
    if seed in LONGER:
        found["longer"] = _run(seed, WORK / f"{seed}-longer", updates=LONGER[seed])
    return found


def _run(seed: int, workspace: Path, *, updates: int | None = None) -> Run:
    params = parameters(seed, FREE, [ARM])
    if updates is not None:
        params["policy"]["base"]["warmup"]["updates"] = updates
    make_workspace(workspace, params)
    run_stages(workspace)
    before, after = (_scores(workspace, name) for name in (BASE, f"{ARM}-1"))
    gain = after[[SAMPLED, GREEDY]] - before[[SAMPLED, GREEDY]]
    is_right = before[EXACT] == 1.0
    by_language = before["family"]
    return {
        "base_reward": float(before[REWARD].mean()),
        "languages": {
            "base": before[SAMPLED].groupby(by_language).mean().to_dict(),
            "gain": gain[SAMPLED].groupby(by_language).mean().to_dict(),
        },
        "split": {
            name: {
                "prompts": int(chosen.sum()),
                "base_sampled": float(before[SAMPLED][chosen].mean()),
                "base_greedy": float(before[GREEDY][chosen].mean()),
                "gain_sampled": float(gain[SAMPLED][chosen].mean()),
                "gain_greedy": float(gain[GREEDY][chosen].mean()),
            }
            for name, chosen in (("right", is_right), ("wrong", ~is_right))
        },
    }


def _scores(workspace: Path, name: str) -> pd.DataFrame:
    """Returns the evaluation of a policy by prompt."""
    path = workspace / "artifacts" / "evaluations" / f"{name}.parquet"
    return pd.read_parquet(path).set_index("prompt_id").sort_index()


def rank_correlation(run: Run) -> float:
    """Returns the rank correlation over languages of the base's chrF++ and the gain."""
    base, gain = run["languages"]["base"], run["languages"]["gain"]
    found = stats.spearmanr(list(base.values()), [gain[name] for name in base])
    return float(found.statistic)


def summarize(runs: dict[str, dict[str, Run]]) -> dict[str, Any]:
    """Returns means over seeds with t intervals, by whether the base's greedy answer is right."""
    splits = [run["usual"]["split"] for run in runs.values()]
    numbers = ("prompts", "base_sampled", "base_greedy", "gain_sampled", "gain_greedy")
    return {
        name: {key: mean_interval([split[name][key] for split in splits]) for key in numbers}
        for name in ("right", "wrong")
    }


def split_table(results: dict[str, Any]) -> str:
    """Returns the gains by whether the base's greedy translation is right."""
    titles = ["base's greedy translation", "prompts", "base, mean@8", "base, greedy"]
    titles += ["gain, mean@8", "gain, greedy"]
    rows = [
        [
            name,
            f"{row['prompts']['value']:.0f}",
            *(f"{row[key]['value']:.3f}" for key in ("base_sampled", "base_greedy")),
            *(in_words(row[key]) for key in ("gain_sampled", "gain_greedy")),
        ]
        for name, row in results["summary"].items()
    ]
    return markdown_table(titles, rows)


def claims(results: dict[str, Any]) -> list[str]:
    """Returns the numbers of the text of docs/translation.md."""
    gains = {name: row["gain_sampled"]["value"] for name, row in results["summary"].items()}
    usual = results["runs"]["3"]["usual"]["base_reward"]
    return [
        f"is {gains['right'] / gains['wrong']:.1f} times that of the others",
        f"its reward is {usual:.3f}",
    ]


def base_table(results: dict[str, Any]) -> str:
    """Returns the rank correlation by seed and warm-up."""
    rows = [
        [
            seed,
            str(LONGER[int(seed)]) if kind == "longer" else "1450",
            f"{run['base_reward']:.3f}",
            f"{rank_correlation(run):+.2f}",
        ]
        for seed, kinds in results["runs"].items()
        for kind, run in kinds.items()
    ]
    titles = ["seed", "updates of warm-up", "base's reward", "rank correlation of base and gain"]
    return markdown_table(titles, rows)


if __name__ == "__main__":
    main()
