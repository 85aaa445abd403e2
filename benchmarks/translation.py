"""Measures reference-free GRPO for translation: as published, repaired and composed.

python -m benchmarks.translation 0 1 2 3 4   # runs missing stages, then writes the results
python -m benchmarks.translation             # writes table and figure from the results

The arms are in translation.yaml and were chosen on seeds 100 and above. All arms of a seed start
from the same base policy. The runs of a seed are under .work/ and resume after an interruption;
remove that folder after a change of code. Writes results/translation_methods.json and
docs/translation.svg.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy import stats

from benchmarks.demo import ROOT
from benchmarks.figures import save_figure
from benchmarks.intervals import in_words, mean_interval, span
from benchmarks.seeds import record_seeds
from benchmarks.workspaces import make_workspace, round_seconds, run_stages
from grpo.params.parameters import read_params
from grpo.params.recipes import read_content
from grpo.params.yaml import parse_yaml
from grpo.report.style import styled
from grpo.runtime.artifacts.files import read_json
from grpo.runtime.markdown import markdown_table
from grpo.wiring.allocation import reads_profile

ARMS = Path(__file__).with_suffix(".yaml")
RECIPE = ROOT / "recipes" / "translation.yaml"
FIGURE = ROOT / "docs" / "translation.svg"
WORK = ROOT / ".work" / "translation"
FREE = "back_parsing"  # the judge that reads no reference
SCORES = {"mean": "score.chrf", "greedy": "greedy_score.chrf"}  # chrF++ with the reference
REWARDS = {"mean": f"score.{FREE}", "greedy": f"greedy_score.{FREE}"}
SHARED = ("prompts", "policies/base", "training/base")  # of a seed's workspaces
BASE = "base"
PAIRS = (("repaired", "published"), ("composed", "repaired"), ("references", "repaired"))
Run = dict[str, Any]


def main() -> None:
    """Runs the given seeds and writes the results of all finished seeds."""
    results = record_seeds(
        "translation",
        read_arms(),
        run_seed,
        lambda runs: {"summary": summarize(runs)},
        results_name="translation_methods",  # translation.json has the runs of the recipe
    )
    save_figure(draw(results), FIGURE)
    print(gains_table(results), languages_table(results), pairs_table(results), sep="\n\n")


def read_arms() -> dict[str, Any]:
    """Returns the file of arms."""
    found: dict[str, Any] = parse_yaml(ARMS.read_text())
    return found


def run_seed(seed: int) -> dict[str, Run]:
    """Returns scores, cost and temperatures of the base policy and of every arm."""
    runs = dict[str, Run]()
    by_judge = dict[str, list[str]]()
    for name, arm in read_arms()["arms"].items():
        by_judge.setdefault({**read_arms()["shared"], **arm}["judge"], []).append(name)
    first: Path | None = None
    for judge, arms in by_judge.items():
        workspace = WORK / str(seed) / judge
        params = parameters(seed, judge, arms)
        make_workspace(workspace, params)
        if first is not None:
            share_base(first, workspace)
            share_evaluation(first, workspace)
        cpu_seconds = run_stages(workspace)
        first = first or workspace
        runs |= {name: run_of(workspace, name, cpu_seconds) for name in arms}
    assert first is not None
    return {BASE: scores_of(first, BASE), **{name: runs[name] for name in read_arms()["arms"]}}


def parameters(seed: int, judge: str, arms: list[str]) -> dict[str, Any]:
    """Returns the recipe's parameters with some arms of this benchmark, each of one round."""
    written = read_arms()
    params: dict[str, Any] = read_content(RECIPE)
    params |= {"seed": seed, "arms": {}, "rounds": {}}
    params["task"] |= written["task"]
    params["policy"]["base"]["warmup"] |= written["warmup"]
    params["reward"]["judges"][0]["judge"] = judge
    for name in arms:
        arm = {**written["shared"], **written["arms"][name]}
        del arm["judge"]
        params["arms"][name] = arm
        params["rounds"][f"{name}-1"] = {"arm": name, "start": BASE, "phase": 1}
    if judge != FREE:  # the scores of a reward's judge are evaluated anyway
        params["evaluation"]["judges"][0]["judge"] = FREE
        params["reward"]["maximize"] = "score"
    return params


