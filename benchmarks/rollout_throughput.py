"""Measures rollout steps per second in the simulator by number of processes.

python -m benchmarks.rollout_throughput    # on an idle machine

Samples the same 64 rollouts of an untrained policy of recipes/manipulation.yaml with one to four
processes, three times each in turn, and checks that their bytes are equal. Writes
results/rollout_throughput.json and docs/rollout_throughput.svg.
"""

import argparse
import time
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from benchmarks.demo import RESULTS, ROOT, machine, revision_of
from benchmarks.figures import middle_and_reach, save_figure
from grpo.modalities.action_chunks.bases import make_action_model
from grpo.modalities.action_chunks.modality import ChunkDecoding
from grpo.modalities.action_chunks.phases import choose_labeller
from grpo.modalities.action_chunks.policy import SIMULATOR, ActionChunkPolicy
from grpo.modalities.action_chunks.simulation.metaworld import draw_scene, make_environment
from grpo.modalities.action_chunks.simulation.pool import EnvironmentPool
from grpo.params.parameters import read_params
from grpo.report.style import styled
from grpo.runtime.artifacts.files import read_json, write_json
from grpo.runtime.markdown import markdown_table
from grpo.schema import DATA

OUT = RESULTS / "rollout_throughput.json"
FIGURE = ROOT / "docs" / "rollout_throughput.svg"
PROCESSES = (1, 2, 3, 4)
REPEATS = 3
ROLLOUTS = 64
SLOTS = 32


def main() -> None:
    """Runs the measurements, writes results and figure, and prints the table."""
    params: Any = read_params(ROOT / "recipes" / "manipulation.yaml")
    torch.set_num_threads(1)
    model, tokenizer = make_action_model(params, DATA)
    scenes = _scenes(params.task.families)
    seconds: dict[int, list[float]] = {number: [] for number in PROCESSES}
    steps, drawn = 0, []
    for _ in range(REPEATS):
        for number in PROCESSES:
            with EnvironmentPool(SIMULATOR, processes=number, timeout_seconds=60.0) as pool:
                policy = ActionChunkPolicy(
                    model,
                    tokenizer,
                    decoding=ChunkDecoding(temperature=1.0, max_steps=18),
                    scenes=pool,
                    slots=SLOTS,
                    label=choose_labeller("time", max_steps=18),
                )
                pool.play(
                    {slot: scenes[slot] for slot in range(SLOTS)}
                )  # waits until all processes have started
                start = time.perf_counter()
                trajectory, logp = policy.sample(
                    scenes,
                    group_sizes=[1] * len(scenes),
                    generator=torch.Generator().manual_seed(0),
                )
                seconds[number].append(time.perf_counter() - start)
            steps = int(trajectory.executed.sum())
            drawn.append(trajectory.pack(logp))
    same = all(torch.equal(drawn[0][name], each[name]) for each in drawn for name in each)
    write_json(
        OUT,
        {
            "command": "python -m benchmarks.rollout_throughput",
            "revision": revision_of("HEAD"),
            "machine": machine(),
            "rollouts": len(scenes),
            "steps": steps,
            "same_bytes": same,
            "seconds": {str(number): each for number, each in seconds.items()},
        },
    )
    results = read_json(OUT)
    save_figure(draw(results), FIGURE)
    print(table(results))


def _scenes(families: list[str]) -> list[str]:
    """Returns scenes that alternate between the families."""
    environments = {family: make_environment(family) for family in families}
    return [
        draw_scene(environments[family], family, number)
        for number in range(-(-ROLLOUTS // len(families)))
        for family in families
    ][:ROLLOUTS]


def table(results: dict[str, Any]) -> str:
    """Returns a Markdown table of median steps per second by processes, with their range."""
    rows = list[list[str]]()
    steps, seconds = results["steps"], results["seconds"]
    one = float(np.median(seconds["1"]))
    for number, each in seconds.items():
        middle, low, high = (steps / value for value in (np.median(each), max(each), min(each)))
        reached = f"{middle:.0f} [{low:.0f}, {high:.0f}]"
        rows.append([number, reached, f"{one * middle / steps:.2f}x"])
    return markdown_table(["processes", "steps per second", "of one process"], rows)


def draw(results: dict[str, Any]) -> Figure:
    """Returns a plot of steps per second over processes."""
    with styled():
        figure = Figure(figsize=(5.0, 3.6), layout="constrained")
        axes = figure.subplots()
        numbers = [int(each) for each in results["seconds"]]
        rates = [results["steps"] / np.array(each) for each in results["seconds"].values()]
        middle, reach = middle_and_reach(rates)
        axes.errorbar(numbers, middle, yerr=reach, marker="o", capsize=3)
        axes.set(xlabel="processes of the simulator", ylabel="steps per second")
        axes.set_xticks(numbers)
        axes.set_ylim(bottom=0)
    return figure


if __name__ == "__main__":
    prog = "python -m benchmarks.rollout_throughput"
    argparse.ArgumentParser(prog=prog, description=__doc__).parse_args()
    main()
