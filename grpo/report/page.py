"""Writes the report page: one self-contained HTML file that opens offline."""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from grpo.errors import ArtifactError
from grpo.params.parameters import BASE, Parameters
from grpo.params.yaml import dump_yaml
from grpo.report.allocations import read_allocations
from grpo.report.audits import Audited, audit_sentences, audits_by_arm, audits_by_round
from grpo.report.browsing import (
    LARGEST_BYTES,
    embed_json,
    first_part,
    read_prompts_to_browse,
)
from grpo.report.comparison import Comparison, Interval
from grpo.report.diverged import add_banners, draw_diverged, read_diverged
from grpo.report.figures import draw_figures
from grpo.report.judges import correlate_judges
from grpo.report.learned import find_empty_results
from grpo.report.numbers import (
    Change,
    Numbers,
    changes_by_family,
    compare_arms,
    compute_numbers,
    cost_of,
    counted_costs,
)
from grpo.report.origin import read_origin
from grpo.report.provenance import CompletedRun, find_completed_run
from grpo.report.reading import Run, judge_scores, read_run
from grpo.report.revisions import measure_revisions
from grpo.report.samples import read_samples
from grpo.report.seconds import read_usages, seconds_curves, stages_of
from grpo.report.side_by_side import read_sheets
from grpo.report.style import MARK_COLORS, PAGE_COLORS, css_color_of
from grpo.report.tiles import make_tiles
from grpo.report.verdict import (
    can_judge,
    compute_needed,
    final_difference,
    headline_seconds,
    is_certain,
    verdict,
)
from grpo.report.words import (
    format_bytes,
    format_change,
    format_count,
    format_flops,
    format_percent,
    format_rate,
    format_seconds,
    format_selection,
    format_temperatures,
)
from grpo.runtime.artifacts.files import remove, write_bytes
from grpo.runtime.artifacts.marks import Banner, clear, hash_inputs, marked
from grpo.runtime.artifacts.usage import Usage
from grpo.sampling.evaluation import LEAST_PROMPTS
from grpo.wiring.checks import findings

TEMPLATE = Path(__file__).with_name("page.html")
ROLLOUTS = TEMPLATE.with_name("rollouts.html")  # beside the page, if it cannot hold all prompts
SCRIPT = TEMPLATE.with_name("page.js")
DIVERGED = Path(__file__).with_name("diverged.html")  # used while there is no result
PAGE = "index.html"
HEAT_PERCENT = 40  # largest share of color in the background of a cell
COLORS = {**PAGE_COLORS, **MARK_COLORS}  # light and dark by CSS variable


def write_page(
    artifacts: Path, params: Parameters, out: Path, banners: Sequence[Banner] = ()
) -> None:
    """Writes `out`/index.html from the artifacts of a finished run and the usage under `.runs/`.

    If training diverged before the run finished, the page shows the reason and the curves so far.

    Args:
      params: The parameters that the stages ran with.
      banners: Warnings to show in red at the top.

    Raises:
      ArtifactError: If a file is missing, broken, or inconsistent with the others.
    """
    # Hashed before the artifacts are read, so that a concurrent change is detected.
    inputs = hash_inputs(artifacts)
    diverged = read_diverged(params)
    banners = add_banners(diverged, banners)
    curves = draw_diverged(diverged)
    try:
        run = read_run(artifacts, params)
    except ArtifactError as error:
        if not diverged:
            raise
        arms = [arm for arm in params.arms if params.rounds_of(arm)]
        shown = {"arms": arms, "banners": banners, "inputs": json.dumps(inputs), "figures": curves}
        _write(out, DIVERGED, {**shown, "missing": str(error)})
        return
    numbers = compute_numbers(run)
    usages = read_usages(params)
    seconds = seconds_curves(run, usages)
    browsed = read_prompts_to_browse(artifacts, run)
    within = first_part(browsed, LARGEST_BYTES)
    timed = compare_arms(run, seconds) if seconds else {}
    content = {
        "arms": run.arms,
        "banners": [*banners, *find_empty_results(artifacts, params)],
        "inputs": json.dumps(inputs),
        "confidence": format_percent(params.evaluation.confidence),
        "k": run.scores[BASE]["k"],
        "has_greedy": "greedy" in run.score_names,
        "prompts": len(run.rates),
        "can_judge": can_judge(run),
        "resamples": format_count(params.evaluation.bootstrap_resamples),
        "verdict": verdict(run, numbers, seconds, timed),
        "details": _details(run, numbers, timed),
        "tiles": make_tiles(run, numbers, seconds, timed),
        "summary": _summary(run, numbers),
        "families": _families(run),
        "audits": _audits(run),
        "judges": _judges(run, numbers),
        "correlations": _correlations(run),
        "corpora": _corpora(run),
        "influences": _influences(run, numbers),
        "revisions": _revisions(run),
        "allocations": _allocations(run),
        "figures": [*curves, *draw_figures(run, numbers, usages=usages, seconds=seconds)],
        "findings": [
            {"severity": each.severity.name, "path": each.path, "sentence": each.sentence}
            for each in findings(params)
        ],
        "has_seconds": bool(seconds),
        "phases": params.modality.phases(params.policy),
        "has_iterations": any(len(each) > 1 for each in run.iterations.values()),
        "rounds": _rounds(run, numbers),
        "samples": read_samples(artifacts, run),
        "sheets": read_sheets(artifacts, run),
        "origin": read_origin(params),
        "browsed": embed_json(within) if within["prompts"] else "",
        "num_browsed": len(within["prompts"]),
        "has_more": len(within["prompts"]) < len(browsed["prompts"]),
        "stages": _stages(run, usages),
        "parameters": dump_yaml(params.model_dump(mode="json")),
    }
    _write(out, TEMPLATE, content)
    if content["has_more"]:
        every = {"browsed": embed_json(browsed), "num_browsed": len(browsed["prompts"])}
        _write(out, ROLLOUTS, {**content, **every, "has_more": False}, name=ROLLOUTS.name)
    else:
        remove(out / ROLLOUTS.name)


