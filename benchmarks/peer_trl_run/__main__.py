"""Runs both sides on an idle machine, one process after the other, and records what they spend.

python -m benchmarks.peer_trl_run PYTHON_OF_TRL 0 1 2 [--size 0.2M] [--side trl]
python -m benchmarks.peer_trl_run draw       # table and figure of the results

Writes benchmarks/results/peer_trl_run.json and docs/peer_trl_run.svg. Runs that the file has are
not repeated, so that a run that was interrupted goes on.
"""

import argparse
import statistics
from dataclasses import asdict
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.demo import RESULTS, ROOT, machine, revision_of
from benchmarks.figures import save_figure
from benchmarks.intervals import in_words, span
from benchmarks.peer_trl.processes import versions
from benchmarks.peer_trl_run.figure import draw
from benchmarks.peer_trl_run.runs import (
    Run,
    require_idle,
    run_ours,
    run_theirs,
    score_of_base,
)
from benchmarks.peer_trl_run.settings import ARMS, COMPOSED, NEAR_RATE, SAME, SIZES, TARGETS
from grpo.report.words import listed
from grpo.runtime.artifacts.files import read_json, write_json
from grpo.runtime.markdown import markdown_table

OUT, FIGURE = RESULTS / "peer_trl_run.json", ROOT / "docs" / "peer_trl_run.svg"
THEIRS = "trl"
SIDES = (THEIRS, *ARMS)
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
            # Alternating; the allocated arm ends at TRL's reward, so it follows.
            first = [THEIRS, SAME] if seed % 2 == 0 else [SAME, THEIRS]
            for side in [*first, SIZES[size].allocated]:
                if side in (chosen.side or SIDES):
                    measure(size, seed, side, chosen.python, busy=chosen.busy)
    results = read_json(OUT)
    save_figure(draw(results), FIGURE)
    print(table(results))


def measure(size: str, seed: int, side: str, python: str, *, busy: bool) -> None:
    """Adds a run to the results file, unless it has the run."""
    known = _read()["runs"].get(size, {}).get(str(seed), {})
    if side in known:
        return
    base = score_of_base(size, seed)
    if not busy:
        require_idle()
    if side == THEIRS:
        run = run_theirs(size, seed, python)
    else:
        run = run_ours(size, seed, side, goal=_goal(known, side))
    print(size, seed, side, {k: v for k, v in run.items() if k != "batches"}, flush=True)
    run |= {"revision": revision_of("HEAD"), "processor": machine()["processor"]}
    stored = _read()  # again: another process may have added a run
    runs = stored["runs"]
    runs.setdefault(size, {}).setdefault(str(seed), {}).update({"base": base, side: run})
    # The other sizes may have been measured with other settings, which stay.
    sizes = {**stored.get("sizes", {}), size: _settings(size)}
    write_json(OUT, {**about(python), "sizes": sizes, "runs": runs, **conclude(runs)})


def _read() -> dict[str, Any]:
    return read_json(OUT) if OUT.exists() else {"runs": {}}


def _goal(known: dict[str, Run], side: str) -> float | None:
    """Returns TRL's final reward, at which the allocated arm ends; None: the arm same."""
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
    """Returns, by size and arm, means over seeds with 95 % t intervals, and whether targets hold.

    Ratios are ours / TRL, seed by seed; only seeds that have both count.
    """
    found: dict[str, Any] = {}
    for size, seeds in runs.items():
        for arm in ARMS:
            pairs = [
                (each[arm], each[THEIRS]) for each in seeds.values() if {arm, THEIRS} <= {*each}
            ]
            if pairs:
                found.setdefault(size, {})[arm] = _compare(pairs)
    met = {
        size: {arm: _is_met(arm, each) for arm, each in arms.items()}
        for size, arms in found.items()
    }
    return {"ratios": found, "met": met}


def _is_met(arm: str, ours: dict[str, Any]) -> bool:
    """Returns whether an arm reaches TRL's reward for the targeted ratio at most."""
    return bool(ours["reach"] and ours["cpu_seconds"]["value"] <= TARGETS[arm])


def _compare(pairs: list[tuple[Run, Run]]) -> dict[str, Any]:
    """Returns ratios and the difference of rewards, and whether all runs reach TRL's reward."""
    ratios = {
        name: interval([ours[name] / theirs[name] for ours, theirs in pairs])
        for name in ("cpu_seconds", "wall_seconds", "peak_bytes")
    }
    gained = interval([ours["reward"] - theirs["reward"] for ours, theirs in pairs])
    return {
        **ratios,
        "reward_difference": gained,
        "reach": all(ours["reaches"] for ours, _ in pairs),
        "seeds": len(pairs),
    }


