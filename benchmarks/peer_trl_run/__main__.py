"""Runs both sides on an idle machine, one process after the other, and records what they spend.

python -m benchmarks.peer_trl_run PYTHON_OF_TRL 0 1 2 [--size 0.2M] [--side trl]
python -m benchmarks.peer_trl_run draw       # table and figure of the results

Writes a file per size into benchmarks/results/peer_trl_run, and docs/peer_trl_run.svg. Runs that a
file has are not repeated, so that a call that was interrupted goes on. All runs of a file are of
one revision.
"""

import argparse
import statistics
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.demo import RESULTS, ROOT, machine, revision_of
from benchmarks.figures import save_figure
from benchmarks.intervals import in_words, mean_interval, span
from benchmarks.peer_trl.processes import versions
from benchmarks.peer_trl_run.figure import draw
from benchmarks.peer_trl_run.runs import (
    Run,
    require_idle,
    run_ours,
    run_theirs,
    score_of_base,
)
from benchmarks.peer_trl_run.settings import (
    ARMS,
    COMPOSED,
    DEFAULT,
    NEAR_RATE,
    SAME,
    SIZES,
    TARGETS,
)
from benchmarks.seeds import read_folder
from grpo.report.words import listed
from grpo.runtime.artifacts.files import read_json, write_json
from grpo.runtime.markdown import markdown_table

OUT, FIGURE = RESULTS / "peer_trl_run", ROOT / "docs" / "peer_trl_run.svg"
THEIRS = "trl"
SIDES = (THEIRS, *ARMS)
RUNS = {
    "0.2M": "0.2 M parameters, the default task",
    "10.4M": "10.4 M, most groups have a signal",
    "10.4M-half": "10.4 M, half of the prompts are almost never solved",
}
TIMED = (
    "From the start of the process to its end, whose last act is to save the policy. Not timed on "
    "either side: the base policy, the prompts, evaluation, and TRL's weights saved for its curve."
)


def main() -> None:
    """Measures what is missing; writes the figure and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peer_trl_run", description=__doc__)
    parser.add_argument("python", help="of TRL's environment; or draw")
    parser.add_argument("seeds", nargs="*", type=int, metavar="SEED")
    parser.add_argument("--size", action="append", choices=SIZES, help="default: all")
    parser.add_argument("--side", action="append", choices=SIDES, help="default: all")
    parser.add_argument("--busy", action="store_true", help="measure on a machine that is not idle")
    chosen = parser.parse_args()
    for seed in chosen.seeds:
        for size in chosen.size or SIZES:
            # Alternating; allocated arms end at TRL's reward, so they follow.
            first = [THEIRS, SAME] if seed % 2 == 0 else [SAME, THEIRS]
            for side in [*first, *SIZES[size].allocated]:
                if side in (chosen.side or SIDES):
                    measure(size, seed, side, chosen.python, busy=chosen.busy)
    results = read_folder(OUT)
    if not results:
        raise SystemExit(f"{OUT} has no results; name PYTHON_OF_TRL and seeds")
    save_figure(draw(results), FIGURE)
    for size, found in results.items():
        print(size, table(found), sep="\n\n", end="\n\n")


def measure(size: str, seed: int, side: str, python: str, *, busy: bool) -> None:
    """Adds a run to the size's file, unless it has the run.

    Raises:
      SystemExit: If the run is missing, and the file's runs are of another revision.
    """
    path, revision = OUT / f"{size}.json", revision_of("HEAD")
    known = _read_runs(path).get(str(seed), {})
    if side in known:
        return
    require_revision(path, revision)
    base = score_of_base(size, seed)
    if not busy:
        require_idle()
    if side == THEIRS:
        run = run_theirs(size, seed, python)
    else:
        run = run_ours(size, seed, side, goal=_goal(known, side))
    print(size, seed, side, {k: v for k, v in run.items() if k != "batches"}, flush=True)
    run |= {"processor": machine()["processor"]}
    runs = _read_runs(path)  # again: another process may have added a run
    runs.setdefault(str(seed), {}).update({"base": base, side: run})
    about_size = {"revision": revision, "settings": _settings(size), "runs": runs}
    write_json(path, {**about(python), **about_size, **conclude(runs)})


def _read_runs(path: Path) -> dict[str, Any]:
    """Returns the runs of a file, by seed and side."""
    runs: dict[str, Any] = read_json(path)["runs"] if path.exists() else {}
    return runs


def require_revision(path: Path, revision: str) -> None:
    """Raises SystemExit if a file has runs of another revision."""
    if path.exists() and (known := read_json(path)["revision"]) != revision:
        raise SystemExit(
            f"{path} has runs of {known[:7]}, this is {revision[:7]}; move the file away to "
            "measure all of its runs again"
        )


def _goal(known: dict[str, Run], side: str) -> float | None:
    """Returns TRL's final reward, at which allocated arms end; None: the arm same."""
    if side == SAME:
        return None
    if THEIRS not in known:
        raise SystemExit(f"{side} ends at TRL's reward; measure --side {THEIRS} first")
    goal: float = known[THEIRS]["reward"]
    return goal