def _write(out: Path, template: Path, content: Mapping[str, Any], *, name: str = PAGE) -> None:
    script = SCRIPT.read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = (
        _environment()
        .get_template(template.name)
        .render(colors=COLORS, script=script, script_digest=digest, **content)
    )
    write_bytes(out / name, text.encode())


def redraw_page(artifacts: Path) -> CompletedRun:
    """Rewrites the page of the completed run and removes the marks that became outdated.

    Raises:
      GrpoError: If the page cannot be written; the existing page then gets a mark with the reason.
    """
    out = artifacts / "report"
    with marked("report", []):
        ran = find_completed_run()
        write_page(artifacts, ran.params, out, ran.banners)
        clear(ran.outdated_marks)
    return ran


def _environment() -> Environment:
    """Returns an environment that escapes all values and rejects undefined names."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATE.parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"rate": format_rate, "count": format_count, "change": format_change}
    return environment


def _details(run: Run, numbers: Numbers, timed: Mapping[str, Comparison]) -> list[str]:
    """Returns the sentences below the verdict."""
    needed = [compute_needed(each) for each in numbers.comparisons.values()]
    ends = [final_difference(run, each) for each in numbers.comparisons.values()]
    seconds_said = [headline_seconds(run, each) for each in timed.values()]
    return [*filter(None, needed), *ends, *seconds_said, *audit_sentences(audits_by_arm(run))]


def _summary(run: Run, numbers: Numbers) -> list[dict[str, Any]]:
    """Returns the rows of the top table: the base, then the last policy of each arm."""
    base = {name: _interval(run, run.scores[BASE][name]) for name in run.score_names}
    rows: list[dict[str, Any]] = [{"name": "base", "color": None, "scores": base}]
    for i, arm in enumerate(run.arms):
        last = run.chain(arm)[-1]
        cost, counted = cost_of(run, last, arm), counted_costs(run, last, arm)
        comparison = numbers.comparisons.get(arm)
        rows.append(
            {
                "name": arm,
                "color": css_color_of(i),
                "scores": {
                    name: _interval(run, run.scores[last][name]) for name in run.score_names
                },
                "gains": {
                    name: _format_gain(run, numbers.gains[arm][name]) for name in run.score_names
                },
                "flops": format_flops(float(cost["flops"])),
                "sampled_steps": cost["sampled_steps"],
                "profile_steps": sum(counted.loc[counted["kind"] == "profile", "sampled_steps"]),
                "trained_steps": cost["trained_steps"],
                "judge_calls": cost["judge_calls"],
                "saving": _format_saving(run, comparison),
            }
        )
    return rows


def _families(run: Run) -> list[dict[str, Any]]:
    """Returns the rows of the heat table: a policy with a cell per family.

    The share of color in a cell is HEAT_PERCENT for the largest change of the table.
    """
    found = changes_by_family(run)
    largest = max(abs(each.change.value) for row in found.values() for each in row.values()) or 1.0

    def cell(each: Change) -> dict[str, Any]:
        low, high = each.change.low, each.change.high
        assert low is not None
        assert high is not None
        can_tell = each.prompts >= LEAST_PROMPTS
        return {
            "value": each.value,
            "prompts": each.prompts,
            "change": each.change.value,
            "bounds": f"{format_change(low)} to {format_change(high)}" if can_tell else "",
            "is_certain": can_tell and is_certain(each.change),
            "color": "blue" if each.change.value > 0 else "orange",
            "percent": round(HEAT_PERCENT * abs(each.change.value) / largest),
        }

    arms = {name: run.params.rounds[name].arm for name in run.params.rounds}
    return [
        {
            "policy": name,
            "color": css_color_of(run.arms.index(arms[name])) if name in arms else None,
            "cells": {family: cell(each) for family, each in row.items()},
        }
        for name, row in found.items()
    ]


def _interval(run: Run, score: Mapping[str, float]) -> dict[str, str]:
    """Returns a score, with its bounds if there are enough prompts for an interval."""
    parts = ("value", "low", "high") if can_judge(run) else ("value",)
    return {part: format_rate(score[part]) for part in parts}


def _format_gain(run: Run, gain: Interval) -> dict[str, str]:
    assert gain.low is not None
    assert gain.high is not None
    if not can_judge(run):
        return {"value": format_change(gain.value)}
    return {
        "value": format_change(gain.value),
        "low": format_change(gain.low),
        "high": format_change(gain.high),
    }


def _format_saving(run: Run, comparison: Comparison | None) -> dict[str, str]:
    """Returns the saving and a note about its certainty; a dash for the reference arm."""
    if comparison is None:
        return {"value": "\N{EM DASH}", "note": "reference"}
    if not comparison.reference_improved:
        return {"value": "\N{EM DASH}", "note": "no target to reach"}
    share = format_percent(comparison.reached_fraction)
    saving = comparison.saving_fraction
    if saving is None and not can_judge(run):
        return {"value": "never", "note": "too few prompts to judge"}
    if saving is None:
        return {"value": "never", "note": f"in {share} of resamples"}
    amount = f"{format_percent(abs(saving.value))} {'less' if saving.value >= 0 else 'more'}"
    if not can_judge(run):
        return {"value": amount, "note": "too few prompts to judge"}
    certain = "" if is_certain(saving) else "not certain; "
    return {"value": amount, "note": f"{certain}in {share} of resamples"}


def _rounds(run: Run, numbers: Numbers) -> list[dict[str, Any]]:
    """Returns one row per arm and policy on the arm's chain."""
    return [
        {
            "arm": each["arm"],
            "policy": each["round"],
            "color": css_color_of(run.arms.index(each["arm"])),
            "sampling": _format_sampling(run, each["round"]),
            "flops": format_flops(float(each["flops"])),
            "scores": {
                name: _interval(run, run.scores[each["round"]][name]) for name in run.score_names
            },
        }
        for each in numbers.reward_by_cost.to_dict("records")
    ]


