"""Measures the overhead of Prefect and MLflow relative to plain `dvc repro`.

python -m benchmarks.overhead 2    # repeats; writes results/overhead.json and docs/overhead.svg
python -m benchmarks.overhead      # table and figure from the results

Every run of the default pipeline starts from scratch in a fresh clone. The flows report to running
servers of Prefect and MLflow; `dvc repro` records its lineage in a file.
"""

import argparse
import os
import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from statistics import median
from typing import Any
from unittest.mock import patch

from matplotlib.figure import Figure

from benchmarks.demo import (
    RESULTS,
    ROOT,
    fresh_clone,
    machine,
    read_usage,
    revision_of,
    time_module,
)
from benchmarks.figures import save_figure
from flows.server import free_port, mlflow_server, prefect_server
from flows.settings import SETTINGS
from grpo.report.style import styled
from grpo.runtime.artifacts.files import read_json, write_json
from grpo.runtime.markdown import markdown_table

OUT = RESULTS / "overhead.json"
FIGURE = ROOT / "docs" / "overhead.svg"
PLAIN = "`dvc repro`"
WAYS = {
    PLAIN: ["dvc", "repro", "--quiet"],
    "the flow, one stage at a time": ["flows.reproduce", "--at-once", "1"],
    "the flow": ["flows.reproduce"],
}


def main() -> None:
    """Runs the measurements, writes results and figure, and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead")
    parser.add_argument("repeats", type=int, nargs="?", default=0)
    repeats = parser.parse_args().repeats
    if repeats:
        revision = revision_of("HEAD")
        runs = [{way: run(way, revision) for way in WAYS} for _ in range(repeats)]
        command = f"python -m benchmarks.overhead {repeats}"
        write_json(
            OUT, {"command": command, "revision": revision, "machine": machine(), "runs": runs}
        )
    results = read_json(OUT)
    save_figure(draw(results), FIGURE)
    print(table(results))


def run(way: str, revision: str) -> dict[str, float]:
    """Returns the wall-clock and CPU seconds of a run from scratch."""
    with fresh_clone(revision) as workspace, _addresses(way) as addresses:
        seconds = time_module(workspace, *WAYS[way], **addresses)
        usage = read_usage(workspace)
    return {
        "seconds": round(seconds, 1),
        "stage_cpu_seconds": round(sum(each["cpu_seconds"] for each in usage), 1),
        "stages": len(usage),
    }


@contextmanager
def _addresses(way: str) -> Iterator[dict[str, str]]:
    """Runs both servers with new stores and yields their addresses; {} for plain `dvc repro`."""
    if way == PLAIN:
        yield {}
        return
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        store = f"sqlite:///{folder}/mlflow.db"
        with (
            patch.dict(os.environ, {**SETTINGS, "PREFECT_HOME": f"{folder}/prefect"}),
            prefect_server(free_port()) as prefect,
            mlflow_server(store, free_port()) as mlflow,
        ):
            yield {"PREFECT_API_URL": f"{prefect}/api", "MLFLOW_TRACKING_URI": mlflow}


def table(results: dict[str, Any]) -> str:
    """Returns a Markdown table of medians and of ratios to `dvc repro` with their range."""
    rows = []
    for way in WAYS:
        ratios = [each[way]["seconds"] / each[PLAIN]["seconds"] for each in results["runs"]]
        seconds, cpu = (
            median(each[way][key] for each in results["runs"])
            for key in ("seconds", "stage_cpu_seconds")
        )
        spread = f"{median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
        rows.append([way, f"{seconds:.0f}", f"{cpu:.0f}", spread])
    return markdown_table(["how", "seconds", "stages' CPU s", f"against {PLAIN}"], rows)


def draw(results: dict[str, Any]) -> Figure:
    """Returns a bar chart of the seconds of every run, by command."""
    with styled():
        figure = Figure(figsize=(7.0, 2.6), layout="constrained")
        axes = figure.subplots()
        for way in WAYS:
            seconds = [each[way]["seconds"] for each in results["runs"]]
            name = way.replace("`", "")
            axes.barh([name], [median(seconds)], height=0.5)
            axes.plot(seconds, [name] * len(seconds), "k.")
        axes.invert_yaxis()
        axes.set_xlabel("seconds of the default pipeline from scratch")
    return figure


if __name__ == "__main__":
    main()
