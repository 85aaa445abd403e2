"""Returns what pages say of the runs of recipes, from the results of benchmarks.demo."""

from statistics import fmean
from typing import Any

from benchmarks.demo import DEFAULT, RESULTS, percent_of_reference
from benchmarks.intervals import in_words, span
from grpo.report.words import listed
from grpo.runtime.artifacts.files import read_json
from grpo.runtime.markdown import markdown_table

MEASURED = (
    "reasoning-short",
    "reasoning-smollm2",
    "glyphs",
    "translation",
    "clips",
    "grounding",
    "manipulation-pixels",
)
LANGUAGES = {
    "es": "Spanish",
    "fi": "Finnish",
    "sw": "Swahili",
    "hu": "Hungarian",
    "tr": "Turkish",
    "ja": "Japanese",
}


def durations(results: dict[str, Any]) -> list[str]:
    """Returns the seconds of a run."""
    seconds, of_stages = (
        span([run[name] for run in results["runs"].values()])
        for name in ("pipeline_seconds", "stage_cpu_seconds")
    )
    return [f"took {seconds} seconds", f"stages took {of_stages} seconds of processor time"]


def seconds_of_seeds(results: dict[str, Any]) -> list[str]:
    """Returns how long a recipe's pipelines took, without set-up."""
    return [f"{span([run['pipeline_seconds'] for run in results['runs'].values()])} s"]


def costs_table(default: dict[str, Any]) -> str:
    """Returns what a run of each measured recipe takes, in the order of docs/recipes.md.

    Args:
      default: Results of params.yaml.
    """
    found = {str(DEFAULT): default}
    found |= {f"{name}.yaml": read_json(RESULTS / f"{name}.json") for name in MEASURED}
    rows = [
        [
            f"`{name}`",
            str(len(each["runs"])),
            span([run["stage_cpu_seconds"] / 60 for run in each["runs"].values()]),
            span([run["peak_bytes"] / 1e9 for run in each["runs"].values()], ".1f"),
            each["machine"]["processor"].removesuffix(" Processor"),
        ]
        for name, each in found.items()
    ]
    return markdown_table(
        ["recipe", "runs", "stages, CPU minutes", "peak memory of a stage, GB", "processor"], rows
    )


def glyphs(results: dict[str, Any]) -> list[str]:
    """Returns how far flash is ahead of flow at the FLOPs that flash spent, and the seconds."""
    found = [run["metrics"]["comparisons"]["flash"] for run in results["runs"].values()]
    ahead = [in_words(each["difference_at_equal_flops"], ".3f") for each in found]
    return [
        *durations(results),
        f"by {listed(ahead)}",
        f"`flash` spends {percent_of_flops(results, 'flash', 'flow')} % of the FLOPs of `flow`",
    ]


def clips(results: dict[str, Any]) -> list[str]:
    """Returns the seconds, and the FLOPs of flash."""
    return [
        *durations(results),
        f"for {percent_of_flops(results, 'flash', 'flow')} % of its FLOPs",
    ]


def percent_of_flops(results: dict[str, Any], arm: str, other: str) -> str:
    """Returns what an arm spends of another's FLOPs, over the seeds."""
    costs = [run["metrics"]["arms"] for run in results["runs"].values()]
    shares = [each[arm]["cost"]["flops"] / each[other]["cost"]["flops"] for each in costs]
    return span([100 * share for share in shares])


def stale_updates(results: dict[str, Any]) -> list[str]:
    """Returns the cost at which updates on fresh rollouts reach the reward of stale ones."""
    shares = percent_of_reference(results, "on_policy")
    flops, seconds = (
        span(shares[name].tolist()) for name in ("flops_to_reach", "seconds_to_reach")
    )
    return [f"after {flops} % of its FLOPs and {seconds} % of its seconds"]