def interval(values: list[float]) -> dict[str, float | None]:
    """Returns the mean with a 95 % t interval over seeds; a single seed has no interval."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return {"value": round(mean, 4), "low": None, "high": None}
    half = float(stats.sem(np.array(values)) * stats.t.ppf(0.975, len(values) - 1))
    return {
        "value": round(mean, 4),
        "low": round(mean - half, 4),
        "high": round(mean + half, 4),
    }


def table(results: dict[str, Any]) -> str:
    """Returns means over seeds as a Markdown table, with ratios to TRL and their intervals."""
    titles = ["size", "side", "seeds", "CPU s", "wall s", "peak GB", "base", "reward", "CPU ratio"]
    rows: list[list[str]] = []
    for size, seeds in results["runs"].items():
        for side in SIDES:
            runs = [each[side] for each in seeds.values() if side in each]
            if not runs:
                continue
            base = statistics.fmean(each["base"]["reward"] for each in seeds.values())
            rows.append(
                [
                    size,
                    side,
                    str(len(runs)),
                    f"{_mean(runs, 'cpu_seconds'):.1f}",
                    f"{_mean(runs, 'wall_seconds'):.1f}",
                    f"{_mean(runs, 'peak_bytes') / 1e9:.2f}",
                    f"{base:.3f}",
                    f"{_mean(runs, 'reward'):.3f}",
                    _in_words(results["ratios"].get(size, {}).get(side), runs),
                ]
            )
    return markdown_table(titles, rows)


def claims(results: dict[str, Any]) -> list[str]:
    """Returns the numbers of the findings of docs/speed.md; README.md has the first three."""
    small, allocated = (results["ratios"]["0.2M"][arm] for arm in (SAME, COMPOSED))
    large, near_rate = (results["ratios"]["11.6M"][arm] for arm in (SAME, NEAR_RATE))
    seeds = [(each[COMPOSED], each[THEIRS]) for each in results["runs"]["0.2M"].values()]
    ratios = [ours["cpu_seconds"] / theirs["cpu_seconds"] for ours, theirs in seeds]
    firsts = [_first_at_end(theirs) / theirs["cpu_seconds"] for _, theirs in seeds]
    shorter = [ratio / first for ratio, first in zip(ratios, firsts)]
    starts = [_outside_stages(ours) / len(ours["curve"]) for ours, _ in seeds]
    sides = (small, large, allocated, near_rate)
    peaks = [f"{each['peak_bytes']['value']:.1f} times" for each in sides]
    reached = f"TRL's final reward in {in_words(allocated['cpu_seconds'], '.2f')}"
    runs = results["runs"]["11.6M"].values()
    eleventh = results["runs"]["11.6M"]["11"][THEIRS]
    rounds = [(each[NEAR_RATE]["curve"][0], each[THEIRS]) for each in runs]
    costs = [first["cpu"] / theirs["cpu_seconds"] for first, theirs in rounds]
    gaps = [first["reward"] - theirs["reward"] for first, theirs in rounds]
    return [
        f"takes {large['cpu_seconds']['value']:.2f} of TRL's CPU time at 11.6 M parameters",
        f"and {small['cpu_seconds']['value']:.2f} at 0.2 M, the default recipe",
        f"{reached} of the CPU time of TRL's whole run",
        f"takes {in_words(small['cpu_seconds'], '.2f')} of TRL's CPU seconds at 0.2 M",
        f"the interval ends at {small['cpu_seconds']['high']:.3f}",
        f"The difference in reward is {in_words(small['reward_difference'])}",
        f"{reached} of the CPU seconds of TRL's whole run",
        f"one round and {min(ratios):.2f} to {max(ratios):.2f} of TRL's seconds",
        f"takes {min(starts):.0f} to {max(starts):.0f} CPU s outside of stages",
        f"after {min(firsts):.2f} to {max(firsts):.2f} of its run",
        f"(at 11.6 M on seed 11 after {_first_at_end(eleventh) / eleventh['cpu_seconds']:.2f})",
        f"`composed` takes {min(shorter):.2f} to {max(shorter):.2f} of TRL's CPU",
        f"takes {in_words(large['cpu_seconds'], '.2f')} of TRL's CPU seconds for the same updates",
        f"The difference in reward is {in_words(large['reward_difference'])}",
        f"After one round, {min(costs):.2f} to {max(costs):.2f} of TRL's CPU seconds",
        f"it differs from TRL's final reward by {min(gaps):+.3f} to {max(gaps):+.3f}",
        f"{in_words(near_rate['cpu_seconds'], '.2f')} of TRL's CPU seconds at its end",
        f"`same` is {peaks[0]} TRL's at 0.2 M and {peaks[1]} at 11.6 M",
        f"that of `composed` {peaks[2]} at 0.2 M and that of `near_rate` {peaks[3]} at 11.6 M",
    ]


def steps_claims(results: dict[str, Any]) -> list[str]:
    """Returns the numbers of docs/speed.md on the size of 10.4 M; README.md has the first one."""
    same = results["ratios"]["10.4M"][SAME]
    runs = results["runs"]["10.4M"].values()
    ours, theirs = ([each[side] for each in runs] for side in (NEAR_RATE, THEIRS))
    rounds = [str(len(each["curve"])) for each in ours]
    spent = [f"{a['cpu_seconds'] / b['cpu_seconds']:.2f}" for a, b in zip(ours, theirs)]
    pairs = [(mine["curve"][0], peer) for mine, peer in zip(ours, theirs)]
    shares = [first["cpu"] / peer["cpu_seconds"] for first, peer in pairs]
    gaps = [first["reward"] - peer["reward"] for first, peer in pairs]
    gains = [each[THEIRS]["reward"] - each["base"]["reward"] for each in runs]
    steps, reached = [each["steps"] for each in theirs], sum(each["reaches"] for each in ours)
    uniform, chosen = (
        [statistics.fmean(each[arm]["batches"]["uniform_groups"]) for each in runs]
        for arm in (SAME, NEAR_RATE)
    )
    return [
        f"{same['cpu_seconds']['value']:.2f} at 10.4 M",
        f"takes {in_words(same['cpu_seconds'], '.2f')} of TRL's CPU seconds for the same updates",
        f"The difference in reward is {in_words(same['reward_difference'])}",
        f"raises mean@16 by {in_words(interval(gains))}",
        f"by {listed([f'{each:.3f}' for each in gains])} on the three seeds",
        f"{span(steps)} tokens long",
        f"reaches TRL's final reward on {reached} of {len(ours)} seeds",
        f"spends {listed(spent)} of TRL's CPU seconds in {listed(rounds)} rounds",
        f"After one round, {span(shares, '.2f')} of TRL's CPU seconds, it differs by "
        f"{span(gaps, '+.3f')}",
        f"{span([100 * each for each in uniform])} % of the groups of `same` have no signal",
        f"{span([100 * each for each in chosen])} % of those of `near_rate`",
    ]


def letters_claims(results: dict[str, Any]) -> list[str]:
    """Returns the numbers of docs/speed.md on one seed of a second task."""
    ((_, run),) = results["runs"]["11.6M"].items()
    theirs, ours = run[THEIRS], run[NEAR_RATE]
    curve, uniform = ours["curve"], ours["batches"]["uniform_groups"]
    per_round = len(uniform) // len(curve)
    equal = [
        f"{100 * statistics.fmean(uniform[start : start + per_round]):.0f} %"
        for start in range(0, len(uniform), per_round)
    ]
    shares = [f"{each['cpu'] / theirs['cpu_seconds']:.2f}" for each in curve]
    rewards = [f"{each['reward']:.3f}" for each in curve]
    return [
        f"`near_rate` needs {shares[-1]} of TRL's CPU seconds",
        f"from {run['base']['reward']:.3f} to {theirs['reward']:.3f}",
        f"{listed(rewards)}, after {listed(shares)} of TRL's seconds",
        f"{equal[0]} of the groups",
        listed(equal[1:]),
    ]


def _outside_stages(run: Run) -> float:
    """Returns the CPU seconds that no stage has recorded."""
    return float(run["cpu_seconds"] - sum(run["stages"].values()))


def _first_at_end(run: Run) -> float:
    """Returns the CPU seconds after which a run first has the reward that it ends with."""
    return float(next(each["cpu"] for each in run["curve"] if each["reward"] >= run["reward"]))


def _mean(runs: list[Run], name: str) -> float:
    return statistics.fmean(each[name] for each in runs)


def _in_words(ratio: dict[str, Any] | None, runs: list[Run]) -> str:
    if ratio is None:
        return ""
    cpu = ratio["cpu_seconds"]
    spread = "" if cpu["low"] is None else f" [{cpu['low']:.2f}, {cpu['high']:.2f}]"
    reached = sum(each["reaches"] for each in runs)
    note = "" if ratio["reach"] else f", reward reached on {reached} of {len(runs)} seeds"
    return f"{cpu['value']:.2f}{spread}{note}"


if __name__ == "__main__":
    main()
