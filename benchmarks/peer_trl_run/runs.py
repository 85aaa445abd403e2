"""One run of either side, and the workspaces that runs start from."""

import csv
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.demo import SERVERS, revision_of
from benchmarks.peer_trl_run.processes import Timed, run_timed
from benchmarks.peer_trl_run.settings import ROOT, SAME, SIZES, order_of, params_of
from grpo.params.yaml import dump_yaml
from grpo.runtime.artifacts.files import read_json, write_json
from grpo.runtime.artifacts.stored_iterations import iterations_of
from grpo.runtime.artifacts.tables import PROMPTS, REWARDS, ROLLOUTS, read_table

FOLDER = ROOT / ".work" / "peer_trl_run"
SCORES = "scores.json"  # in a base's workspace: the base's own evaluation
MOST_LOAD = 0.5  # of other processes, before a run
Run = dict[str, Any]


def base_workspace(size: str, seed: int) -> Path:
    """Returns a clone of the committed revision in which stages up to `base` are up to date."""
    workspace = FOLDER / f"{size}-{seed}-base"
    if not workspace.exists():
        workspace.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(workspace)], check=True)
    for command in (
        ["fetch", "--quiet", "origin"],
        ["reset", "--quiet", "--hard", revision_of("HEAD")],
    ):
        subprocess.run(["git", *command], cwd=workspace, check=True)
    _write_params(workspace, size, seed, SAME)
    reproduce(workspace, "base")
    return workspace


def score_of_base(size: str, seed: int) -> dict[str, float]:
    """Returns mean@k of the base policy."""
    workspace = base_workspace(size, seed)
    if not (workspace / SCORES).exists():
        base = workspace / "artifacts" / "policies" / "base"
        write_json(workspace / SCORES, evaluate(workspace, [base])[0])
    found: dict[str, float] = read_json(workspace / SCORES)
    return found


def time_theirs(size: str, seed: int, python: str, out: Path, **others: Any) -> Run:
    """Trains with TRL and returns what it spent.

    Args:
      out: Folder for the policies that it saves.
      others: Other values of the fields of `theirs.Order`.
    """
    workspace = base_workspace(size, seed)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    load = os.getloadavg()[0]
    order = order_of(
        SIZES[size], seed, workspace=str(workspace), out=str(out), started=time.time(), **others
    )
    timed = run_timed(
        [python, "-m", "benchmarks.peer_trl_run.theirs", json.dumps(order)],
        folder=ROOT,
        environment={"PYTHONPATH": str(ROOT)},
    )
    told = json.loads(timed.output.strip().splitlines()[-1])
    return _rounded(
        {
            "cpu_seconds": timed.cpu_seconds - told["paused_cpu_seconds"],
            "wall_seconds": timed.wall_seconds - told["paused_wall_seconds"],
            "peak_bytes": timed.peak_bytes,
            "load_before": load,
            "parameters": told["parameters"],
            "steps": sum(told["steps"]) / len(told["steps"]),
            "batches": {name: told[name] for name in ("cpu", "wall", "reward", "steps")},
        }
    )


def run_theirs(size: str, seed: int, python: str) -> Run:
    """Trains with TRL and evaluates the policies that it saved; only training is timed."""
    out = FOLDER / f"{size}-{seed}-trl"
    run = time_theirs(size, seed, python, out)
    saved = sorted(out.glob("update-*"), key=_update_of)
    curve = list[Run]()
    for policy, score in zip(saved, evaluate(base_workspace(size, seed), saved)):
        last = _update_of(policy) - 1
        spent = {cost: run["batches"][cost][last] for cost in ("cpu", "wall")}
        curve.append({"update": last + 1, **spent, **score})
    # The last policy counts when it is saved, at the end of the process.
    curve[-1].update(cpu=run["cpu_seconds"], wall=run["wall_seconds"])
    return {**run, "reward": curve[-1]["reward"], "curve": curve}


def run_ours(size: str, seed: int, arm: str, *, goal: float | None) -> Run:
    """Runs `flows.reproduce --no-server` up to training, round by round; evaluates each round.

    Only the runs are timed: planning, profile, curriculum, rollouts, scores and training, each from
    the start of a process. The base exists, as it does for TRL.

    Args:
      goal: The first round that reaches this reward is the last; None: all rounds.
    """
    workspace = FOLDER / f"{size}-{seed}-{arm}"
    shutil.rmtree(workspace, ignore_errors=True)
    shutil.copytree(base_workspace(size, seed), workspace, symlinks=True)
    _write_params(workspace, size, seed, arm)
    reproduce(workspace, "base")  # untimed: the stage check reads the file of parameters
    load, peak, curve = os.getloadavg()[0], 0, list[Run]()
    cpu = wall = 0.0
    for name in params_of(SIZES[size], seed, arm)["rounds"]:
        timed = reproduce(workspace, f"train@{name}")
        cpu, wall = cpu + timed.cpu_seconds, wall + timed.wall_seconds
        peak = max(peak, timed.peak_bytes)
        (score,) = evaluate(workspace, [workspace / "artifacts" / "policies" / name])
        curve.append({"round": name, "cpu": round(cpu, 3), "wall": round(wall, 3), **score})
        if goal is not None and score["reward"] >= goal:
            break
    rows = [row for each in curve for row in _updates(workspace, each["round"])]
    ends = [end for each in curve for end in _update_ends(workspace, each["round"], each["wall"])]
    return {
        "cpu_seconds": curve[-1]["cpu"],
        "wall_seconds": curve[-1]["wall"],
        "peak_bytes": peak,
        "load_before": load,
        "reward": curve[-1]["reward"],
        "stages": _stage_seconds(workspace),
        "batches": {
            "wall": ends,
            "reward": [round(float(row["reward_mean"]), 5) for row in rows],
            "rollouts": [int(row["rollouts"]) for row in rows],
            "uniform_groups": [round(float(row["uniform_group_fraction"]), 5) for row in rows],
        },
        "families": by_family(workspace, [each["round"] for each in curve]),
        "curve": curve,
    }