def short_rollouts(results: dict[str, Any]) -> list[str]:
    """Returns what the page of results says of the two arms with short rollouts."""
    runs = [*results["runs"].values()]
    shares = percent_of_reference(results, "sgpo")
    flops, seconds, steps = (
        span(shares[name].tolist()) for name in ("flops", "seconds", "sampled_steps")
    )
    compared = [run["metrics"]["comparisons"]["sgpo"] for run in runs]
    equal = [each["difference_at_equal_flops"] for each in compared]
    computing = [_computing(run, "sgpo") / _whole(run, "uniform") for run in runs]
    start_up = {
        arm: span(
            [100 * run["seconds_of_arms"][arm]["start_up"] / _whole(run, arm) for run in runs],
            ".1f",
        )
        for arm in ("uniform", "sgpo")
    }
    return [
        f"differed from that of `uniform` by {listed([in_words(each) for each in equal])}",
        f"is {start_up['uniform']} % of the seconds of `uniform` and {start_up['sgpo']} % of those",
        f"spends {flops} % of `uniform`'s FLOPs and {seconds} % of its seconds",
        f"Sampling, judging and updates alone take {span([100 * each for each in computing])} %",
        f"it samples {steps} % of `uniform`'s steps",
    ]


def _computing(run: dict[str, Any], arm: str) -> float:
    """Returns the seconds of an arm's sampling, judging and updates."""
    spent = run["seconds_of_arms"][arm]
    return float(spent["sampling"] + spent["judging"] + spent["update"])


def _whole(run: dict[str, Any], arm: str) -> float:
    return float(run["seconds_of_arms"][arm]["total"])


def translation(results: dict[str, Any]) -> list[str]:
    """Returns the seconds, and two tables of docs/own-model.md row by row."""
    metrics = {seed: run["metrics"] for seed, run in results["runs"].items()}
    policies = [{"base": each["base"], **each["arms"]} for each in metrics.values()]
    gains = [
        f"| {seed} | {name} | {in_words(gain['score.chrf'], '.3f')} |"
        f" {in_words(gain['greedy_score.chrf'], '.3f')} |"
        for seed, each in metrics.items()
        for name, arm in each["arms"].items()
        for gain in [arm["other_gains_over_base"]]
    ]
    corpora = [
        [
            f"{fmean(each[name]['corpus'][how][language]['chrf'] for each in policies):.3f}"
            for how in ("sampled", "greedy", "beam")
            for name in policies[0]
        ]
        for language in LANGUAGES
    ]
    return [
        *durations(results),
        f"at {percent_of_flops(results, 'sgpo', 'uniform')} % of its FLOPs",
        *gains,
        *_by_language(metrics),
        *(f"| {name} | {' | '.join(row)} |" for name, row in zip(LANGUAGES.values(), corpora)),
    ]


def _by_language(metrics: dict[str, Any]) -> list[str]:
    """Returns how greedy chrF++ of each corpus changes, and how far beam search is from it."""
    greedy = {
        seed: {
            language: [
                arm["corpus"]["greedy"][language]["chrf"] - base["chrf"]
                for arm in each["arms"].values()
            ]
            for language, base in each["base"]["corpus"]["greedy"].items()
        }
        for seed, each in metrics.items()
    }
    of_corpora = {seed: each["arms"]["sgpo"]["corpus"] for seed, each in metrics.items()}
    beam = {
        language: [
            each["beam"][language]["chrf"] - each["greedy"][language]["chrf"]
            for each in of_corpora.values()
        ]
        for language in ("tr", "ja")
    }
    others = [
        change
        for each in greedy.values()
        for language, changes in each.items()
        if language not in ("tr", "ja")
        for change in changes
    ]
    turkish = [change for each in greedy.values() for change in each["tr"]]
    japanese = [f"{span(each['ja'], '+.2f')} on seed {seed}" for seed, each in greedy.items()]
    return [
        f"most in Turkish, {span(turkish, '+.2f')}",
        f"In Japanese it gains {listed(japanese)}",
        f"in the other languages it changes by {span(others, '+.2f')}",
        *(
            f"({listed([format(each, '+.2f') for each in beam[language]])}"
            for language in ("tr", "ja")
        ),
    ]
