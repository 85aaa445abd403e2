"""Times the first round of the default run with a worker beside the trainer, by staleness.

python -m benchmarks.staleness      # writes results/staleness.json and docs/staleness.svg

The round has twelve iterations. It is trained by the trainer alone, by a trainer that waits for a
worker (staleness 0), and by one that updates while the worker samples (staleness 1).
"""

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.demo import RESULTS, ROOT, machine, revision_of, time_module
from benchmarks.figures import save_figure
from benchmarks.workspaces import SHORT_ROLLOUTS, make_workspace, run_stages
from grpo.params.recipes import read_content
from grpo.params.yaml import dump_yaml
from grpo.report.figures import draw_spans
from grpo.report.seconds import Span, timeline
from grpo.report.style import styled
from grpo.runtime.artifacts.files import read_json, remove, write_json
from grpo.runtime.artifacts.usage import USAGE, Usage
from grpo.runtime.markdown import markdown_table

OUT, FIGURE = RESULTS / "staleness.json", ROOT / "docs" / "staleness.svg"
ROUND = "uniform-1"
REPEATS = 3
CASES = {
    "the trainer samples": ("local", 0),
    "a worker, staleness 0": ("processes", 0),
    "a worker, staleness 1": ("processes", 1),
}
SAMPLERS, TRAINER = ("sampling", "judging"), ("update",)


def main() -> None:
    """Runs every case in turn, several times, and writes the seconds and the figure."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in CASES}
    with tempfile.TemporaryDirectory() as folder:
        workspace = Path(folder) / "workspace"
        make_workspace(workspace, params_of("local", 0))
        run_stages(workspace, skipped=[f"train@{ROUND}", f"evaluate@{ROUND}", "evaluate-base"])
        for _ in range(REPEATS):
            for name, case in CASES.items():
                found[name].append(run_once(workspace, *case))
    about = {"command": "python -m benchmarks.staleness", "revision": revision_of("HEAD")}
    write_json(OUT, {**about, "machine": machine(), "cases": found})
    results = read_json(OUT)
    with styled():
        spans = {
            name: [Span(*each) for each in runs[-1]["spans"]]
            for name, runs in results["cases"].items()
        }
        save_figure(draw_spans(spans).figure, FIGURE)
    print(table(results))


def params_of(executor: str, staleness: int) -> dict[str, Any]:
    """Returns the recipe with one arm and one round, and a correction (rule H16)."""
    params: dict[str, Any] = read_content(SHORT_ROLLOUTS)
    arm = params["arms"]["uniform"]
    arm["objective"] = [{"truncate_mismatch": {"weight_max": 2.0}}, *arm["objective"]]
    arm["training"] |= {
        "staleness": staleness,
        "updates_per_checkpoint": 100,
        "updates_per_audit": 0,
    }
    params["arms"] = {"uniform": arm}
    params["rounds"] = {ROUND: {"arm": "uniform", "start": "base", "phase": 1}}
    params["sampling"] = {"executor": executor, "workers": 1}
    return params


def run_once(workspace: Path, executor: str, staleness: int) -> dict[str, Any]:
    """Returns the seconds of train@ without its start-up, by what was at work, and the spans."""
    (workspace / "params.yaml").write_text(dump_yaml(params_of(executor, staleness)))
    outputs = (f"artifacts/policies/{ROUND}", f"artifacts/training/{ROUND}")
    for each in (*outputs, ".work"):
        remove(workspace / each)
    inputs = ["artifacts/data/judge.json", "artifacts/policies/base", "artifacts/policies/base"]
    inputs += ["artifacts/prompts/train.parquet", "artifacts/curricula/uniform.parquet"]
    inputs += [f"artifacts/rollouts/{ROUND}", f"artifacts/rewards/{ROUND}.parquet"]
    time_module(workspace, "stages.train", *inputs, *outputs, DVC_STAGE=f"train@{ROUND}")
    spans = timeline(Usage(**read_json(workspace / USAGE / f"train@{ROUND}.json")))
    busy = {
        name: sum(each.end - each.start for each in spans if each.activity in activities)
        for name, activities in (("samplers", SAMPLERS), ("trainer", TRAINER))
    }
    return {
        "seconds": round(max(each.end for each in spans), 3),
        **{f"{name}_seconds": round(value, 3) for name, value in busy.items()},
        "spans": spans,
    }


def table(results: dict[str, Any]) -> str:
    """Returns the medians of the repeats, with the fastest and the slowest, as Markdown."""
    rows = []
    for name, runs in results["cases"].items():
        cells = [name]
        for kind in ("seconds", "samplers_seconds", "trainer_seconds"):
            low, middle, high = sorted(each[kind] for each in runs)
            cells.append(f"{middle:.1f} [{low:.1f}, {high:.1f}]")
        rows.append(cells)
    titles = ["who samples", "seconds of the round", "sampling and judging", "updates"]
    return markdown_table(titles, rows)


def claims(results: dict[str, Any]) -> list[str]:
    """Returns how long a worker's first iteration samples, of all its seconds."""
    runs = [run for name, case in results["cases"].items() if "worker" in name for run in case]
    firsts = [
        next(end - start for activity, start, end in run["spans"] if activity == "sampling")
        for run in runs
    ]
    first, whole = median(firsts), median(run["samplers_seconds"] for run in runs)
    return [f"takes about {first:.0f} of its {whole:.0f} seconds"]


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m benchmarks.staleness", description=__doc__).parse_args()
    main()