def _audits(run: Run) -> list[dict[str, Any]]:
    """Returns one row per audited round."""

    def row(name: str, each: Audited) -> dict[str, Any]:
        return {
            "round": name,
            "color": css_color_of(run.arms.index(run.params.rounds[name].arm)),
            "audits": each.audits,
            "cosine": format_rate(each.cosine),
            "lowest_cosine": format_rate(each.lowest_cosine),
            "norm_ratio": format_rate(each.norm_ratio),
            "flops": format_flops(float(each.flops)) if each.flops else "none",
        }

    return [row(name, each) for name, each in audits_by_round(run).items()]


def _judges(run: Run, numbers: Numbers) -> list[dict[str, Any]]:
    """Returns one row per judge and kind of decoding: its mean score of the base and each arm."""
    return [
        {
            "title": title,
            "base": _interval(run, run.scores[BASE][name]),
            "arms": [
                {
                    "score": _interval(run, run.scores[run.chain(arm)[-1]][name]),
                    "gain": _format_gain(run, numbers.gains[arm][name]),
                }
                for arm in run.arms
            ],
        }
        for name, title in judge_scores(run.params).items()
    ]


def _ends(run: Run) -> list[str]:
    """Returns the base and the last policy of each arm, as the rows of `_summary`."""
    return [BASE, *(run.chain(arm)[-1] for arm in run.arms)]


