"""Kills train@ at random moments of a round of several iterations, by executor and staleness.

python -m benchmarks.iteration_kills                    # adds to results/iteration_kills.json
python -m benchmarks.iteration_kills --executors ray    # adds to its rows alone

The round has eight iterations. All runs are compared with one that nothing disturbs, in one process
(the executor local). A stage is killed by SIGKILL, three times in four while it trains a random
iteration and otherwise at a random moment of its whole run; the same command is run again. Then,
with workers, one of them is killed while a random iteration is sampled, and the stage goes on by
itself. Kills of one revision add up.
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
    with tempfile.TemporaryDirectory() as folder:
        workspace = Path(folder) / "workspace"
        make_workspace(workspace, params_of("local", 0))
        run_stages(workspace, skipped=[f"train@{ROUND}", f"evaluate@{ROUND}", "evaluate-base"])
        for staleness in (0, 1):
            expected, _ = undisturbed(workspace, "local", staleness)
            for executor in chosen.executors:
                stored = read_row(executor, staleness)
                row = kill_often(workspace, stored, chosen.kills, expected)
                if executor != "local":
                    row |= lose_workers(workspace, stored, chosen.lost, expected)
                write_row(row)
                print(row, flush=True)


def read_row(executor: str, staleness: int) -> dict[str, Any]:
    """Returns what was counted at this revision, or a row without a kill."""
    own = {"executor": executor, "staleness": staleness, "revision": revision_of("HEAD")}
    for row in read_json(OUT)["rows"] if OUT.exists() else []:
        if own.items() <= row.items():
            found: dict[str, Any] = row
            return found
    numbers = dict.fromkeys(("kills", "same_bytes", "orphans"), 0)
    row = {**own, "workers": EXECUTORS[executor], **numbers, "judged": [], "seconds_of_reruns": []}
    if executor != "local":
        row |= dict.fromkeys(("lost", "lost_same_bytes", "batches_complete", "batches_again"), 0)
        row["seconds_of_lost"] = []
    return row


def write_row(row: dict[str, Any]) -> None:
    """Stores a row in the place of the one of its executor and staleness."""
    stored = read_json(OUT)["rows"] if OUT.exists() else []
    key = ("executor", "staleness")
    rows = [each for each in stored if any(each[name] != row[name] for name in key)] + [row]
    rows.sort(key=lambda each: (list(EXECUTORS).index(each["executor"]), each["staleness"]))
    about = {"command": "python -m benchmarks.iteration_kills", "machine": machine()}
    write_json(OUT, {**about, "iterations": ITERATIONS, "rows": rows})


def table(results: dict[str, Any]) -> str:
    """Returns a Markdown table with a row per executor and staleness."""
    titles = ["executor, workers", "staleness", "killed stages: same bytes", "in an iteration"]
    titles += ["killed workers: same bytes", "complete batches", "of these, sampled again"]
    titles += ["seconds without a kill", "longest rerun", "processes left after 30 s"]
    rows = []
    for row in results["rows"]:
        of_workers = [""] * 3
        if "lost" in row:
            of_workers = [f"{row['lost_same_bytes']} of {row['lost']}"]
            of_workers += [str(row["batches_complete"]), str(row["batches_again"])]
        rows.append(
            [
                f"{row['executor']}, {row['workers']}",
                str(row["staleness"]),
                f"{row['same_bytes']} of {row['kills']}",
                str(sum(each > 0 for each in row["judged"])),
                *of_workers,
                f"{row['seconds_without_kill']:.1f}",
                f"{max(row['seconds_of_reruns']):.1f}",
                str(row["orphans"]),
            ]
        )
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
    workspace: Path, stored: dict[str, Any], kills: int, expected: dict[str, bytes]
) -> dict[str, Any]:
    """Returns a row with further kills of the stage, each followed by a run to the end."""
    executor, staleness = stored["executor"], stored["staleness"]
    made, whole = undisturbed(workspace, executor, staleness)
    if made != expected:
        raise SystemExit(f"{executor}, staleness {staleness}: other bytes than in one process")
    choose = random.Random(f"{executor} {staleness} {stored['kills']}")
    row = {**stored, "seconds_without_kill": round(whole, 2)}
    judged, seconds = [*stored["judged"]], [*stored["seconds_of_reruns"]]
    while row["kills"] < stored["kills"] + kills:
        clear(workspace)
        stage = start(workspace)
        if row["kills"] % 4:
            wait_for(stage, workspace, judged=choose.randrange(1, ITERATIONS))
            time.sleep(choose.uniform(0.0, whole / ITERATIONS / 2))
        else:
            time.sleep(choose.uniform(0.0, whole))
        below = processes_below(stage.pid)
        iterations = judged_iterations(workspace)
        if stage.poll() is not None:
            continue  # it had ended; another moment is drawn
        stage.send_signal(signal.SIGKILL)
        stage.wait()
        row["orphans"] += count_running(below)
        began = time.monotonic()
        run_to_end(workspace)
        seconds.append(round(time.monotonic() - began, 2))
        row["kills"] += 1
        judged.append(iterations)
        row["same_bytes"] += outputs(workspace) == expected
    return {**row, "judged": judged, "seconds_of_reruns": seconds}


def lose_workers(
    workspace: Path, stored: dict[str, Any], lost: int, expected: dict[str, bytes]
) -> dict[str, Any]:
    """Returns what comes of killing a worker while an iteration is sampled.

    The stage must end by itself. A batch that was complete counts as sampled again if its files are
    written anew.
    """
    choose = random.Random(f"lost {stored['executor']} {stored['staleness']} {stored['lost']}")
    names = ("lost", "lost_same_bytes", "batches_complete", "batches_again")
    row, seconds = {name: stored[name] for name in names}, [*stored["seconds_of_lost"]]
    while row["lost"] < stored["lost"] + lost:
        clear(workspace)
        began = time.monotonic()
        stage = start(workspace)
        wait_for(stage, workspace, judged=choose.randrange(1, ITERATIONS - 1))
        workers = workers_of(stage.pid)
        complete = written(workspace)
        while not complete and stage.poll() is None:
            complete = written(workspace)
        if workers:
            choose.choice(workers).kill()
        if not workers or not written(workspace):
            stage.kill()
            stage.wait()
            continue  # the iteration was sampled before; another one is drawn
        changed = set[Path]()
        while stage.poll() is None:
            now = written(workspace)
            changed |= {path for path in now.keys() & complete if now[path] != complete[path]}
            time.sleep(0.005)
        row["lost"] += 1
        row["batches_complete"] += len(complete)
        row["batches_again"] += len(changed)
        seconds.append(round(time.monotonic() - began, 2))
        row["lost_same_bytes"] += stage.returncode == 0 and outputs(workspace) == expected
    return {**row, "seconds_of_lost": seconds}


def wait_for(stage: subprocess.Popen[bytes], workspace: Path, *, judged: int) -> None:
    """Waits until so many later iterations are judged, or the stage has ended."""
    while judged_iterations(workspace) < judged and stage.poll() is None:
        time.sleep(0.005)


def judged_iterations(workspace: Path) -> int:
    """Returns the number of later iterations whose rollouts are judged."""
    return len([*workspace.glob(f".work/train@{ROUND}/*/iteration-*/rewards.parquet")])


def written(workspace: Path) -> dict[Path, int]:
    """Returns when the complete batches of the iteration that is being sampled were written."""
    found = dict[Path, int]()
    for path in workspace.glob(f".work/train@{ROUND}/*/iteration-*/batches/batch-*/cost.json"):
        with suppress(FileNotFoundError):  # the batches of an iteration are merged
            found[path] = path.stat().st_mtime_ns
    return found


def processes_below(stage: int) -> list[psutil.Process]:
    """Returns the processes that a stage has started, and those that these have started.

    Args:
      stage: The process ID of the stage.
    """
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(stage).children(recursive=True)
    return []


def count_running(below: list[psutil.Process]) -> int:
    """Returns how many of some processes run on SETTLE_SECONDS later."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while (left := sum(map(is_running, below))) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def is_running(process: psutil.Process) -> bool:
    """Returns whether a process has not ended; one that nobody has waited for (zombie) has."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def workers_of(stage: int) -> list[psutil.Process]:
    """Returns the processes that sample for a stage; not those that they have forked, the judges.

    Args:
      stage: The process ID of the stage.
    """
    workers = {each.pid: each for each in processes_below(stage) if is_worker(each)}
    return [each for each in workers.values() if parent_of(each) not in workers]


def is_worker(process: psutil.Process) -> bool:
    """Returns whether a process has the command line of a worker."""
    with suppress(psutil.Error):
        line = " ".join(process.cmdline())
        return "executors.worker" in line or "ray::_Actor" in line
    return False


def parent_of(process: psutil.Process) -> int | None:
    """Returns the process ID of a process's parent; None if it has ended."""
    with suppress(psutil.Error):
        return process.ppid()
    return None


def start(workspace: Path, stderr: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    """Starts train@ in a workspace."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(workspace)}
    return subprocess.Popen(
        COMMAND, cwd=workspace, env=environment, stderr=stderr, start_new_session=True
    )


def run_to_end(workspace: Path) -> None:
    """Runs train@ until it has ended well."""
    with tempfile.TemporaryFile("w+") as said:
        code = start(workspace, said.fileno()).wait()
        if code:
            said.seek(0)
            last = said.read().strip().rpartition("\n")[2]
            raise SystemExit(f"train@{ROUND} ended with exit code {code}: {last}")


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