def by_family(workspace: Path, rounds: list[str]) -> dict[str, dict[str, list[int]]]:
    """Returns, by family, the rollouts that each iteration sampled and how many were solved."""
    artifacts = workspace / "artifacts"
    prompts = read_table(artifacts / "prompts" / "train.parquet", PROMPTS)
    family = prompts.set_index("prompt_id")["family"]
    found: dict[str, dict[str, list[int]]] = {
        name: {"rollouts": [], "solved": []} for name in sorted(set(family))
    }
    for each in [files for name in rounds for files in iterations_of(artifacts, name)]:
        own = family[read_table(each.table, ROLLOUTS)["prompt_id"]].to_numpy()
        outcomes = read_table(each.rewards, REWARDS)["outcome"].to_numpy()
        for name, counts in found.items():
            counts["rollouts"].append(int((own == name).sum()))
            counts["solved"].append(int(outcomes[own == name].sum()))
    return found


def evaluate(workspace: Path, policies: list[Path]) -> list[dict[str, float]]:
    """Returns mean@k and mean steps of policies of either side, by this project's sampler."""
    command = [sys.executable, "-m", "benchmarks.peer_trl_run.evaluate", str(workspace)]
    done = run_timed(
        [*command, *map(str, policies)], folder=ROOT, environment={"PYTHONPATH": str(ROOT)}
    )
    return [json.loads(line) for line in done.output.splitlines() if line.startswith("{")]


def require_idle() -> None:
    """Waits until the machine is idle, at most ten minutes.

    Raises:
      SystemExit: If it does not become idle.
    """
    for _ in range(60):
        if os.getloadavg()[0] <= MOST_LOAD:
            return
        time.sleep(10)
    raise SystemExit(f"the machine must be idle, its load is {os.getloadavg()[0]:.1f}")


def _write_params(workspace: Path, size: str, seed: int, arm: str) -> None:
    (workspace / "params.yaml").write_text(dump_yaml(params_of(SIZES[size], seed, arm)))


def reproduce(workspace: Path, target: str) -> Timed:
    """Runs `python -m flows.reproduce --no-server TARGET` with the code of the workspace."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    with_servers = {name: "" for name in SERVERS if name in os.environ}
    return run_timed(
        [sys.executable, "-m", "flows.reproduce", "--no-server", target],
        folder=workspace,
        environment={"PATH": path, "PYTHONPATH": str(workspace), **with_servers},
    )


def _stage_seconds(workspace: Path) -> dict[str, float]:
    """Returns the CPU seconds that each stage after the base has recorded."""
    return {
        path.stem: round(read_json(path)["cpu_seconds"], 2)
        for path in sorted((workspace / ".runs").glob("*.json"))
        if path.stem not in ("prepare", "base")
    }


def _updates(workspace: Path, name: str) -> list[dict[str, str]]:
    with (workspace / "artifacts" / "training" / name / "updates.csv").open() as file:
        return list(csv.DictReader(file))


def _update_ends(workspace: Path, name: str, wall: float) -> list[float]:
    """Returns the wall seconds at which each update of a round ended; the round ended at `wall`."""
    spans = read_json(workspace / ".runs" / f"train@{name}.json")["spans"]
    return update_ends(spans, len(_updates(workspace, name)), wall)


def update_ends(spans: list[tuple[str, float, float]], updates: int, wall: float) -> list[float]:
    """Returns the wall seconds at which each update ended, those of an iteration at its end.

    Args:
      spans: What `train@` did, and its start and end on a clock of its own.
      wall: At which the run ended. What followed the stage counts for each update, too.
    """
    ends = [end for part, _, end in spans if part == "update"]  # of iterations
    last = max(end for _, _, end in spans)
    each = updates // len(ends)
    return [round(wall - (last - ends[index // each]), 3) for index in range(updates)]


def _update_of(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def _rounded(run: Run) -> Run:
    return {k: round(v, 3) if isinstance(v, float) else v for k, v in run.items()}
