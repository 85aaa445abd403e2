"""Returns what pages say of the runs of recipes, from the results of benchmarks.demo."""

from statistics import fmean
from typing import Any

from benchmarks.demo import DEFAULT, RESULTS
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
    return [*durations(results), f"by {listed(ahead)}"]


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
        *gains,
        *(f"| {name} | {' | '.join(row)} |" for name, row in zip(LANGUAGES.values(), corpora)),
    ]
