"""Measures the cost at which each arm reaches the reward of GRPO, with and without uniform groups.

python -m benchmarks.allocation_tokens 2 3 4 5 6   # runs missing stages, then writes the results
python -m benchmarks.allocation_tokens             # writes tables and figure from the results

The arms are in allocation_tokens.yaml, and their settings were chosen on seeds 0 and 1; task, base
policy and evaluation are those of params.yaml. The runs of a seed are under .work/ and resume after
an interruption; remove that folder after a change of code. Writes results/allocation_tokens.json
and docs/allocation_tokens.svg.
"""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from benchmarks.demo import ROOT
from benchmarks.figures import save_figure
from benchmarks.intervals import in_words, mean_interval, span
from benchmarks.seeds import record_seeds
from benchmarks.workspaces import make_workspace, round_seconds, run_stages
from grpo.params.parameters import Parameters, read_params
from grpo.params.recipes import read_content
from grpo.params.yaml import parse_yaml
from grpo.report.comparison import Curve, cost_to_reach
from grpo.report.style import MARKERS, styled
from grpo.report.words import listed
from grpo.runtime.artifacts.files import read_json
from grpo.runtime.markdown import markdown_table
from grpo.types import Cost
from grpo.wiring.allocation import reads_profile

ARMS = Path(__file__).with_suffix(".yaml")
FIGURE = ROOT / "docs" / "allocation_tokens.svg"
WORK = ROOT / ".work" / "allocation_tokens"
REFERENCE, DROPPING = "plain", "drop_uniform"
PLATEAU = 0.01  # the largest last rise of an arm at its plateau
NEARLY = 0.98  # of the final mean@k of the reference, as 2-GRPO's paper claims
ROUNDING = 1e-12  # of mean rewards
SCORES = ("mean_at_k", "greedy", "pass_at_k")
COSTS = {"flops": ("GFLOPs", 1e9), "cpu_seconds": ("processor seconds", 1.0)}
STEPS = ("sampled_steps", "trained_steps")
SECONDS = ("profile_seconds", "rollout_seconds", "score_seconds", "train_seconds")
TARGETS = (  # arm, cost, in words, at most
    ("sgpo", "flops_to_reach", "FLOPs to reach `plain`", 1 / 3),
    (
        "two_grpo",
        "cpu_seconds_to_nearly_reach",
        f"seconds to reach {100 * NEARLY:.0f} % of `plain`",
        0.3,
    ),
    ("composed", "cpu_seconds_to_reach", "seconds to reach `plain`", 0.2),
)
RESAMPLES = 2000
BENCHMARK_KEYS = ("kind", "rounds", "phases", "rounds_per_evaluation")
Point = dict[str, float]
Runs = dict[str, dict[str, list[Point]]]


def main() -> None:
    """Runs the given seeds and writes the results of all finished seeds."""
    arms = read_arms()
    results = record_seeds(
        "allocation_tokens",
        arms,
        lambda seed: run_seed(seed, arms, WORK),
        lambda runs: {"summary": summarize(runs)},
    )
    save_figure(draw(results["runs"]), FIGURE)
    tables = (targets_table, table, reach_table, spending_table)
    print(*(each(results) for each in tables), sep="\n\n")


def run_seed(seed: int, arms: dict[str, Any], work: Path) -> dict[str, list[Point]]:
    """Returns, per arm, cumulative cost and scores of every evaluated policy, base first.

    Args:
      work: Folder of the workspaces.
    """
    return run_arms(work / str(seed), *parameters(seed, arms))


def run_arms(
    workspace: Path, params: dict[str, Any], evaluated: set[str]
) -> dict[str, list[Point]]:
    """Returns the points of all arms of a recipe, of which some rounds are evaluated."""
    make_workspace(workspace, params)
    skipped = {f"evaluate@{name}" for name in params["rounds"]} - {
        f"evaluate@{name}" for name in evaluated
    }
    cpu_seconds = run_stages(workspace, skipped)
    typed = read_params(workspace / "params.yaml")
    return {arm: curve(workspace, typed, cpu_seconds, arm, evaluated) for arm in typed.arms}


