"""Kills train@ at random moments of a round of several iterations, by executor and staleness.

python -m benchmarks.iteration_kills                    # writes results/iteration_kills.json
python -m benchmarks.iteration_kills --executors ray    # replaces its rows

The round has eight iterations. All runs are compared with one that nothing disturbs, in one process
(the executor local). A stage is killed by SIGKILL at a random moment of its run, and the same
command is run again. Then, with workers, one of them is killed, and the stage goes on by itself.
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
    parser.add_argument("--kills", type=int, default=20, help="of the stage")
    parser.add_argument("--lost", type=int, default=5, help="workers")
    parser.add_argument("--executors", nargs="+", choices=EXECUTORS, default=list(EXECUTORS))
    chosen = parser.parse_args()
    stored = read_json(OUT)["rows"] if OUT.exists() else []
    rows = [row for row in stored if row["executor"] not in chosen.executors]
    with tempfile.TemporaryDirectory() as folder:
        workspace = Path(folder) / "workspace"
        make_workspace(workspace, params_of("local", 0))
        run_stages(workspace, skipped=[f"train@{ROUND}", f"evaluate@{ROUND}", "evaluate-base"])
        for staleness in (0, 1):
            expected, _ = undisturbed(workspace, "local", staleness)
            for executor in chosen.executors:
                row = kill_often(workspace, executor, staleness, chosen.kills, expected)
                if executor != "local":
                    row |= lose_workers(workspace, executor, staleness, chosen.lost, expected)
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
    titles = ["executor, workers", "staleness", "killed stages: same bytes"]
    titles += ["killed workers: same bytes", "batches sampled twice", "seconds without a kill"]
    titles += ["longest rerun", "longest run that lost a worker", "processes left after 30 s"]
    rows = [
        [
            f"{row['executor']}, {row['workers']}",
            str(row["staleness"]),
            f"{row['same_bytes']} of {row['kills']}",
            f"{row['lost_same_bytes']} of {row['lost']}" if "lost" in row else "",
            str(row["batches_again"]) if "lost" in row else "",
            f"{row['seconds_without_kill']:.1f}",
            f"{max(row['seconds_of_reruns']):.1f}",
            f"{max(row['seconds_of_lost']):.1f}" if "lost" in row else "",
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


def undisturbed(workspace: Path, executor: str, staleness: int) -> tuple[dict[str, bytes], float]:
    """Returns bytes and seconds of a run without a kill."""
    make_workspace(workspace, params_of(executor, staleness))
    clear(workspace)
    began = time.monotonic()
    run_to_end(workspace)
    return outputs(workspace), time.monotonic() - began


def kill_often(
    workspace: Path, executor: str, staleness: int, kills: int, expected: dict[str, bytes]
) -> dict[str, Any]:
    """Returns how often killed stages ended with the expected bytes when they were run again."""
    made, whole = undisturbed(workspace, executor, staleness)
    if made != expected:
        raise SystemExit(f"{executor}, staleness {staleness}: other bytes than in one process")
    choose = random.Random(f"{executor} {staleness}")
    same = 0
    orphans = Counter[str]()
    seconds = []
    for _ in range(kills):
        clear(workspace)
        stage = start(workspace)
        time.sleep(choose.uniform(0.0, whole))
        below = processes_below(stage)
        stage.send_signal(signal.SIGKILL)
        stage.wait()
        orphans.update(still_running(below))
        began = time.monotonic()
        run_to_end(workspace)
        seconds.append(round(time.monotonic() - began, 2))
        same += outputs(workspace) == expected
    return {
        "executor": executor,
        "workers": EXECUTORS[executor],
        "staleness": staleness,
        "kills": kills,
        "same_bytes": same,
        "orphans": dict(sorted(orphans.items())),
        "seconds_without_kill": round(whole, 2),
        "seconds_of_reruns": sorted(seconds),
    }


def lose_workers(
    workspace: Path, executor: str, staleness: int, lost: int, expected: dict[str, bytes]
) -> dict[str, Any]:
    """Returns how often a stage that lost a worker ended, by itself, with the expected bytes.

    A batch is sampled twice if its files, complete when the worker was killed, are written anew.
    """
    choose = random.Random(f"lost {executor} {staleness}")
    same = again = 0
    seconds = []
    for _ in range(lost):
        clear(workspace)
        began = time.monotonic()
        stage = start(workspace)
        # Not before rollouts of a later iteration are judged.
        of_iteration = choose.randint(1, ITERATIONS - 2)
        while judged_iterations(workspace) < of_iteration and stage.poll() is None:
            time.sleep(0.01)
        time.sleep(choose.uniform(0.0, 0.5))
        workers = [each for each in processes_below(stage) if is_worker(each)]
        if not workers:
            raise SystemExit(f"train@{ROUND} has no workers in iteration {of_iteration}")
        complete = written(workspace)
        choose.choice(workers).kill()
        changed = set[Path]()
        while stage.poll() is None:
            now = written(workspace)
            changed |= {path for path in now.keys() & complete if now[path] != complete[path]}
            time.sleep(0.05)
        again += len(changed)
        seconds.append(round(time.monotonic() - began, 2))
        same += stage.returncode == 0 and outputs(workspace) == expected
    return {
        "lost": lost,
        "lost_same_bytes": same,
        "batches_again": again,
        "seconds_of_lost": sorted(seconds),
    }


def judged_iterations(workspace: Path) -> int:
    """Returns the number of later iterations whose rollouts are judged."""
    return len([*workspace.glob(f".work/train@{ROUND}/*/iteration-*/rewards.parquet")])


def written(workspace: Path) -> dict[Path, int]:
    """Returns the times at which the complete batches in the scratch of train@ were written."""
    found = dict[Path, int]()
    for path in workspace.glob(f".work/train@{ROUND}/**/batch-*/cost.json"):
        with suppress(FileNotFoundError):  # the batches of an iteration are merged
            found[path] = path.stat().st_mtime_ns
    return found


def processes_below(stage: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Returns the processes that a stage has started, and those that these have started."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(stage.pid).children(recursive=True)
    return []


def still_running(below: list[psutil.Process]) -> list[str]:
    """Returns the names of the processes that run on SETTLE_SECONDS later."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while (left := [*filter(None, map(name_if_running, below))]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


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