def _settings(size: str) -> dict[str, Any]:
    of_trials = {"trial_seed", "trial_updates", "tuned"}
    return {name: each for name, each in asdict(SIZES[size]).items() if name not in of_trials}


def about(python: str) -> dict[str, Any]:
    """Returns what was measured, where and with what."""
    return {
        "command": "python -m benchmarks.peer_trl_run PYTHON_OF_TRL SEED...",
        "timed": TIMED,
        "targets": TARGETS,
        "machine": machine(),
        "versions": versions(python),
    }


def conclude(runs: dict[str, Any]) -> dict[str, Any]:
    """Returns, by arm, means over seeds with 95 % t intervals, and whether targets hold.

    Ratios are ours / TRL, seed by seed; only seeds that have both count.
    """
    found: dict[str, Any] = {}
    for arm in ARMS:
        pairs = [(each[arm], each[THEIRS]) for each in runs.values() if {arm, THEIRS} <= {*each}]
        if pairs:
            found[arm] = _compare(pairs)
    return {"ratios": found, "met": {arm: _is_met(arm, each) for arm, each in found.items()}}


def _is_met(arm: str, ours: dict[str, Any]) -> bool:
    """Returns whether an arm has the targeted ratio at most, and TRL's reward.

    Arms that end at it must have it on every seed. `same` ends after TRL's updates: two runs of one
    algorithm differ by chance, so that its mean over seeds counts.
    """
    reaches = (
        ours["reward_difference"]["value"] >= 0 if arm == SAME else ours["reached"] == ours["seeds"]
    )
    return bool(reaches and ours["cpu_seconds"]["value"] <= TARGETS[arm])


def _compare(pairs: list[tuple[Run, Run]]) -> dict[str, Any]:
    """Returns ratios and the difference of rewards, and on how many seeds ours is no smaller."""
    ratios = {
        name: mean_interval([ours[name] / theirs[name] for ours, theirs in pairs])
        for name in ("cpu_seconds", "wall_seconds", "peak_bytes")
    }
    gained = mean_interval([ours["reward"] - theirs["reward"] for ours, theirs in pairs])
    return {
        **ratios,
        "reward_difference": gained,
        "reached": sum(ours["reward"] >= theirs["reward"] for ours, theirs in pairs),
        "seeds": len(pairs),
    }


def table(results: dict[str, Any]) -> str:
    """Returns a size's means over seeds as a Markdown table, with ratios to TRL and intervals."""
    titles = ["side", "seeds", "CPU s", "wall s", "peak GB", "base", "reward", "CPU ratio"]
    rows: list[list[str]] = []
    seeds = results["runs"].values()
    base = statistics.fmean(each["base"]["reward"] for each in seeds)
    for side in SIDES:
        runs = [each[side] for each in seeds if side in each]
        if runs:
            rows.append(
                [
                    side,
                    str(len(runs)),
                    f"{_mean(runs, 'cpu_seconds'):.1f}",
                    f"{_mean(runs, 'wall_seconds'):.1f}",
                    f"{_mean(runs, 'peak_bytes') / 1e9:.2f}",
                    f"{base:.3f}",
                    f"{_mean(runs, 'reward'):.3f}",
                    _in_words(results["ratios"].get(side)),
                ]
            )
    return markdown_table(titles, rows)


def shares_table(results: dict[str, dict[str, Any]]) -> str:
    """Returns the table of README.md: ratios of CPU seconds by run, a row for each size's file."""
    rows = [
        [
            title,
            *(_in_words(results[size]["ratios"][arm]) for arm in (SAME, SIZES[size].allocated[0])),
        ]
        for size, title in RUNS.items()
        if size in results
    ]
    return markdown_table(["run", "the same algorithm", "an arm that chooses its prompts"], rows)