def set_judges(
    params: dict[str, Any],
    weights: dict[str, float],
    score_ranges: dict[str, list[float]],
    names: Iterable[str],
    *,
    normalize: str,
) -> None:
    """Sets a reward of weighted judges; the other judges are in the evaluation, without beams."""
    reward, evaluation = params["reward"], params["evaluation"]
    reward |= {"judges": [], "maximize": "score"}
    evaluation["judges"] = []
    for name in names:
        judge = {"judge": name, "model": None, "score_range": score_ranges.get(name)}
        if name in weights:
            reward["judges"].append({**judge, "weight": weights[name], "normalize": normalize})
        else:
            evaluation["judges"].append(judge)
    evaluation["sampling"]["beams"] = 1


def share_base(source: Path, target: Path) -> None:
    """Copies prompts and base policy to another workspace."""
    for name in SHARED:
        shutil.copytree(
            source / "artifacts" / name, target / "artifacts" / name, dirs_exist_ok=True
        )


def share_evaluation(source: Path, target: Path) -> None:
    """Copies the evaluation of the base policy to another workspace."""
    (target / "artifacts" / "evaluations").mkdir(exist_ok=True)
    for path in (source / "artifacts" / "evaluations").glob(f"{BASE}.*"):
        shutil.copyfile(path, target / "artifacts" / "evaluations" / path.name)


def run_of(workspace: Path, arm: str, cpu_seconds: dict[str, float]) -> Run:
    """Returns the scores of an arm's policy, and its cost, with that of a profile it reads."""
    artifacts, name = workspace / "artifacts", f"{arm}-1"
    parts = [f"rollouts/{name}", f"training/{name}"]
    if reads_profile(read_params(workspace / "params.yaml"), arm):
        parts.insert(0, "profile")
    costs = [read_json(artifacts / part / "summary.json")["cost"] for part in parts]
    updates = pd.read_csv(artifacts / "training" / name / "updates.csv")
    records = [artifacts / "training" / name, *(artifacts / "training" / name).glob("iteration-*")]
    levels = [each / "sampling.json" for each in sorted(records)]
    return {
        **scores_of(workspace, name),
        "cost": {key: sum(each[key] for each in costs) for key in costs[0]},
        "cpu_seconds": round_seconds(workspace, cpu_seconds, name).total
        + (cpu_seconds["profile"] if len(parts) == 3 else 0.0),
        "temperatures": [read_json(each)["temperature"] for each in levels if each.exists()],
        "reward_by_update": updates["reward_mean"].round(4).tolist(),
        "clip_fraction": float(updates["clip_fraction"].mean()),
        "uniform_groups": float(updates["uniform_group_fraction"].mean()),
        "ratio_max": float(updates["ratio_max"].max()),
        "ratio_min": float(updates["ratio_min"].min()),
    }


def scores_of(workspace: Path, name: str) -> Run:
    """Returns chrF++ and reward by language, and their correlation over evaluation prompts."""
    table = pd.read_parquet(workspace / "artifacts" / "evaluations" / f"{name}.parquet")
    columns = {**{f"chrf_{key}": each for key, each in SCORES.items()}}
    columns |= {f"reward_{key}": each for key, each in REWARDS.items()}
    named = table.rename(columns={each: key for key, each in columns.items()})
    by_language = named.groupby("family")[list(columns)].mean()
    return {
        **{key: float(named[key].mean()) for key in columns},
        "languages": by_language.to_dict("index"),
        "correlation": {
            "prompts": _correlation(named["reward_mean"], named["chrf_mean"]),
            "greedy": _correlation(named["reward_greedy"], named["chrf_greedy"]),
            "within_languages": _correlation(
                *(
                    named[key] - named.groupby("family")[key].transform("mean")
                    for key in ("reward_mean", "chrf_mean")
                )
            ),
        },
    }


def _correlation(reward: pd.Series, chrf: pd.Series) -> float | None:
    """Returns Pearson's correlation; None if a side is constant."""
    if reward.nunique() < 2 or chrf.nunique() < 2:
        return None
    return float(np.corrcoef(reward, chrf)[0, 1])


