"""What Prefect and MLflow cost: the default pipeline through both, against plain `dvc repro`.

python -m benchmarks.overhead 1    # repeats; writes results/overhead.json and docs/overhead.svg
python -m benchmarks.overhead      # table and figure from the results

Every run starts from nothing, in a clone of the committed revision: `dvc repro`, the flow with one
stage at a time, and the flow as it is, with independent stages side by side. The flows report to
servers of Prefect and MLflow that run already; `dvc repro` records its lineage in a file.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from benchmarks.demo import RESULTS, ROOT, machine, revision_of
from benchmarks.figures import save_figure
from flows.server import free_port, mlflow_server, prefect_server
from flows.settings import SETTINGS
from grpo.artifacts.files import read_json, write_json
from grpo.report.drawing import styled

OUT = RESULTS / "overhead.json"
FIGURE = ROOT / "docs" / "overhead.svg"
PLAIN = "dvc repro"
COMMANDS = {
    PLAIN: ["dvc", "repro", "--quiet"],
    "flow, one stage at a time": ["flows.reproduce", "--at-once", "1"],
    "flow": ["flows.reproduce"],
}


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead")
    parser.add_argument("repeats", type=int, nargs="?", default=0)
    repeats = parser.parse_args().repeats
    if repeats:
        revision = revision_of("HEAD")
        runs = [{name: run(name, revision) for name in COMMANDS} for _ in range(repeats)]
        command = f"python -m benchmarks.overhead {repeats}"
        write_json(
            OUT, {"command": command, "revision": revision, "machine": machine(), "runs": runs}
        )
    results = read_json(OUT)
    save_figure(draw(results), FIGURE)
    print(table(results))


def run(name: str, revision: str) -> dict[str, float]:
    """Returns the seconds of a run from nothing, on the wall and of the stages' processors."""
    with tempfile.TemporaryDirectory() as folder, running_servers(Path(folder)) as addresses:
        workspace = Path(folder) / "workspace"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(workspace)], check=True)
        subprocess.run(["git", "checkout", "--quiet", revision], cwd=workspace, check=True)
        environment = {**os.environ, "PYTHONPATH": str(workspace)}
        command = [sys.executable, "-m", *COMMANDS[name]]
        start = time.perf_counter()
        subprocess.run(
            command,
            cwd=workspace,
            env=environment if name == PLAIN else {**environment, **addresses},
            check=True,
        )
        seconds = time.perf_counter() - start
        usage = [read_json(path) for path in (workspace / ".runs").glob("*.json")]
        return {
            "seconds": round(seconds, 1),
            "stage_cpu_seconds": round(sum(each["cpu_seconds"] for each in usage), 1),
            "stages": len(usage),
        }


@contextmanager
def running_servers(folder: Path) -> Iterator[dict[str, str]]:
    """Runs both servers over stores in a folder; yields the environment of who reports to them."""
    before = Path.cwd()
    os.environ.update({**SETTINGS, "PREFECT_HOME": str(folder / "prefect")})
    os.chdir(folder)  # their logs
    try:
        store = f"sqlite:///{folder}/mlflow.db"
        with prefect_server(free_port()) as prefect, mlflow_server(store, free_port()) as mlflow:
            os.chdir(before)
            yield {"PREFECT_API_URL": f"{prefect}/api", "MLFLOW_TRACKING_URI": mlflow}
    finally:
        os.chdir(before)


def table(results: dict[str, Any]) -> str:
    """Returns Markdown: medians, and the ratio to `dvc repro` with its smallest and largest."""
    lines = ["| how | seconds | stages' CPU s | against dvc repro |", "|---|---|---|---|"]
    for name in COMMANDS:
        ratios = [each[name]["seconds"] / each[PLAIN]["seconds"] for each in results["runs"]]
        seconds, cpu = (
            median(each[name][key] for each in results["runs"])
            for key in ("seconds", "stage_cpu_seconds")
        )
        spread = f"{median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
        lines.append(f"| {name} | {seconds:.0f} | {cpu:.0f} | {spread} |")
    return "\n".join(lines)


def draw(results: dict[str, Any]) -> Figure:
    """Returns the seconds of every run, by how it was run."""
    with styled():
        figure = Figure(figsize=(7.0, 2.6), layout="constrained")
        axes = figure.subplots()
        for name in COMMANDS:
            seconds = [each[name]["seconds"] for each in results["runs"]]
            axes.barh([name], [median(seconds)], height=0.5)
            axes.plot(seconds, [name] * len(seconds), "k.")
        axes.invert_yaxis()
        axes.set_xlabel("seconds of the default pipeline from nothing")
    return figure


if __name__ == "__main__":
    main()