def memory_claims(results: dict[str, dict[str, Any]]) -> list[str]:
    """Returns the peaks of memory of `same` beside TRL, in the order of RUNS."""
    peaks = [
        results[size]["ratios"][SAME]["peak_bytes"]["value"] for size in RUNS if size in results
    ]
    times = listed([f"{each:.1f}" for each in peaks])
    return [f"with {times} times its memory", f"{times} times TRL's"]


def width_claims(results: dict[str, dict[str, Any]]) -> list[str]:
    """Returns how wide intervals of rewards are beside TRL's gain, at 10.4 M."""
    widths = []
    for size in ("10.4M", "10.4M-half"):
        apart = results[size]["ratios"][SAME]["reward_difference"]
        runs = results[size]["runs"].values()
        gain = statistics.fmean(each[THEIRS]["reward"] - each["base"]["reward"] for each in runs)
        widths.append(f"{(apart['high'] - apart['low']) / gain:.1f}")
    return [f"{listed(widths)} times as wide as TRL's gain"]


def revision_claims(results: dict[str, dict[str, Any]]) -> list[str]:
    """Returns the revision of each size's runs, as the page names it before its table."""
    return [f"Setting `{size}`, at {found['revision'][:7]}" for size, found in results.items()]


def claims(results: dict[str, Any]) -> list[str]:
    """Returns the numbers of docs/speed.md on 0.2 M."""
    same, allocated = (results["ratios"][arm] for arm in (SAME, COMPOSED))
    runs = results["runs"].values()
    seeds = [(each[COMPOSED], each[THEIRS]) for each in runs]
    firsts = [_first_at_end(theirs) / theirs["cpu_seconds"] for _, theirs in seeds]
    below = max(each[THEIRS]["reward"] - each[DEFAULT]["reward"] for each in runs)
    ratios = [ours["cpu_seconds"] / theirs["cpu_seconds"] for ours, theirs in seeds]
    starts = [_outside_stages(ours) / len(ours["curve"]) for ours, _ in seeds]
    reached = f"TRL's final reward in {in_words(allocated['cpu_seconds'], '.2f')}"
    return [
        f"takes {in_words(same['cpu_seconds'], '.2f')} of TRL's CPU seconds at 0.2 M",
        f"The difference in reward is {in_words(same['reward_difference'])}",
        f"{reached} of the CPU seconds of TRL's whole run",
        f"one round and {span(ratios, '.2f')} of TRL's seconds",
        f"takes {span(starts)} CPU s outside of stages",
        f"after {span(firsts, '.2f')} of its run",
        *first_claims(results),
        f"that of `composed` at 0.2 M {allocated['peak_bytes']['value']:.1f} times",
        *allocated_claims(results, DEFAULT),
        f"it ends {below:.3f} below TRL",
    ]


def steps_claims(results: dict[str, Any]) -> list[str]:
    """Returns the numbers of docs/speed.md on the size 10.4M."""
    runs = results["runs"].values()
    ours, theirs = ([each[side] for each in runs] for side in (NEAR_RATE, THEIRS))
    pairs = [(mine["curve"][0], peer) for mine, peer in zip(ours, theirs)]
    shares = [first["cpu"] / peer["cpu_seconds"] for first, peer in pairs]
    gaps = [first["reward"] - peer["reward"] for first, peer in pairs]
    return [
        *_of_same(results),
        *allocated_claims(results, NEAR_RATE),
        f"After one round, {span(shares, '.2f')} of TRL's CPU seconds, it differs by "
        f"{span(gaps, '+.3f')}",
        f"{_uniform(runs, SAME)} % of the groups of `same` have no signal",
        f"{_uniform(runs, NEAR_RATE)} % of those of `near_rate`",
    ]


