"""Measures which guards keep a reward without references from teaching its shortcuts.

python -m benchmarks.translation_guards 0 1 2   # runs missing stages, then writes the results
python -m benchmarks.translation_guards         # writes the table from the results

The arms are in translation_guards.yaml. All arms of a seed start from the same base policy. The
runs of a seed are under .work/ and resume after an interruption; remove that folder after a change
of code. Writes results/translation_guards.json.
"""

from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.demo import ROOT
from benchmarks.intervals import in_words, mean_interval
from benchmarks.seeds import record_seeds
from benchmarks.translation import BASE, FREE, parameters, set_judges, share_base
from benchmarks.workspaces import make_workspace, run_stages
from grpo.params.parameters import read_params
from grpo.params.yaml import parse_yaml
from grpo.runtime.artifacts.tables import EVALUATION, PROMPTS, read_table
from grpo.runtime.markdown import markdown_table
from grpo.sampling.scoring import RewardRule, score_rollouts
from grpo.schema import DATA
from grpo.wiring.rewards import build_judges
from grpo.wiring.shaping import build_shaping

ARMS = Path(__file__).with_suffix(".yaml")
WORK = ROOT / ".work" / "translation_guards"
WARMUP_UPDATES = 1450  # fewer than those of benchmarks.translation
ROUND = "repaired-1"
OF_ROUND = {f"{stage}@{ROUND}" for stage in ("rollout", "score", "train", "evaluate")}
SCALE = {"embeddings": [0.8, 1.0]}  # raw scores that map to 0 and to 1
WATCHED = ("embeddings", "copying", "language", "length", "chrf", FREE)
REFERENCES = "references"
GUARDED = "guarded"  # the arm with every guard
Run = dict[str, Any]


def main() -> None:
    """Runs the given seeds and writes the results of all finished seeds."""
    results = record_seeds(
        "translation_guards", read_arms(), run_seed, lambda runs: {"summary": summarize(runs)}
    )
    print(scores_table(results), differences_table(results), sep="\n\n")


def read_arms() -> dict[str, Any]:
    """Returns the file of arms."""
    found: dict[str, Any] = parse_yaml(ARMS.read_text())
    return found


def run_seed(seed: int) -> dict[str, Run]:
    """Returns the scores of the references, the base policy and every arm."""
    base = WORK / str(seed) / BASE
    make_workspace(base, guarded_parameters(seed, {FREE: 1.0}))
    run_stages(base, OF_ROUND)
    runs = {
        REFERENCES: mean_scores(judge_references(base)),
        BASE: mean_scores(evaluated(base, BASE)),
    }
    for name, weights in read_arms()["arms"].items():
        workspace = WORK / str(seed) / name
        make_workspace(workspace, guarded_parameters(seed, weights))
        share_base(base, workspace)
        run_stages(workspace, {"evaluate-base"})
        runs[name] = mean_scores(evaluated(workspace, ROUND))
    return runs


def guarded_parameters(seed: int, weights: dict[str, float]) -> dict[str, Any]:
    """Returns the parameters of one arm, whose round is ROUND."""
    written = read_arms()
    params = parameters(seed, FREE, ["repaired"])
    params["task"]["train_prompts"] = written["prompts"]
    params["policy"]["base"]["warmup"]["updates"] = WARMUP_UPDATES
    set_judges(params, weights, SCALE, WATCHED, normalize="none")
    arm = params["arms"]["repaired"]
    arm["selection"] = []
    arm["curriculum"][0]["split_at_random"]["prompts_per_phase"] = written["prompts"]
    arm["sampling"] = {**arm["sampling"], "temperature": 1.0}
    arm["training"] = {**arm["training"], "iterations_per_round": written["iterations"]}
    return params


def judge_references(workspace: Path) -> pd.DataFrame:
    """Returns every judge's scores of the references of the evaluation's prompts."""
    params = read_params(workspace / "params.yaml")
    prompts = read_table(workspace / "artifacts" / "prompts" / "eval.parquet", PROMPTS)
    rule = RewardRule(
        judges=build_judges(params, DATA, "evaluation"),
        shaping=build_shaping(params).without_shaping(),
    )
    rollouts = prompts.assign(
        rollout_id=prompts["prompt_id"], text=prompts["answer"], steps=1, is_finished=True
    )
    judged = score_rollouts(rollouts, prompts, rule)
    return judged.merge(prompts[["prompt_id", "family"]], on="prompt_id", validate="1:1")


def evaluated(workspace: Path, name: str) -> pd.DataFrame:
    """Returns every judge's mean scores of sampled translations by prompt."""
    return read_table(workspace / "artifacts" / "evaluations" / f"{name}.parquet", EVALUATION)


def mean_scores(table: pd.DataFrame) -> Run:
    """Returns the mean of every judge's scores, and those of `length` by language."""
    lengths = table.groupby("family")["score.length"].mean()
    means = {each: float(table[f"score.{each}"].mean()) for each in WATCHED}
    return {**means, "length_by_language": lengths.to_dict()}


def summarize(runs: dict[str, dict[str, Run]]) -> dict[str, Any]:
    """Returns means over seeds with 95 % t intervals; differences are paired by seed."""
    seeds = list(runs.values())
    languages = list(seeds[0][BASE]["length_by_language"])
    return {
        arm: {
            **{
                each: {
                    "score": mean_interval([run[arm][each] for run in seeds]),
                    "change": mean_interval([run[arm][each] - run[BASE][each] for run in seeds]),
                }
                for each in WATCHED
            },
            "chrf_below_guarded": mean_interval(
                [run[GUARDED]["chrf"] - run[arm]["chrf"] for run in seeds]
            ),
            "length_over_references": {
                each: mean_interval([_length_over_references(run, arm, each) for run in seeds])
                for each in languages
            },
        }
        for arm in seeds[0]
    }


def _length_over_references(run: dict[str, Run], arm: str, language: str) -> float:
    own, other = (run[each]["length_by_language"][language] for each in (arm, REFERENCES))
    return float(own - other)


def scores_table(results: dict[str, Any]) -> str:
    """Returns the scores of the references, of the base and of each arm."""
    rows = [
        [arm, *(in_words(row[each]["score"], ".3f") for each in WATCHED)]
        for arm, row in results["summary"].items()
    ]
    return markdown_table(["policy", *WATCHED], rows)


def differences_table(results: dict[str, Any]) -> str:
    """Returns what arms lose in chrF++ against all guards, and their lengths by language."""
    summary = results["summary"]
    languages = summary[BASE]["length_over_references"]
    titles = ["policy", "guarded's chrf - its own", *(f"length, {each}" for each in languages)]
    rows = [
        [
            arm,
            in_words(row["chrf_below_guarded"]),
            *(in_words(each, "+.2f") for each in row["length_over_references"].values()),
        ]
        for arm, row in summary.items()
        if arm != REFERENCES
    ]
    return markdown_table(titles, rows)


if __name__ == "__main__":
    main()
