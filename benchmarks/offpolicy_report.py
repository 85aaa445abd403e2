"""Table and figures of the results of benchmarks.offpolicy_stability."""

import itertools
import math
import statistics
from collections.abc import Iterable
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.intervals import span
from grpo.report.style import MARKERS, color_of, styled
from grpo.runtime.markdown import markdown_table

KINDS = {
    ("dense", "live"): "dense",
    ("moe", "live"): "experts, live",
    ("moe", "replay_proximal"): "experts, replay_proximal",
    ("moe", "replay_sampled"): "experts, replay_sampled",
}
ALGORITHMS = ("grpo", "gspo", "gspo_narrow")
DRAWN = ("grpo", "gspo")
UPDATES_PER_ROUND = (1, 4, 8, 16)
Runs = dict[str, dict[str, Any]]


class Summary(NamedTuple):
    """Statistics of one setting over seeds; stale updates are all but the first of a round."""

    gains: list[float]  # in mean@4 over the base policy, by seed
    clipped: float  # fraction of trained steps that stale updates clip, mean
    log_ratio: float  # largest |log ratio| of a stale update, mean
    kl: float  # k3 to the first policy of the round, nats per step, median over stale updates
    drift_mean: float  # |trainer logp - sampler logp| before the first update, mean over steps
    drift_max: float  # largest such difference of a round, median over rounds
    changed: float | None  # fraction of expert choices that the updates of a round changed

    @property
    def gain(self) -> float:
        return statistics.fmean(self.gains)


def summarize(runs: Runs, kind: tuple[str, str], algorithm: str, updates: int) -> Summary | None:
    """Returns the summary of a setting over its seeds; None if the setting was not run."""
    found = [run for run in runs.values() if _is(run, kind, algorithm, updates)]
    if not found:
        return None
    stale = [row for run in found for row in _stale_updates(run)]
    rounds = [each for run in found for each in run["rounds"]]
    changed = [each["routers_changed"] for each in rounds if "routers_changed" in each]
    return Summary(
        gains=[curve(run)[-1] for run in found],
        clipped=_mean(row["clip_fraction"] for row in stale),
        log_ratio=_mean(_reach(row) for row in stale),
        kl=statistics.median(row["kl_to_start"] for row in stale) if stale else 0.0,
        drift_mean=_mean(each["drift_mean"] for each in rounds),
        drift_max=statistics.median(each["drift_max"] for each in rounds),
        changed=_mean(changed) if changed else None,
    )


def curve(run: dict[str, Any]) -> list[float]:
    """Returns the gain in mean@4 over the base at each evaluation."""
    scores = [run["evaluations"][key] for key in sorted(run["evaluations"], key=int)]
    return [score - scores[0] for score in scores]


def table(runs: Runs) -> str:
    """Returns the results as the Markdown table of docs/offpolicy_stability.md."""
    titles = ["algorithm", "updates per round", "policy", "gain of mean@4", "clipped"]
    titles += ["largest abs. log ratio", "KL to round start", "sampler vs trainer, mean"]
    titles += ["sampler vs trainer, max", "experts changed"]
    counts = _counts(runs)
    rows = list[list[str]]()
    for algorithm in ALGORITHMS:
        for updates in counts:
            for kind, label in KINDS.items():
                summary = summarize(runs, kind, algorithm, updates)
                if summary is not None:
                    rows.append([algorithm, str(updates), label, *_cells(summary)])
    return markdown_table(titles, rows)


def collapse_table(runs: Runs) -> str:
    """Returns mean@4 over the updates, and on how many seeds it collapsed, as a Markdown table."""
    points = sorted({int(each) for run in runs.values() for each in run["evaluations"]})
    settings = itertools.product(ALGORITHMS, _counts(runs), KINDS.items())
    rows = list[list[str]]()
    for algorithm, updates, (kind, label) in settings:
        found = [run for run in runs.values() if _is(run, kind, algorithm, updates)]
        if found:
            means = [_mean(run["evaluations"][str(each)] for run in found) for each in points]
            ended = f"{sum(map(collapsed, found))} of {len(found)} seeds"
            scores = [f"{each:.3f}" for each in means]
            rows.append([algorithm, str(updates), label, *scores, ended])
    scored = [f"mean@4 after {each}" for each in points]
    titles = ["algorithm", "updates per round", "policy", *scored, "collapsed"]
    return markdown_table(titles, rows)