def half_claims(results: dict[str, Any]) -> list[str]:
    """Returns the numbers of docs/speed.md on the size 10.4M-half."""
    allocated = results["ratios"][COMPOSED]
    runs = results["runs"].values()
    ours, theirs = ([each[side] for each in runs] for side in (COMPOSED, THEIRS))
    firsts = [_first_at_end(each) / each["cpu_seconds"] for each in theirs]
    bests = [max(point["reward"] for point in each["curve"]) for each in theirs]
    over = [each["reward"] - best for each, best in zip(ours, bests)]
    falls = [(best, each["reward"]) for each, best in zip(theirs, bests)]
    best, last = max(falls, key=lambda each: each[0] - each[1])
    unsolved = [each[SAME]["families"]["products"] for each in runs]
    sampled = [each["families"]["products"]["rollouts"] for each in ours]
    latest = max(max(np.flatnonzero(each)) + 1 for each in sampled)
    return [
        *_of_same(results),
        *allocated_claims(results, COMPOSED),
        f"{in_words(allocated['cpu_seconds'], '.2f')} on average: "
        f"{allocated['cpu_seconds']['value']:.3f}, before rounding",
        f"has sampled {span([sum(each['batches']['rollouts']) for each in ours])} rollouts",
        f"after {span(firsts, '.2f')} of its run",
        *first_claims(results),
        f"{_uniform(runs, SAME)} % of the groups of `same` have no signal",
        f"differs from the best of TRL's evaluated policies by {span(over, '+.3f')}",
        f"falls from {best:.3f} to {last:.3f}",
        f"solves {sum(sum(each['solved']) for each in unsolved)} of the "
        f"{sum(sum(each['rollouts']) for each in unsolved)} products",
        f"samples {span([*map(sum, sampled)])} products, the last in iteration {latest} of "
        f"{max(map(len, sampled))}",
        f"{_uniform(runs, COMPOSED)} % of those of `composed`",
    ]


def first_claims(results: dict[str, Any]) -> list[str]:
    """Returns what `composed` spends of TRL's seconds until TRL first has its final reward."""
    spent = [
        each[COMPOSED]["cpu_seconds"] / _first_at_end(each[THEIRS])
        for each in results["runs"].values()
    ]
    return [f"`composed` takes {span(spent, '.2f')} of TRL's CPU"]


def allocated_claims(results: dict[str, Any], arm: str) -> list[str]:
    """Returns the numbers of an arm that ends at TRL's reward: how often, and what it spends."""
    runs = results["runs"].values()
    spent = [each[arm]["cpu_seconds"] / each[THEIRS]["cpu_seconds"] for each in runs]
    rounds = [str(len(each[arm]["curve"])) for each in runs]
    reached = results["ratios"][arm]["reached"]
    shares = listed([f"{each:.2f}" for each in spent])
    return [
        f"reaches TRL's final reward on {reached} of {len(runs)} seeds",
        f"spends {shares} of TRL's CPU seconds in {listed(rounds)} rounds",
    ]


def _of_same(results: dict[str, Any]) -> list[str]:
    """Returns the numbers of the arm `same` beside TRL, and of the training of TRL."""
    same, runs = results["ratios"][SAME], results["runs"].values()
    gains = [each[THEIRS]["reward"] - each["base"]["reward"] for each in runs]
    below = [
        f"on seed {seed} by {each[THEIRS]['reward'] - each[SAME]['reward']:.3f}"
        for seed, each in results["runs"].items()
        if each[SAME]["reward"] < each[THEIRS]["reward"]
    ]
    return [
        f"takes {in_words(same['cpu_seconds'], '.2f')} of TRL's CPU seconds for as many updates",
        f"The difference in reward is {in_words(same['reward_difference'])}",
        f"`same` ends below TRL {listed(below)}",
        f"raises mean@16 by {in_words(mean_interval(gains))}",
        f"by {listed([f'{each:.3f}' for each in gains])} on the three seeds",
        f"{span([each[THEIRS]['steps'] for each in runs])} tokens long",
    ]


def _uniform(runs: Collection[dict[str, Any]], arm: str) -> str:
    """Returns the share of groups without signal over seeds, in per cent."""
    return span([100 * statistics.fmean(each[arm]["batches"]["uniform_groups"]) for each in runs])


def _outside_stages(run: Run) -> float:
    """Returns the CPU seconds that no stage has recorded."""
    return float(run["cpu_seconds"] - sum(run["stages"].values()))


def _first_at_end(run: Run) -> float:
    """Returns the CPU seconds after which a run first has the reward that it ends with."""
    return float(next(each["cpu"] for each in run["curve"] if each["reward"] >= run["reward"]))


def _mean(runs: list[Run], name: str) -> float:
    return statistics.fmean(each[name] for each in runs)


def _in_words(ratio: dict[str, Any] | None) -> str:
    if ratio is None:
        return ""
    cpu = ratio["cpu_seconds"]
    spread = "" if cpu["low"] is None else f" [{cpu['low']:.2f}, {cpu['high']:.2f}]"
    reached, seeds = ratio["reached"], ratio["seeds"]
    note = "" if reached == seeds else f", reward reached on {reached} of {seeds} seeds"
    return f"{cpu['value']:.2f}{spread}{note}"


if __name__ == "__main__":
    main()