def summarize(
    runs: dict[str, dict[str, Run]], pairs: Iterable[tuple[str, str]] = PAIRS
) -> dict[str, Any]:
    """Returns gains over the base and differences of arms, paired by seed, with t intervals."""
    seeds = list(runs.values())
    arms = [name for name in seeds[0] if name != BASE]
    languages = list(seeds[0][BASE]["languages"])
    gains = {
        arm: {
            **{
                f"chrf_{key}": mean_interval([gain(run, arm, key) for run in seeds])
                for key in SCORES
            },
            "reward_mean": mean_interval(
                [run[arm]["reward_mean"] - run[BASE]["reward_mean"] for run in seeds]
            ),
            "languages": {
                language: {
                    f"chrf_{key}": mean_interval([gain(run, arm, key, language) for run in seeds])
                    for key in SCORES
                }
                for language in languages
            },
            "base_and_gain": [rank_of(run, arm) for run in seeds],
            "flops": mean_interval([run[arm]["cost"]["flops"] for run in seeds]),
            "correlation_of_prompts": mean_interval(
                [run[arm]["correlation"]["prompts"] for run in seeds]
            ),
        }
        for arm in arms
    }
    return {
        "gains": gains,
        "differences": {
            f"{own} - {other}": {
                f"chrf_{key}": mean_interval(
                    [gain(run, own, key) - gain(run, other, key) for run in seeds]
                )
                for key in SCORES
            }
            | {
                "reward_mean": mean_interval(
                    [run[own]["reward_mean"] - run[other]["reward_mean"] for run in seeds]
                )
            }
            for own, other in pairs
            if own in arms and other in arms
        },
        "correlation_of_base": mean_interval(
            [run[BASE]["correlation"]["prompts"] for run in seeds]
        ),
    }


def gain(run: dict[str, Run], arm: str, score: str, language: str | None = None) -> float:
    """Returns the gain of an arm in chrF++ over the base policy of its seed."""
    after, before = run[arm], run[BASE]
    if language is not None:
        after, before = after["languages"][language], before["languages"][language]
    difference: float = after[f"chrf_{score}"] - before[f"chrf_{score}"]
    return difference


def rank_of(run: dict[str, Run], arm: str, *, of_room: bool = False) -> float:
    """Returns the rank correlation over languages of the base's mean chrF++ and the gain.

    Args:
      of_room: Of the gain as a share of the base's distance to 1.
    """
    languages = run[BASE]["languages"]
    base = [each["chrf_mean"] for each in languages.values()]
    gains = [gain(run, arm, "mean", language) for language in languages]
    if of_room:
        gains = [each / (1 - before) for each, before in zip(gains, base)]
    return float(stats.spearmanr(base, gains).statistic)


def draw(results: dict[str, Any]) -> Figure:
    """Returns a plot of the gain of each arm by language, sampled and greedy."""
    gains = results["summary"]["gains"]
    languages = list(next(iter(gains.values()))["languages"])
    with styled():
        figure = Figure(figsize=(11.5, 4.2), layout="constrained")
        for axes, (key, title) in zip(
            figure.subplots(1, 2), (("mean", "mean@8"), ("greedy", "greedy"))
        ):
            for index, (arm, row) in enumerate(gains.items()):
                found = [row["languages"][each][f"chrf_{key}"] for each in languages]
                values = np.array([each["value"] for each in found])
                ends = [
                    [each[side] if each[side] is not None else each["value"] for each in found]
                    for side in ("low", "high")
                ]
                reach = np.abs(np.array(ends) - values)
                places = np.arange(len(languages)) + 0.14 * (index - (len(gains) - 1) / 2)
                axes.errorbar(places, values, reach, fmt="o", label=arm, color=f"C{index}")
            axes.axhline(0, color="0.6", linewidth=0.8)
            axes.set_xticks(range(len(languages)), languages)
            axes.set_ylabel(f"gain in chrF++, {title}")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def gains_table(results: dict[str, Any]) -> str:
    """Returns the gain of each arm over all languages, with its cost."""
    titles = ["arm", "chrF++, mean@8", "chrF++, greedy", "reward, mean@8", "GFLOPs"]
    titles += ["correlation of reward and chrF++", "rank correlation of base and gain", "by seed"]
    rows = [
        [
            arm,
            *(in_words(row[key]) for key in ("chrf_mean", "chrf_greedy", "reward_mean")),
            f"{row['flops']['value'] / 1e9:.0f}",
            f"{row['correlation_of_prompts']['value']:.2f}",
            *_mean_and_each(row["base_and_gain"]),
        ]
        for arm, row in results["summary"]["gains"].items()
    ]
    return markdown_table(titles, rows)