def rates_table(results: dict[str, Any]) -> str:
    """Returns mean@4 of on-policy runs by learning rate, as a Markdown table."""
    runs = {float(rate): run for rate, run in results["runs"].items()}
    points = sorted({int(each) for run in runs.values() for each in run["evaluations"]})
    rows = [
        [
            f"{rate:g}",
            *(f"{runs[rate]['evaluations'][str(each)]:.3f}" for each in points),
            f"{_mean(each['drift_mean'] for each in runs[rate]['rounds']):.4f}",
        ]
        for rate in sorted(runs, reverse=True)
    ]
    titles = ["learning rate", *(f"mean@4 after {each}" for each in points)]
    return markdown_table([*titles, "sampler vs trainer, mean"], rows)


def long_claims(runs: Runs) -> list[str]:
    """Returns the numbers in the text about benchmarks.offpolicy_long."""
    first = [run["rounds"][0]["steps_mean"] for run in runs.values()]
    settings = (("live", "grpo"), ("replay_sampled", "grpo"), ("live", "gspo"))
    grpo, replay, gspo = (summarize(runs, ("moe", kind), name, 64) for kind, name in settings)
    assert grpo
    assert replay
    assert gspo
    return [
        f"worked solutions of {_mean(first):.0f} tokens on average",
        f"on all three seeds, by {_mean(grpo.gains):+.3f} on average",
        f"live routing on average, by {_mean(replay.gains) - _mean(grpo.gains):.3f}",
        f"it clips {100 * gspo.clipped:.1f} % of the steps, GRPO {100 * grpo.clipped:.1f} %",
    ]


def collapsed(run: dict[str, Any]) -> bool:
    """Returns whether the last mean@4 of a run is below half of its base's."""
    scores = [run["evaluations"][key] for key in sorted(run["evaluations"], key=int)]
    return bool(scores[-1] < scores[0] / 2)


def claims(runs: Runs) -> list[str]:
    """Returns the numbers of the findings of docs/offpolicy_stability.md."""
    found: list[dict[int, Any]] = [
        {updates: summarize(runs, kind, "grpo", updates) for updates in UPDATES_PER_ROUND}
        for kind in list(KINDS)[:2]
    ]
    dense, live = found
    growth = [own[16].kl / own[4].kl for own in (dense, live)]
    larger = [100 * (live[each].log_ratio / dense[each].log_ratio - 1) for each in (4, 8, 16)]
    rounds = [each for run in runs.values() for each in run["rounds"]]
    mismatched = _mean(
        each["routers_mismatched"] for each in rounds if "routers_mismatched" in each
    )
    above = sum(curve(run)[-1] > 0 for run in runs.values())
    worst = []
    for name, updates in itertools.product(ALGORITHMS, UPDATES_PER_ROUND[1:]):
        of_dense, of_live = (
            summarize(runs, kind, name, updates) for kind in (("dense", "live"), ("moe", "live"))
        )
        if of_dense and of_live:
            worst.append(of_live.drift_max / of_dense.drift_max)
    highest = [
        max(
            row["kl_to_start"]
            for run in runs.values()
            if _is(run, ("moe", replay), "grpo", max(UPDATES_PER_ROUND))
            for row in _stale_updates(run)
        )
        for replay in ("replay_proximal", "replay_sampled")
    ]
    return [
        f"{above} of the {len(runs)} runs ended above their base",
        f"grows {growth[0]:.0f}-fold (dense) and {growth[1]:.0f}-fold (experts, live)",
        f"the largest log ratio is larger by {span(larger)} %",
        f"stale updates leaves {span(worst, '.1f')} times as much",
        f"single updates reach {span(highest)} with replay",
        f"only {100 * mismatched:.1f} % of the choices",
        f"rollouts of {_mean(each['steps_mean'] for each in rounds):.0f} steps on average",
    ]


def draw(runs: Runs) -> dict[str, Figure]:
    """Returns the figures by file name in docs/."""
    with styled():
        return {
            "offpolicy_stability.svg": _draw_staleness(runs),
            "offpolicy_rewards.svg": _draw_rewards(runs),
        }


def _draw_staleness(runs: Runs) -> Figure:
    """Returns plots over updates per round: a row per algorithm and a panel per measure."""
    measures = ("gain", "clipped", "log_ratio", "kl")
    titles = ("gain of mean@4", "clipped steps", "largest |log ratio|", "KL to round start, nats")
    figure = Figure(figsize=(15, 6.4), layout="constrained")
    grid = figure.subplots(len(DRAWN), len(measures), sharex=True, squeeze=False)
    for algorithm, row in zip(DRAWN, grid):
        for measure, title, axes in zip(measures, titles, row):
            for index, (kind, label) in enumerate(KINDS.items()):
                _draw_line(axes, runs, kind, algorithm, measure, index=index, label=label)
            axes.set_title(f"{algorithm.upper()}: {title}")
            axes.set_xscale("log", base=2)
            axes.set_xticks(UPDATES_PER_ROUND, [str(each) for each in UPDATES_PER_ROUND])
            if measure == "kl":
                axes.set_yscale("log")
            axes.tick_params(length=0)
    for axes in grid[-1]:
        axes.set_xlabel("updates per round")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=len(KINDS))
    return figure