def read_arms() -> dict[str, Any]:
    """Returns the arms in file order."""
    arms: dict[str, Any] = parse_yaml(ARMS.read_text())["arms"]
    return arms


def parameters(seed: int, arms: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Returns the recipe with a benchmark's arms and rounds, and the rounds to evaluate.

    An arm with more rounds than phases repeats its phases.
    """
    params: dict[str, Any] = read_content(ROOT / "params.yaml")
    params |= {"seed": seed, "arms": {}, "rounds": {}}
    evaluated: set[str] = set()
    for name, arm in arms.items():
        _, rounds, phases, every = (arm[key] for key in BENCHMARK_KEYS)
        params["arms"][name] = {key: each for key, each in arm.items() if key not in BENCHMARK_KEYS}
        own = make_rounds(name, rounds, phases)
        params["rounds"] |= own
        evaluated |= {each for i, each in enumerate(own, 1) if i % every == 0 or i == rounds}
    return params, evaluated


def make_rounds(arm: str, rounds: int, phases: int = 1) -> dict[str, dict[str, Any]]:
    """Returns an arm's rounds by name; each starts from the one before, and phases repeat."""
    made: dict[str, dict[str, Any]] = {}
    for index in range(1, rounds + 1):
        start = f"{arm}-{index - 1}" if index > 1 else "base"
        made[f"{arm}-{index}"] = {"arm": arm, "start": start, "phase": (index - 1) % phases + 1}
    return made


def curve(
    workspace: Path,
    params: Parameters,
    cpu_seconds: dict[str, float],
    arm: str,
    evaluated: set[str],
) -> list[Point]:
    """Returns the points of one arm; a profile that it reads counts before its first round."""
    artifacts = workspace / "artifacts"
    total = dict.fromkeys((*asdict(Cost()), *SECONDS, "cpu_seconds"), 0.0)

    def pay(summary: str, **seconds: float) -> None:
        cost = read_json(artifacts / summary / "summary.json")["cost"]
        for name, value in {**cost, **seconds, "cpu_seconds": sum(seconds.values())}.items():
            total[name] += value

    if reads_profile(params, arm):
        pay("profile", profile_seconds=cpu_seconds["profile"])
    points = [_point(artifacts, "base", total)]
    for name in params.rounds_of(arm):
        spent = round_seconds(workspace, cpu_seconds, name)
        pay(f"rollouts/{name}", rollout_seconds=spent.sampling, score_seconds=spent.judging)
        pay(f"training/{name}", train_seconds=spent.training)
        if name in evaluated:
            points.append(_point(artifacts, name, total))
    return points


def summarize(runs: Runs) -> dict[str, Any]:
    """Returns means over seeds with 95 % t intervals, per arm and relative to the references."""
    arms = next(iter(runs.values()))
    curves = {arm: [run[arm] for run in runs.values()] for arm in arms}
    return {arm: _summary(own, curves[REFERENCE], curves[DROPPING]) for arm, own in curves.items()}


def _summary(
    curves: list[list[Point]], references: list[list[Point]], dropping: list[list[Point]]
) -> dict[str, Any]:
    last = [points[-1] for points in curves]
    ends = [points[-1] for points in references]
    return {
        **{
            f"{score}_gain": mean_interval(
                [points[-1][score] - points[0][score] for points in curves]
            )
            for score in SCORES
        },
        "against_reference": mean_interval(
            [own["mean_at_k"] - other["mean_at_k"] for own, other in zip(last, ends)]
        ),
        "last_rise": mean_interval(
            [points[-1]["mean_at_k"] - points[-2]["mean_at_k"] for points in curves]
        ),
        **{
            f"{cost}_of_reference": mean_interval([a[cost] / b[cost] for a, b in zip(last, ends)])
            for cost in COSTS
        },
        **{
            f"{cost}_to_reach": share_to_reach(curves, references, cost)
            for cost in (*COSTS, *STEPS)
        },
        **{
            f"{cost}_to_nearly_reach": share_to_reach(curves, references, cost, of_score=NEARLY)
            for cost in COSTS
        },
        **{f"{cost}_to_reach_dropping": share_to_reach(curves, dropping, cost) for cost in COSTS},
    }


def share_to_reach(
    curves: list[list[Point]], references: list[list[Point]], cost: str, *, of_score: float = 1.0
) -> dict[str, float | None]:
    """Returns the fraction of the reference's cost at which the mean curve reaches its final gain.

    The interval is a 95 % percentile bootstrap over seeds. None: the gain is not reached.

    Args:
      of_score: Fraction of the reference's final mean@k that is to be reached.
    """
    own, other = gains_by_cost(curves, cost), gains_by_cost(references, cost)
    missing = [(1 - of_score) * points[-1]["mean_at_k"] for points in references]
    target, whole = other[:, -1, 1] - np.array(missing), other[:, -1, 0]
    chooser = np.random.default_rng(0)
    seeds = chooser.integers(len(own), size=(RESAMPLES, len(own)))
    resampled = [_share(own[rows], target[rows], whole[rows]) for rows in seeds]
    low, high = np.quantile(resampled, [0.025, 0.975], method="inverted_cdf")
    values = _share(own, target, whole), low, high
    known = [float(value) if math.isfinite(value) else None for value in values]
    return dict(zip(("value", "low", "high"), known))


def known_share(
    curves: list[list[Point]], references: list[list[Point]], cost: str, *, of_score: float = 1.0
) -> float:
    """Returns the value of `share_to_reach`.

    Raises:
      ValueError: If the gain is not reached.
    """
    found = share_to_reach(curves, references, cost, of_score=of_score)["value"]
    if found is None:
        raise ValueError(f"the mean curve does not reach {of_score:.1%} of the reference's score")
    return found


def _share(own: np.ndarray, target: np.ndarray, whole: np.ndarray) -> float:
    """Returns the cost at which the mean curve reaches the mean target / the mean whole cost."""
    mean = own.mean(axis=0)
    names = tuple(map(str, range(len(mean))))
    line = Curve(arm="", policies=names, costs=tuple(mean[:, 0].tolist()))
    wanted, end = float(target.mean()), float(mean[-1, 1])
    if math.isclose(wanted, end, abs_tol=ROUNDING):  # of the reference itself
        wanted = end
    reached = cost_to_reach(line, dict(zip(names, mean[:, 1].tolist())), wanted)
    return math.inf if reached is None else reached / float(whole.mean())


def gains_by_cost(curves: list[list[Point]], cost: str) -> np.ndarray:
    """Returns costs and gains in mean@k over the base, by seed and point."""
    points = [[[each[cost], each["mean_at_k"]] for each in points] for points in curves]
    array = np.array(points)
    array[:, :, 1] -= array[:, :1, 1]
    return array


def _point(artifacts: Path, name: str, cost: dict[str, float]) -> Point:
    scores = read_json(artifacts / "evaluations" / f"{name}.json")
    return {**cost, **{score: scores[score]["value"] for score in SCORES}}


def draw(runs: Runs) -> Figure:
    """Returns plots of reward over FLOPs and CPU seconds, a row of panels per kind of arm."""
    arms = read_arms()
    kinds = list(dict.fromkeys(arm["kind"] for arm in arms.values()))
    with styled():
        figure = Figure(figsize=(11.5, 4.2 * len(kinds)), layout="constrained")
        grid = figure.subplots(len(kinds), len(COSTS), sharey=True, squeeze=False)
        for kind, row in zip(kinds, grid):
            shown = [arm for arm in arms if arms[arm]["kind"] == kind or arm == REFERENCE]
            for (cost, (label, unit)), axes in zip(COSTS.items(), row):
                for index, arm in enumerate(shown):
                    points = gains_by_cost([run[arm] for run in runs.values()], cost)
                    draw_curve(axes, points, label=arm, index=index, unit=unit, color=f"C{index}")
                axes.set_xlabel(label)
            row[0].set_ylabel(f"{kind}: mean@8 above the base")
            row[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def draw_curve(
    axes: Axes, points: np.ndarray, *, label: str, index: int, unit: float, color: Any
) -> None:
    """Draws the mean over seeds with a band of one standard error."""
    mean = points.mean(axis=0)
    x = mean[:, 0] / unit
    axes.plot(x, mean[:, 1], label=label, marker=MARKERS[index % len(MARKERS)], color=color)
    if len(points) > 1:
        error = stats.sem(points[:, :, 1], axis=0)
        axes.fill_between(x, mean[:, 1] - error, mean[:, 1] + error, color=color, alpha=0.12)


def table(results: dict[str, Any]) -> str:
    """Returns rewards and the cost of each arm's whole run as a Markdown table."""
    titles = ["arm", "gain in mean@8", f"against {REFERENCE}", "last rise", "greedy", "pass@8"]
    titles += [f"FLOPs of {REFERENCE}'s", f"seconds of {REFERENCE}'s"]
    rows = list[list[str]]()
    gains = ("mean_at_k_gain", "against_reference", "last_rise", "greedy_gain", "pass_at_k_gain")
    for arm in read_arms():
        row = results["summary"][arm]
        shares = [format(row[f"{cost}_of_reference"]["value"], ".0%") for cost in COSTS]
        rows.append([arm, *(in_words(row[name], "+.3f") for name in gains), *shares])
    return markdown_table(titles, rows)


def targets_table(results: dict[str, Any]) -> str:
    """Returns the targets and what was measured as a Markdown table."""
    rows = list[list[str]]()
    for arm, cost, what, most in TARGETS:
        share = results["summary"][arm][cost]
        is_met = share["value"] is not None and share["value"] <= most
        measured = "never" if share["value"] is None else in_words(share, ".0%")
        rows.append([arm, what, f"{most:.0%}", measured, "met" if is_met else "missed"])
    return markdown_table(["arm", "share of `plain`'s", "target", "measured", ""], rows)


def reach_table(results: dict[str, Any]) -> str:
    """Returns the cost until an arm has the reward of a reference, as a share of its cost."""
    targets = {
        "reach": REFERENCE,
        "nearly_reach": f"{100 * NEARLY:.0f} % of {REFERENCE}",
        "reach_dropping": DROPPING,
    }
    names = [f"{cost}_to_{target}" for target in targets for cost in COSTS]
    titles = [f"{cost} to {each}" for each in targets.values() for cost in ("FLOPs", "seconds")]
    rows = [
        [arm, *(in_words(results["summary"][arm][name], ".0%") for name in names)]
        for arm in read_arms()
    ]
    return markdown_table(["arm", *titles], rows)


def spending_table(results: dict[str, Any]) -> str:
    """Returns a Markdown table of each arm's final cost and of its steps to reach the reference."""
    names = (*STEPS, "flops", *SECONDS)
    titles = ["arm", "sampled steps", "trained steps", "GFLOPs"]
    titles += ["profile, s", "sampling, s", "scoring, s", "updates, s"]
    titles += ["sampled steps to reach it", "trained steps to reach it"]
    rows = list[list[str]]()
    for arm in read_arms():
        ends = [run[arm][-1] for run in results["runs"].values()]
        mean = {name: float(np.mean([end[name] for end in ends])) for name in names}
        steps = [f"{mean[name] / 1000:.0f} k" for name in STEPS]
        seconds = [f"{mean[name]:.1f}" for name in SECONDS]
        shares = [results["summary"][arm][f"{name}_to_reach"] for name in STEPS]
        reached = [in_words(share, ".0%") for share in shares]
        rows.append([arm, *steps, f"{mean['flops'] / 1e9:.0f}", *seconds, *reached])
    return markdown_table(titles, rows)


def claims(results: dict[str, Any]) -> list[str]:
    """Returns what docs/allocation_tokens.md says of its targets and of an iteration's cost."""

    def share(arm: str, name: str) -> str:
        return f"{100 * results['summary'][arm][name]['value']:.0f} %"

    def reach(arm: str) -> str:
        flops, seconds = (share(arm, f"{cost}_to_reach") for cost in COSTS)
        return f"after {flops} of its FLOPs and {seconds} of its seconds"

    arms = read_arms()
    budget = arms["composed"]["selection"][0]["allocate_by_signal"]["budget"] / 1e9
    per_iteration = []
    for arm in ("signal", "composed"):
        about = arms[arm]
        iterations = about["rounds"] * about["training"]["iterations_per_round"]
        ends = [run[arm][-1] for run in results["runs"].values()]
        per_iteration += [end["flops"] / iterations / 1e9 for end in ends]
    gain = in_words(results["summary"]["signal"]["against_reference"])
    base = np.mean([run[REFERENCE][0]["mean_at_k"] for run in results["runs"].values()])
    rises = {arm: each["last_rise"]["value"] for arm, each in results["summary"].items()}
    (rising,) = (arm for arm, rise in rises.items() if rise > PLATEAU)
    falling = min(rises, key=lambda arm: rises[arm])
    against = {arm: each["against_reference"] for arm, each in results["summary"].items()}
    above = [f"`{arm}`" for arm, each in against.items() if each["low"] > 0]
    below = [f"`{arm}`" for arm, each in against.items() if each["high"] < 0]
    uniform = 1 - results["summary"][DROPPING]["flops_of_reference"]["value"]
    paces = {
        arm: f"{1e6 * seconds_per_step([run[arm] for run in results['runs'].values()]):.0f}"
        for arm in ("composed", REFERENCE, "two_grpo")
    }
    return [
        f"All arms are, except `{rising}`, which rises by {rises[rising]:.4f}.",
        f"`{falling}` falls by {-rises[falling]:.4f}.",
        f"`composed` has the final mean@8 of `plain` {reach('composed')}",
        f"`signal` has it {reach('signal')}",
        f"`two_grpo` has {100 * NEARLY:.0f} % of the final mean@8 of `plain` after"
        f" {share('two_grpo', 'cpu_seconds_to_nearly_reach')} of its seconds",
        f"`{REFERENCE}` itself has {100 * NEARLY:.0f} % after"
        f" {share(REFERENCE, 'cpu_seconds_to_nearly_reach')}",
        f"{100 * uniform:.0f} % of the FLOPs of `plain` are those of updates on uniform groups",
        f"{listed(above)} is above it; {listed(below)} are below it",
        f"`signal` ends above `plain` by {gain}",
        f"an iteration takes {span(per_iteration)} GFLOP instead of {budget:.0f}",
        f"a million sampled steps take {paces['composed']} seconds,"
        f" those of `plain` {paces['plain']}",
        f"`two_grpo`: {paces['two_grpo']}",
        f"whose mean@8 is {base:.3f} on average",
        f"it would have it after {100 * reach_at_equal_pace(results['runs']):.0f} %",
    ]


def reach_at_equal_pace(runs: Runs) -> float:
    """Returns the share of the seconds of `plain` after which `composed` would have its score.

    Would have, if a sampled step took as long as one of `plain` of the same seed.
    """
    plain, curves = [run[REFERENCE] for run in runs.values()], []
    for run in runs.values():
        pace = seconds_per_step([run[REFERENCE]])
        curves.append(
            [
                {
                    **each,
                    "cpu_seconds": each["cpu_seconds"]
                    - each["rollout_seconds"]
                    + pace * each["sampled_steps"],
                }
                for each in run["composed"]
            ]
        )
    return known_share(curves, plain, "cpu_seconds")


def seconds_per_step(curves: list[list[Point]]) -> float:
    """Returns the processor seconds of sampling per sampled step, over whole runs."""
    seconds, steps = (
        sum(points[-1][name] for points in curves) for name in ("rollout_seconds", "sampled_steps")
    )
    return seconds / steps


if __name__ == "__main__":
    main()
