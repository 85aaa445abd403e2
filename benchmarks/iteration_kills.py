"""Kills train@ at random moments of a round of several iterations, by executor and staleness.

python -m benchmarks.iteration_kills                    # writes results/iteration_kills.json
python -m benchmarks.iteration_kills --executors ray    # replaces its rows

The round has eight iterations. A run without a kill gives the bytes and the seconds; every kill
comes at a random moment within these seconds, by SIGKILL, and the same command is run again. Half
of the kills of workers' stages hit a worker and not the stage.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.demo import RESULTS, ROOT, machine, revision_of
from benchmarks.workspaces import make_workspace, run_stages
from grpo.params.recipes import read_content
from grpo.runtime.artifacts.files import read_json, write_json
from grpo.runtime.markdown import markdown_table

OUT = RESULTS / "iteration_kills.json"
ITERATIONS = 8
SETTLE_SECONDS = 30.0  # after which processes below a killed stage must have ended
ROUND = "uniform-1"
EXECUTORS = {"local": 1, "processes": 2, "ray": 2}
OUTPUTS = (f"artifacts/policies/{ROUND}", f"artifacts/training/{ROUND}")
COMMAND = [
    *(sys.executable, "-m", "stages.train", "artifacts/data/judge.json"),
    *("artifacts/policies/base", "artifacts/policies/base", "artifacts/prompts/train.parquet"),
    *("artifacts/curricula/uniform.parquet", f"artifacts/rollouts/{ROUND}"),
    *(f"artifacts/rewards/{ROUND}.parquet", *OUTPUTS),
]


def main() -> None:
    """Kills each combination of executor and staleness, and writes what came of it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.iteration_kills")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--executors", nargs="+", choices=EXECUTORS, default=list(EXECUTORS))
    chosen = parser.parse_args()
    stored = read_json(OUT)["rows"] if OUT.exists() else []
    rows = [row for row in stored if row["executor"] not in chosen.executors]
    with tempfile.TemporaryDirectory() as folder:
        workspace = Path(folder) / "workspace"
        make_workspace(workspace, params_of("local", 0))
        run_stages(workspace, skipped=[f"train@{ROUND}", f"evaluate@{ROUND}", "evaluate-base"])
        for executor in chosen.executors:
            for staleness in (0, 1):
                row = kill_often(workspace, executor, staleness, chosen.kills)
                rows.append({**row, "revision": revision_of("HEAD")})
                print(rows[-1], flush=True)
    rows.sort(key=lambda row: (list(EXECUTORS).index(row["executor"]), row["staleness"]))
    write_json(
        OUT,
        {
            "command": "python -m benchmarks.iteration_kills",
            "machine": machine(),
            "iterations": ITERATIONS,
            "rows": rows,
        },
    )


def table(results: dict[str, Any]) -> str:
    """Returns a Markdown table with a row per executor and staleness."""
    titles = ["executor, workers", "staleness", "same bytes", "kills of workers"]
    titles += ["seconds without a kill", "longest rerun", "processes left after 30 s"]
    rows = [
        [
            f"{row['executor']}, {row['workers']}",
            str(row["staleness"]),
            f"{row['same_bytes']} of {row['kills']}",
            str(row["of_workers"]),
            f"{row['seconds_without_kill']:.1f}",
            f"{max(row['seconds_of_reruns']):.1f}",
            str(sum(row["orphans"].values())),
        ]
        for row in results["rows"]
    ]
    return markdown_table(titles, rows)


def params_of(executor: str, staleness: int) -> dict[str, Any]:
    """Returns the smoke recipe with one arm and one round of eight iterations."""
    params: dict[str, Any] = read_content(ROOT / "recipes" / "smoke.yaml")
    arm = params["arms"].pop("sgpo")
    arm["curriculum"] = [
        {"split_at_random": {"phases": 1, "prompts_per_phase": 32}},
        {"fix_group_size": {"rollouts": 8}},
    ]
    grpo = {"low": 0.2, "high": 0.28, "beta": 0.01}
    arm["objective"] = [{"truncate_mismatch": {"weight_max": 2.0}}, {"grpo": grpo}]
    arm["sampling"]["rollouts_per_batch"] = 8
    arm["training"] |= {
        "iterations_per_round": ITERATIONS,
        "updates_per_iteration": 1,
        "updates_per_checkpoint": 2,
        "staleness": staleness,
    }
    params["arms"]["uniform"] = arm
    params["rounds"] = {ROUND: {"arm": "uniform", "start": "base", "phase": 1}}
    params["sampling"] = {"executor": executor, "workers": EXECUTORS[executor]}
    return params