def _draw_line(
    axes: Axes,
    runs: Runs,
    kind: tuple[str, str],
    algorithm: str,
    measure: str,
    *,
    index: int,
    label: str,
) -> None:
    """Draws one measure of one kind of policy; on-policy, GSPO equals GRPO."""
    points = []
    for updates in UPDATES_PER_ROUND:
        summary = summarize(runs, kind, "grpo" if updates == 1 else algorithm, updates)
        if summary is not None and (updates > 1 or measure == "gain"):
            points.append((updates, getattr(summary, measure), summary.gains))
    style: dict[str, Any] = {"color": color_of(index), "marker": MARKERS[index]}
    axes.plot([each[0] for each in points], [each[1] for each in points], label=label, **style)
    if measure == "gain":
        x = [each[0] * 1.06**index for each in points]
        low, high = [min(each[2]) for each in points], [max(each[2]) for each in points]
        axes.vlines(x, low, high, color=color_of(index), linewidth=1.2)


def _draw_rewards(runs: Runs) -> Figure:
    """Returns plots of the gain over updates: a row per algorithm, a panel per staleness."""
    counts = _counts(runs)
    figure = Figure(figsize=(3.75 * len(counts), 6.4), layout="constrained")
    grid = figure.subplots(len(DRAWN), len(counts), sharex=True, sharey=True, squeeze=False)
    for algorithm, row in zip(DRAWN, grid):
        for updates, axes in zip(counts, row):
            for index, (kind, label) in enumerate(KINDS.items()):
                name = "grpo" if updates == 1 else algorithm
                found = [run for run in runs.values() if _is(run, kind, name, updates)]
                _draw_band(axes, found, index=index, label=label)
            axes.set_title(f"{algorithm.upper()}: {updates} per round")
        row[0].set_ylabel("gain of mean@4")
    for axes in grid[-1]:
        axes.set_xlabel("updates")
    handles, labels = grid[-1][-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=len(KINDS))
    return figure


def _draw_band(axes: Axes, runs: list[dict[str, Any]], *, index: int, label: str) -> None:
    """Draws the mean over seeds with their range."""
    if not runs:
        return
    x = sorted(map(int, runs[0]["evaluations"]))
    columns = list(zip(*map(curve, runs)))
    color = color_of(index)
    axes.fill_between(x, list(map(min, columns)), list(map(max, columns)), color=color, alpha=0.12)
    means = list(map(statistics.fmean, columns))
    axes.plot(x, means, color=color, marker=MARKERS[index], label=label)
    axes.set_xticks(x)


def _counts(runs: Runs) -> list[int]:
    """Returns the numbers of updates per round that were run."""
    return sorted({run["case"]["updates_per_round"] for run in runs.values()})


def _is(run: dict[str, Any], kind: tuple[str, str], algorithm: str, updates: int) -> bool:
    case = run["case"]
    wanted = (*kind, algorithm, updates)
    return (
        case["model"],
        case["routing"],
        case["algorithm"],
        case["updates_per_round"],
    ) == wanted


def _stale_updates(run: dict[str, Any]) -> list[dict[str, float]]:
    """Returns the non-empty updates after the first of each round."""
    columns = run["updates"]
    rows = [dict(zip(columns, values)) for values in zip(*columns.values())]
    per_round = run["case"]["updates_per_round"]
    return [row for i, row in enumerate(rows) if i % per_round and row["trained_rollouts"]]


def _reach(row: dict[str, float]) -> float:
    """Returns the largest |log ratio|; a ratio that was rounded to 0 counts as the smallest."""
    return max(math.log(row["ratio_max"]), -math.log(max(row["ratio_min"], 1e-6)))


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return statistics.fmean(listed) if listed else 0.0


def _cells(summary: Summary) -> list[str]:
    low, high = min(summary.gains), max(summary.gains)
    return [
        f"{summary.gain:+.3f} [{low:+.3f}, {high:+.3f}]",
        f"{summary.clipped:.3f}",
        f"{summary.log_ratio:.2f}",
        f"{summary.kl:.3f}",
        f"{summary.drift_mean:.4f}",
        f"{summary.drift_max:.2f}",
        "" if summary.changed is None else f"{summary.changed:.3f}",
    ]
