"""Summary of a run for the terminal and for programs: rewards, cost and seconds of each arm."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo.params.parameters import BASE, Parameters
from grpo.report.allocations import allocations_by_arm
from grpo.report.comparison import Comparison, Curve
from grpo.report.judges import correlate_judges
from grpo.report.numbers import (
    Numbers,
    compare_arms,
    compute_numbers,
    cost_of,
    counted_costs,
    defined,
    describe_influence,
)
from grpo.report.reading import KINDS_IN_BUDGET, Run, judge_scores, read_run
from grpo.report.seconds import missing_usages, read_usages, seconds_by_part, seconds_curves
from grpo.report.terminal import align, wrap
from grpo.report.verdict import can_judge, learned, saved
from grpo.runtime.artifacts.usage import Usage

SCORES = {"mean_at_k": "mean@{k}", "greedy": "greedy", "pass_at_k": "pass@{k}"}
ARM_WIDTH = 50  # of the table, in characters
DIGITS = 6  # decimal places of rates and seconds
SPACES = str.maketrans("\N{NO-BREAK SPACE}\N{NARROW NO-BREAK SPACE}", "  ")


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a summary is made of."""

    run: Run
    numbers: Numbers
    usages: Mapping[str, Usage]  # by measured stage
    seconds: Mapping[str, Curve]  # by arm; empty if a stage was not measured
    timed: Mapping[str, Comparison]  # by arm without the reference; costs are seconds


def read_summary(artifacts: Path, params: Parameters) -> Summary:
    """Returns the summary of a finished run and of the seconds measured in this workspace.

    Args:
      params: The parameters that the stages ran with.

    Raises:
      ArtifactError: If a file is missing, broken, or inconsistent with the others.
    """
    run = read_run(artifacts, params)
    usages = read_usages(params)
    seconds = seconds_curves(run, usages)
    return Summary(
        run=run,
        numbers=compute_numbers(run),
        usages=usages,
        seconds=seconds,
        timed=compare_arms(run, seconds) if seconds else {},
    )


def summarize(artifacts: Path, params: Parameters) -> str:
    """Returns what was learned and saved, a table of scores before and after, and the page's path.

    Lines are as wide as a terminal, but for a long path.

    Raises:
      ArtifactError: As `read_summary`.
    """
    summary = read_summary(artifacts, params)
    said = [wrap(each) for each in _sentences(summary)]
    titles = ["arm", "", BASE, "now", "gain"]
    rows = [row for arm in summary.run.arms for row in _changes(summary, arm)]
    table = align([titles, *rows], longest_first=ARM_WIDTH)
    page = (artifacts / "report" / "index.html").resolve()
    return "\n".join([*said, "", table, "", f"report: {page}"])


def describe(artifacts: Path, params: Parameters) -> dict[str, Any]:
    """Returns the content of `grpo summary --json`; docs/pipeline.md describes it.

    Raises:
      ArtifactError: As `read_summary`.
    """
    summary = read_summary(artifacts, params)
    run = summary.run
    of_learning, of_saving = _sentences(summary)
    return {
        "k": run.scores[BASE]["k"],
        "evaluation_prompts": len(run.rates),
        "confidence": run.params.evaluation.confidence,
        "reference": run.arms[0],
        "arms": {arm: _describe_arm(summary, arm) for arm in run.arms},
        "learned": of_learning,
        "saved": of_saving,
    }


def _describe_arm(summary: Summary, arm: str) -> dict[str, Any]:
    """Returns rewards, cost and seconds up to the arm's last policy."""
    run, usages = summary.run, summary.usages
    chain = run.chain(arm)
    cost, counted = cost_of(run, chain[-1], arm), counted_costs(run, chain[-1], arm)
    by_kind = {
        kind: int(sum(counted.loc[counted["kind"] == kind, "flops"])) for kind in KINDS_IN_BUDGET
    }
    gains = {
        name: _interval(run, asdict(each)) for name, each in summary.numbers.gains[arm].items()
    }
    missing = missing_usages(run, usages, arm)
    seconds = None if missing else seconds_by_part(run, usages, arm)
    timed = summary.timed.get(arm)
    return {
        "mean_at_k": {name: _interval(run, run.scores[name]["mean_at_k"]) for name in chain},
        "judges": {
            score: {name: _interval(run, run.scores[name][score]) for name in chain}
            for score in judge_scores(run.params)
        },
        "correlations": {
            " and ".join(pair): defined(each)
            for pair, each in correlate_judges(run, chain[-1]).items()
        },
        "influence": describe_influence(summary.numbers.influence[arm]),
        "gain_over_base": gains.pop("mean_at_k"),
        "other_gains_over_base": gains,
        "allocation": _describe_allocation(run, arm),
        "iterations": sum(len(run.iterations[name]) for name in chain[1:]),
        "updates": sum(len(run.updates[name]) for name in chain[1:]),
        "flops": {**by_kind, "total": cost["flops"]},
        "sampled_steps": cost["sampled_steps"],
        "trained_steps": cost["trained_steps"],
        "seconds": seconds and {part: round(each, DIGITS) for part, each in seconds.items()},
        "seconds_to_reference": timed and timed.cost and round(timed.cost, DIGITS),
        "stages_without_seconds": missing,
    }


def _describe_allocation(run: Run, arm: str) -> dict[str, Any] | None:
    """Returns what an arm allocated online; None if it does not."""
    each = allocations_by_arm(run).get(arm)
    if each is None:
        return None
    costs = {"expected_cost": each.expected_cost, "cost": each.cost} if each.cost_unit else {}
    return {
        "groups": each.groups,
        "rollouts": each.rollouts,
        "expected_mixed": round(each.expected_mixed, DIGITS),
        "mixed": round(each.mixed, DIGITS),
        "never_drawn": round(each.never_drawn, DIGITS),
        "effective_share": round(each.effective_share, DIGITS),
        "cost_unit": each.cost_unit,
        **costs,
    }


def _interval(run: Run, score: Mapping[str, Any]) -> dict[str, float | None]:
    """Returns a number and its interval, which is None if there are too few prompts for one."""
    bounds = score if can_judge(run) else {"low": None, "high": None}
    numbers = {"value": score["value"], "low": bounds["low"], "high": bounds["high"]}
    return {name: None if each is None else round(each, DIGITS) for name, each in numbers.items()}


def _sentences(summary: Summary) -> tuple[str, str]:
    """Returns what was learned and what was saved, with plain spaces."""
    run, numbers = summary.run, summary.numbers
    said = learned(run, numbers), saved(run, numbers, summary.seconds, summary.timed)
    return said[0].translate(SPACES), said[1].translate(SPACES)


def _changes(summary: Summary, arm: str) -> list[list[str]]:
    """Returns a row per score of an arm: before and after training, and the paired gain.

    Omits the interval of the gain if there are too few prompts for one.
    """
    run = summary.run
    before, after = run.scores[BASE], run.scores[run.chain(arm)[-1]]
    rows: list[list[str]] = []
    for score in (each for each in SCORES if each in run.score_names):
        name, gain = SCORES[score].format(k=after["k"]), summary.numbers.gains[arm][score]
        bounds = f"{gain.value:+.3f}"
        if can_judge(run):
            bounds += f" [{gain.low:+.3f}, {gain.high:+.3f}]"
        scores = [f"{each[score]['value']:.3f}" for each in (before, after)]
        rows.append(["" if rows else arm, name, *scores, bounds])
    return rows