def kill_often(workspace: Path, executor: str, staleness: int, kills: int) -> dict[str, Any]:
    """Returns how often killed runs ended with the bytes of one that was not killed."""
    make_workspace(workspace, params_of(executor, staleness))
    start = time.monotonic()
    run_to_end(workspace)
    whole = time.monotonic() - start
    expected = outputs(workspace)
    choose = random.Random(f"{executor} {staleness}")
    same = workers_killed = 0
    orphans = Counter[str]()
    seconds = []
    for number in range(kills):
        clear(workspace)
        of_worker = executor != "local" and number % 2 == 1
        is_worker, left = kill_once(workspace, choose.uniform(0.0, whole), choose, of_worker)
        workers_killed += is_worker
        orphans.update(left)
        start = time.monotonic()
        run_to_end(workspace)
        seconds.append(round(time.monotonic() - start, 2))
        same += outputs(workspace) == expected
    return {
        "executor": executor,
        "workers": EXECUTORS[executor],
        "staleness": staleness,
        "kills": kills,
        "of_workers": workers_killed,
        "same_bytes": same,
        "orphans": dict(sorted(orphans.items())),
        "seconds_without_kill": round(whole, 2),
        "seconds_of_reruns": sorted(seconds),
    }


def kill_once(
    workspace: Path, after: float, choose: random.Random, of_worker: bool
) -> tuple[bool, list[str]]:
    """Kills the stage, or a process below it, after some seconds.

    Returns:
      Whether a process below the stage was hit, and the names of what runs on SETTLE_SECONDS later.
    """
    stage = start(workspace)
    time.sleep(after)
    below: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        below = psutil.Process(stage.pid).children(recursive=True)
    workers = [each for each in below if is_worker(each)]
    if of_worker and workers:
        with suppress(psutil.NoSuchProcess):
            choose.choice(workers).kill()
        stage.wait()
        hit = True
    else:
        stage.send_signal(signal.SIGKILL)
        stage.wait()
        hit = False
    deadline = time.monotonic() + SETTLE_SECONDS
    while (left := [*filter(None, map(name_if_running, below))]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return hit, left


def name_if_running(process: psutil.Process) -> str:
    """Returns a process's name; "" if it has ended, also if nobody has waited for it (zombie)."""
    with suppress(psutil.NoSuchProcess):
        if process.status() != psutil.STATUS_ZOMBIE:
            return str(process.name())
    return ""


def is_worker(process: psutil.Process) -> bool:
    """Returns whether a process samples for the stage."""
    with suppress(psutil.Error):
        line = " ".join(process.cmdline())
        return "executors.worker" in line or "ray::_Actor" in line
    return False


def start(workspace: Path) -> subprocess.Popen[bytes]:
    """Starts train@ in a workspace."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(workspace)}
    return subprocess.Popen(
        COMMAND, cwd=workspace, env=environment, stderr=subprocess.DEVNULL, start_new_session=True
    )


def run_to_end(workspace: Path) -> None:
    """Runs train@ until it has ended well."""
    code = start(workspace).wait()
    if code:
        raise SystemExit(f"train@{ROUND} ended with exit code {code}")


def clear(workspace: Path) -> None:
    """Removes outputs and scratch of train@."""
    for name in (*OUTPUTS, ".work"):
        shutil.rmtree(workspace / name, ignore_errors=True)


def outputs(workspace: Path) -> dict[str, bytes]:
    """Returns the bytes of the outputs by path."""
    return {
        path.relative_to(workspace).as_posix(): path.read_bytes()
        for name in OUTPUTS
        for path in sorted((workspace / name).rglob("*"))
        if path.is_file()
    }


if __name__ == "__main__":
    main()
