"""Measures sampled tokens per second by executor and number of workers, and checks equal bytes.

python -m benchmarks.scaling_sampling    # on an idle machine

Samples the same rollouts with the untrained model of the default recipe in the stage itself, in one
and two processes, and in one and two workers of a new Ray cluster, three times each in turn. Writes
results/scaling_sampling.json and docs/scaling_sampling.svg.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from benchmarks.demo import RESULTS, ROOT, machine, revision_of
from benchmarks.figures import middle_and_reach, save_figure
from benchmarks.intervals import span
from benchmarks.workspaces import SHORT_ROLLOUTS
from grpo.params.parameters import Parameters, read_params
from grpo.report.style import styled
from grpo.runtime.artifacts.files import read_json, write_json
from grpo.runtime.artifacts.tables import PROMPTS, read_table, write_table
from grpo.runtime.markdown import markdown_table
from grpo.sampling.drawing import sample_rollouts
from grpo.sampling.rollouts import SampledBatch
from grpo.schema import DATA
from grpo.wiring.executors import open_executor
from grpo.wiring.policies import build_base
from grpo.wiring.sampling_workers import SamplingSetup, make_sampling_work
from grpo.wiring.tasks import build_prompts

OUT = RESULTS / "scaling_sampling.json"
FIGURE = ROOT / "docs" / "scaling_sampling.svg"
CASES = (("local", 1), ("processes", 1), ("processes", 2), ("ray", 1), ("ray", 2))
REPEATS = 3
NUM_PROMPTS = 600
ROLLOUTS = 16  # per prompt
ROLLOUTS_PER_BATCH = 256


class Measured(NamedTuple):
    """Seconds of sampling since the executor was opened."""

    first: float  # until as many batches were finished as there are workers
    all: float  # until the last batch was finished


def main() -> None:
    """Runs the measurements, writes results and figure, and prints the table."""
    seconds: dict[str, list[Measured]] = {name_of(*case): [] for case in CASES}
    drawn: list[SampledBatch] = []
    with tempfile.TemporaryDirectory() as folder:
        setup = _prepare(Path(folder))
        for repeat in range(REPEATS):
            for executor, workers in CASES:
                scratch = Path(folder) / f"{repeat}-{executor}-{workers}"
                batch, measured = _draw(setup, executor, workers, scratch)
                seconds[name_of(executor, workers)].append(measured)
                drawn.append(batch)
    results = {
        "command": "python -m benchmarks.scaling_sampling",
        "revision": revision_of("HEAD"),
        "machine": machine(),
        "rollouts": len(drawn[0].table),
        "batches": -(-len(drawn[0].table) // ROLLOUTS_PER_BATCH),
        "tokens": drawn[0].cost.sampled_steps,
        "workers": {name_of(*case): case[1] for case in CASES},
        "same_bytes": all(_are_same(drawn[0], each) for each in drawn),
        "seconds": {
            name: [each._asdict() for each in several] for name, several in seconds.items()
        },
    }
    write_json(OUT, results)
    save_figure(draw(read_json(OUT)), FIGURE)
    print(table(read_json(OUT)))


def name_of(executor: str, workers: int) -> str:
    """Returns the name of a case in results and table."""
    return "the stage itself" if executor == "local" else f"{executor}, {workers}"


def _prepare(folder: Path) -> SamplingSetup:
    """Writes prompts and an untrained policy, and returns the sampling job."""
    params = _changed(read_params(SHORT_ROLLOUTS), "local", 1)
    prompts, base = folder / "prompts.parquet", folder / "base"
    write_table(build_prompts(params, DATA).train, prompts, PROMPTS)
    build_base(params, DATA).save(base)
    return SamplingSetup(
        params=params, prompts=prompts, purpose="evaluation", base=base, policy=base
    )


def _changed(params: Parameters, executor: str, workers: int) -> Parameters:
    content = params.model_dump(mode="json")
    content["sampling"] = {"executor": executor, "workers": workers}
    content["task"]["train_prompts"] = NUM_PROMPTS
    content["policy"]["base"]["warmup"]["prompts"] = 1  # the policy is not warmed up
    return Parameters.model_validate_json(json.dumps(content))


def _draw(
    setup: SamplingSetup, executor: str, workers: int, scratch: Path
) -> tuple[SampledBatch, Measured]:
    """Returns the rollouts of all prompts and the seconds of sampling."""
    prompts = read_table(setup.prompts, PROMPTS).assign(rollouts=ROLLOUTS)
    moments: list[float] = []
    start = time.perf_counter()
    params = _changed(setup.params, executor, workers)
    with open_executor(make_sampling_work, setup.model_copy(update={"params": params})) as opened:
        batch = sample_rollouts(
            opened,
            prompts,
            rollouts_per_batch=ROLLOUTS_PER_BATCH,
            seed=0,
            scratch=scratch,
            progress=lambda done, total: moments.append(time.perf_counter() - start),
        )
    return batch, Measured(first=moments[workers], all=moments[-1])


def _are_same(one: SampledBatch, other: SampledBatch) -> bool:
    same_tensors = all(bool((other.tensors[k] == v).all()) for k, v in one.tensors.items())
    return same_tensors and one.table.equals(other.table) and one.cost == other.cost


def rates(results: dict[str, Any], name: str) -> list[float]:
    """Returns, by repeat, tokens per second after the first batch of each worker."""
    tokens = results["tokens"] * (1 - results["workers"][name] / results["batches"])
    return [tokens / (each["all"] - each["first"]) for each in results["seconds"][name]]


def table(results: dict[str, Any]) -> str:
    """Returns a Markdown table of medians with the slowest and the fastest repeat."""
    titles = [
        "executor, workers",
        "seconds to start",
        "tokens per second then",
        "of the stage's own",
    ]
    rows = list[list[str]]()
    alone = float(np.median(rates(results, name_of("local", 1))))
    for name, several in results["seconds"].items():
        each = rates(results, name)
        middle, first = float(np.median(each)), float(np.median([one["first"] for one in several]))
        reached = f"{middle:.0f} [{min(each):.0f}, {max(each):.0f}]"
        rows.append([name, f"{first:.1f}", reached, f"{middle / alone:.2f}x"])
    return markdown_table(titles, rows)


def claims(results: dict[str, Any]) -> list[str]:
    """Returns how much faster two workers are than one, of either executor."""
    of = {name: float(np.median(rates(results, name))) for name in results["seconds"]}
    kinds = ("processes", "ray")
    faster = span([of[name_of(kind, 2)] / of[name_of(kind, 1)] for kind in kinds], ".1f")
    return [f"Two workers sample {faster} times as fast as one"]


def draw(results: dict[str, Any]) -> Figure:
    """Returns a plot of tokens per second by executor and workers."""
    with styled():
        figure = Figure(figsize=(5.0, 3.0), layout="constrained")
        axes = figure.subplots()
        names = list(results["seconds"])
        middle, reach = middle_and_reach([rates(results, name) for name in names])
        axes.barh(names, middle, xerr=reach, capsize=3)
        axes.invert_yaxis()
        axes.set(xlabel="tokens per second", xlim=(0, None))
    return figure


if __name__ == "__main__":
    prog = "python -m benchmarks.scaling_sampling"
    argparse.ArgumentParser(prog=prog, description=__doc__).parse_args()
    main()