def _mean_and_each(ranks: list[float]) -> tuple[str, str]:
    """Returns the mean of correlations with its interval, and each of them."""
    return in_words(mean_interval(ranks), "+.2f"), ", ".join(f"{each:+.2f}" for each in ranks)


def languages_table(results: dict[str, Any]) -> str:
    """Returns the gain in chrF++ (mean@8, then greedy) of each arm by language."""
    gains, runs = results["summary"]["gains"], results["runs"].values()
    languages = list(next(iter(gains.values()))["languages"])
    rows = list[list[str]]()
    for key, title in (("mean", "mean@8"), ("greedy", "greedy")):
        base = [
            f"{np.mean([run[BASE]['languages'][each][f'chrf_{key}'] for run in runs]):.3f}"
            for each in languages
        ]
        rows.append([title, "base", *base])
        for arm, row in gains.items():
            cells = [in_words(row["languages"][each][f"chrf_{key}"]) for each in languages]
            rows.append([title, arm, *cells])
    return markdown_table(["chrF++", "policy", *languages], rows)


def pairs_table(results: dict[str, Any]) -> str:
    """Returns the differences between arms, paired by seed."""
    rows = [
        [name, *(in_words(row[f"chrf_{key}"]) for key in SCORES)]
        for name, row in results["summary"]["differences"].items()
    ]
    return markdown_table(["difference", "chrF++, mean@8", "chrF++, greedy"], rows)


def claims(results: dict[str, Any]) -> list[str]:
    """Returns the numbers of the text of docs/translation.md, and its table of the base."""
    runs, gains = list(results["runs"].values()), results["summary"]["gains"]
    scores = {
        key: f"{np.mean([run[BASE][key] for run in runs]):.3f}"
        for key in ("chrf_mean", "chrf_greedy", "reward_mean")
    }
    flops = {arm: row["flops"]["value"] for arm, row in gains.items()}
    seconds = [run[arm]["cpu_seconds"] for run in runs for arm in gains]
    by = span([row["chrf_mean"]["value"] for row in gains.values()], ".2f")
    difference = results["summary"]["differences"]["composed - repaired"]["chrf_mean"]
    rewards = [run[BASE]["reward_mean"] for run in runs]
    after = [np.mean([run[arm]["chrf_mean"] for run in runs]) for arm in gains]
    shares = [
        100
        * np.mean([gain(run, arm, "mean", name) for run in runs])
        / np.mean([1 - run[BASE]["languages"][name]["chrf_mean"] for run in runs])
        for arm in gains
        for name in runs[0][BASE]["languages"]
    ]
    of_shares = [float(np.mean([rank_of(run, arm, of_room=True) for run in runs])) for arm in gains]
    warmest = [max(run[arm]["temperatures"], default=0.0) for run in runs for arm in gains]
    time = np.mean([run["composed"]["cpu_seconds"] for run in runs])
    other = np.mean([run["repaired"]["cpu_seconds"] for run in runs])
    ranks = [each for row in gains.values() for each in row["base_and_gain"]]
    clipped = [100 * run[arm]["clip_fraction"] for run in runs for arm in ("repaired", "published")]
    return [
        f"for at most {max(clipped):.2f} % of the steps",
        f"It is {max(ranks):.2f} or less for every arm and seed",
        f"from {scores['chrf_mean']} by {by} on average over languages",
        f"After training it is {span(after, '.3f')}, still below the {scores['chrf_greedy']} of",
        f"each language gains {span(shares)} % of its distance to 1",
        "the mean rank correlation of this share with the base's mean@8 is"
        f" {span(of_shares, '+.2f')}",
        f"It reached {span([each for each in warmest if each > 1], '.2f')} here",
        f"{100 * time / other:.0f} % of its processor time",
        f"The training of an arm took {span(seconds)} s of processor time",
        "chrF++ {chrf_mean} (mean@8), {chrf_greedy} (greedy) and reward {reward_mean}".format(
            **scores
        ),
        f"The mean reward of the bases is {span(rewards, '.3f')}",
        f"needs {100 * flops['repaired'] / flops['published']:.0f} % of the FLOPs of `published`",
        f"takes {100 * flops['composed'] / flops['repaired']:.0f} % of the FLOPs of `repaired`",
        f"It gains {-difference['value']:.3f} less, and the lower end of the interval is"
        f" {difference['low']:.3f}",
    ]


if __name__ == "__main__":
    main()
