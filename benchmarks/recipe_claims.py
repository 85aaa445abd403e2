"""Returns what pages say of the runs of recipes, from the results of benchmarks.demo."""

from statistics import fmean
from typing import Any

from benchmarks.intervals import in_words, span

LANGUAGES = {
    "es": "Spanish",
    "fi": "Finnish",
    "sw": "Swahili",
    "hu": "Hungarian",
    "tr": "Turkish",
    "ja": "Japanese",
}
NOISIEST = ("tr", "ja")  # of the warm-up's pairs


def durations(results: dict[str, Any]) -> list[str]:
    """Returns the seconds of a run."""
    seconds, of_stages = (
        span([run[name] for run in results["runs"].values()])
        for name in ("pipeline_seconds", "stage_cpu_seconds")
    )
    return [f"took {seconds} seconds", f"stages took {of_stages} seconds of processor time"]


def glyphs(results: dict[str, Any]) -> list[str]:
    """Returns what docs/denoising.md says of flash and flow on images."""
    metrics = [run["metrics"] for run in results["runs"].values()]
    flash, flow = (metrics[0]["arms"][name]["cost"] for name in ("flash", "flow"))
    ahead = [
        in_words(each["comparisons"]["flash"]["difference_at_equal_flops"], ".3f")
        for each in metrics
    ]
    return [
        *durations(results),
        f"by {', '.join(ahead[:-1])} and {ahead[-1]}",
        f"for {flow['flops'] / flash['flops']:.1f} times the FLOPs",
        f"{flash['trained_steps']} trained steps against {flow['trained_steps']}",
    ]


def clips(results: dict[str, Any]) -> list[str]:
    """Returns what pages say of flash and flow on clips, the duration last."""
    arms = [run["metrics"]["arms"] for run in results["runs"].values()]
    gains = [
        100 * each["flash"]["gain_over_base"]["value"] / each["flow"]["gain_over_base"]["value"]
        for each in arms
    ]
    flops = _percent_of_flops(arms, "flash", "flow")
    return [
        f"{span(gains)} % of the gain with {span(flops)} % of the FLOPs",
        *durations(results),
    ]


def translation(results: dict[str, Any]) -> list[str]:
    """Returns two tables of docs/own-model.md, row by row, and the numbers of its findings."""
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
    others = [
        each[arm]["corpus"]["greedy"][language]["chrf"]
        - each["base"]["corpus"]["greedy"][language]["chrf"]
        for each in policies
        for arm in ("sgpo", "uniform")
        for language in set(LANGUAGES) - set(NOISIEST)
    ]
    flops = _percent_of_flops(policies, "sgpo", "uniform")
    return [
        *durations(results),
        *gains,
        *(f"| {name} | {' | '.join(row)} |" for name, row in zip(LANGUAGES.values(), corpora)),
        f"In the other languages it changes by {span(others, '.3f')}",
        f"at {span(flops)} % of its FLOPs",
    ]


def _percent_of_flops(arms: list[dict[str, Any]], own: str, other: str) -> list[float]:
    return [100 * each[own]["cost"]["flops"] / each[other]["cost"]["flops"] for each in arms]