def _correlations(run: Run) -> list[dict[str, Any]]:
    """Returns one row per judge of the reward and judge of the evaluation only."""
    found = [correlate_judges(run, each) for each in _ends(run)]
    return [
        {"title": " and ".join(pair), "cells": [format_rate(each[pair]) for each in found]}
        for pair in found[0]
    ]


def _corpora(run: Run) -> list[dict[str, Any]]:
    """Returns one row per metric of a corpus, family and kind of decoding."""
    found = [run.scores[each].get("corpus", {}) for each in _ends(run)]
    return [
        {
            "title": f"{metric} of {family}, {kind}",
            "cells": [format_rate(each[kind][family][metric]) for each in found],
        }
        for kind, by_family in found[0].items()
        for family, metrics in by_family.items()
        for metric in metrics
    ]


def _influences(run: Run, numbers: Numbers) -> list[dict[str, str]]:
    """Returns one row per arm and judge of the reward; none if there is only one judge."""
    return [
        {
            "arm": arm,
            "color": css_color_of(index),
            "judge": each.judge,
            "first": format_rate(each.first_mean),
            "last": format_rate(each.last_mean),
            "spread": format_rate(each.spread),
            "share": format_percent(each.share),
        }
        for index, arm in enumerate(run.arms)
        for each in numbers.influence[arm]
    ]


def _revisions(run: Run) -> list[dict[str, str]]:
    """Returns one row per round that revises first answers."""
    return [
        {
            "round": name,
            "color": css_color_of(run.arms.index(run.params.rounds[name].arm)),
            "asked": format_percent(each.asked),
            "malformed": format_percent(each.malformed),
            "first_error": format_rate(each.first_error),
            "error": format_rate(each.error),
            "better": format_percent(each.better),
            "improvement": format_rate(each.improvement),
            "drift": format_change(each.drift),
        }
        for name, each in measure_revisions(run).items()
    ]


def _allocations(run: Run) -> list[dict[str, str]]:
    """Returns one row per round whose prompts or group sizes were allocated online."""

    def cost(amount: float, unit: str | None) -> str:
        return format_flops(amount) if unit == "FLOPs" else format_seconds(amount)

    return [
        {
            "round": name,
            "color": css_color_of(run.arms.index(run.params.rounds[name].arm)),
            "groups": format_count(each.groups),
            "mean_size": f"{each.rollouts / each.groups:.1f}",
            "largest_group": format_count(each.largest_group),
            "expected_mixed": format_percent(each.expected_mixed),
            "mixed": format_percent(each.mixed),
            "expected_cost": cost(each.expected_cost, each.cost_unit) if each.cost_unit else "",
            "cost": cost(each.cost, each.cost_unit) if each.cost_unit else "",
            "never_drawn": format_percent(each.never_drawn),
            "effective_share": format_percent(each.effective_share),
        }
        for name, each in read_allocations(run).items()
    ]


def _format_sampling(run: Run, name: str) -> str:
    """Returns what a round's selection counted, a temperature that may rise, and an early end."""
    parts = [format_selection(run.selections[name])] if name in run.selections else []
    if name in run.temperatures:
        parts.append(format_temperatures(run.temperatures[name]))
    if name in run.plateaus:
        done, planned = len(run.iterations[name]), run.plateaus[name]
        parts.append(f"stopped on a plateau after {done} of {planned} iterations")
    return ", ".join(each for each in parts if each)


def _stages(run: Run, usages: Mapping[str, Usage]) -> list[dict[str, Any]]:
    """Returns one row per stage: its cost, and its time and memory if measured here."""
    rows = []
    for stage in stages_of(run.params):
        costs, usage = run.costs[run.costs["stage"] == stage], usages.get(stage)
        row = {"stage": stage, "kinds": "", "flops": "", "sampled_steps": "", "trained_steps": ""}
        if len(costs):
            row["flops"] = format_flops(float(sum(costs["flops"])))
            row["sampled_steps"] = format_count(sum(costs["sampled_steps"]))
            row["trained_steps"] = format_count(sum(costs["trained_steps"]))
        if len(costs) > 1:
            amounts = zip(costs["kind"], costs["flops"], strict=True)
            row["kinds"] = ", ".join(f"{kind} {format_flops(float(n))}" for kind, n in amounts)
        row["seconds"] = "" if usage is None else format_seconds(usage.seconds)
        row["cpu_seconds"] = "" if usage is None else format_seconds(usage.cpu_seconds)
        row["peak"] = "" if usage is None else format_bytes(usage.peak_bytes)
        rows.append(row)
    return rows
