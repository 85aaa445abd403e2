"""Measures the cost of a round of action chunks by policy size: time and memory of each part.

python -m benchmarks.chunk_costs WORKSPACE   # of a finished seed of benchmarks.allocation_chunks

Uses the rollouts and rewards of one round, and policies of four sizes with random weights, because
the cost of updates does not depend on the weights. Per size it measures, in one thread:

* CPU seconds of inference for all sampled chunks;
* CPU seconds of the round's updates with all chunks, and with three or two chunks per rollout that
  are chosen by advantage;
* activation memory of a whole update, and peak resident memory.

Simulation time is the time of the round's rollouts minus inference. The results are the share of
gradients in a round, the saving that Amdahl's law predicts, the measured saving, and the saving if
simulation were free. Writes results/chunk_costs.json and docs/chunk_costs.svg.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch.optim import AdamW
from transformers import LlamaConfig, LlamaModel

from benchmarks.demo import RESULTS, ROOT, machine, revision_of
from benchmarks.figures import save_figure
from benchmarks.intervals import span
from benchmarks.workspaces import CPU_SECONDS, reset_peak, resident_peak
from grpo.modalities.action_chunks.modality import ChunkDecoding
from grpo.modalities.action_chunks.model import ActionChunkModel, ChunkShape
from grpo.modalities.action_chunks.phases import choose_labeller
from grpo.modalities.action_chunks.policy import SIMULATOR, ActionChunkPolicy
from grpo.modalities.action_chunks.simulation.pool import EnvironmentPool
from grpo.modalities.policy import make_rollouts
from grpo.modalities.shared.recomputation import saved_bytes
from grpo.objective.algorithms import chunk_grpo
from grpo.objective.base import Objective, chain
from grpo.objective.chunks import sample_steps_by_advantage
from grpo.params.parameters import read_params
from grpo.report.style import styled
from grpo.runtime.artifacts.files import read_json, write_json
from grpo.runtime.artifacts.tables import REWARDS, read_table
from grpo.runtime.markdown import markdown_table
from grpo.sampling.rollouts import read_batch
from grpo.training.batches import Batch, plan_batches
from grpo.training.frozen import compute_log_probs
from grpo.training.updates import Loss, run_update
from grpo.wiring.iterations import training_settings

OUT = RESULTS / "chunk_costs.json"
FIGURE = ROOT / "docs" / "chunk_costs.svg"
SIZES = ((192, 2), (320, 3), (512, 4), (768, 5))  # width, layers; the recipe has the first
REPEATS = 3
BUDGETS = {"three": 3, "two": 2}
OBJECTIVES: dict[str, Objective] = {
    "all": chunk_grpo(tokens=32),
    **{
        name: chain(chunk_grpo(tokens=32), sample_steps_by_advantage(budget))
        for name, budget in BUDGETS.items()
    },
}
PARTS = ("simulation", "inference", "updates")


def main() -> None:
    """Runs the measurements, writes results and figure, and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chunk_costs")
    parser.add_argument("workspace", type=Path, nargs="?")
    workspace = parser.parse_args().workspace
    if workspace:
        write_json(OUT, measure(workspace))
    results = read_json(OUT)
    save_figure(draw(results), FIGURE)
    print(table(results))


def measure(workspace: Path) -> dict[str, Any]:
    """Returns the costs of every size on the rollouts of round all-1."""
    torch.set_num_threads(1)
    sampled = read_batch(workspace / "artifacts" / "rollouts" / "all-1")
    sizes = [_measure_size(workspace / "artifacts", *size) for size in SIZES]
    simulation = read_json(workspace / CPU_SECONDS)["rollout@all-1"] - sizes[0]["inference_seconds"]
    return {
        "command": "python -m benchmarks.chunk_costs WORKSPACE",
        "revision": revision_of("HEAD"),
        "machine": machine(),
        "sampled_chunks": int(sampled.table["steps"].sum()),
        "rollouts": len(sampled.table),
        "simulation_seconds": simulation,
        "sizes": [{**row, **compare(row, simulation)} for row in sizes],
    }


def compare(row: dict[str, Any], simulation: float) -> dict[str, Any]:
    """Returns the share of gradients in a round and the saving by masking chunks.

    Args:
      simulation: Seconds of simulation per round.
    """
    inference, full = row["inference_seconds"], row["all"]["update_seconds"]
    share = full / (full + simulation + inference)
    savings = {}
    for name in BUDGETS:
        own = row[name]
        speedup = full / own["update_seconds"]
        savings[name] = {
            "chunk_share": own["trained_chunks"] / row["all"]["trained_chunks"],
            "update_speedup": speedup,
            "activation_share": own["activation_bytes"] / row["all"]["activation_bytes"],
            "amdahl_speedup": 1 / (share / speedup + 1 - share),
            "free_simulation_speedup": (full + inference) / (own["update_seconds"] + inference),
        }
    return {"gradient_share": share, "savings": savings}


def _measure_size(artifacts: Path, width: int, layers: int) -> dict[str, Any]:
    """Returns the parameter count, the seconds of inference and the costs of updates."""
    recipe = read_params(ROOT / "recipes" / "manipulation.yaml")
    settings = replace(training_settings(recipe.arms["all"].training), updates_per_audit=0)
    policy, trajectory, batches = _prepare(artifacts, width, layers, settings.updates_per_iteration)
    positions = settings.tokens_per_microbatch
    with torch.no_grad():
        inference = _fastest(
            lambda: compute_log_probs(policy, trajectory, trajectory.mask.float(), positions)
        )
    row: dict[str, Any] = {
        "parameters": sum(each.numel() for each in policy.model.parameters()),
        "inference_seconds": inference,
    }
    for name, planned in batches.items():
        weight = torch.zeros(trajectory.mask.shape)
        for batch in planned:
            weight[batch.rows] = batch.credit.weight

        def update(name: str = name, planned: list[Batch] = planned, weight: Any = weight) -> None:
            proximal = compute_log_probs(policy, trajectory, weight, positions)
            optimizer = AdamW(policy.model.parameters(), lr=1e-6, fused=True)
            for index, batch in enumerate(planned):
                run_update(
                    Loss(
                        policy=policy,
                        objective=OBJECTIVES[name],
                        trajectory=trajectory,
                        proximal=proximal,
                        reference=None,
                        tokens_per_microbatch=settings.tokens_per_microbatch,
                    ),
                    batch,
                    optimizer=optimizer,
                    max_grad_norm=settings.max_grad_norm,
                    update=index,
                )

        reset_peak()
        row[name] = {
            "update_seconds": _fastest(update),
            "peak_bytes": resident_peak(),
            "trained_chunks": int((weight != 0).sum()),
            "activation_bytes": max(_activations(policy, trajectory, each) for each in planned),
        }
    return row


def _prepare(
    artifacts: Path, width: int, layers: int, updates: int
) -> tuple[Any, Any, dict[str, list[Batch]]]:
    """Returns a policy of a size, the round's rollouts and the updates of every objective."""
    torch.manual_seed(0)
    shape = ChunkShape(**read_json(artifacts / "policies" / "base" / "actions.json"))
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
    )
    policy = ActionChunkPolicy(
        ActionChunkModel(LlamaModel(config), shape).eval(),
        None,
        decoding=ChunkDecoding(temperature=1.0, max_steps=18),
        scenes=EnvironmentPool(SIMULATOR, processes=1, timeout_seconds=60.0),
        slots=32,
        label=choose_labeller("time", max_steps=18),
    )
    sampled = read_batch(artifacts / "rollouts" / "all-1")
    group = torch.tensor(sampled.table["group"].to_numpy())
    trajectory, logp = policy.unpack(sampled.tensors, group)
    judged = read_table(artifacts / "rewards" / "all-1.parquet", REWARDS).set_index("rollout_id")
    outcome = judged.loc[sampled.table["rollout_id"], "outcome"].to_numpy(np.float32)
    reward = torch.tensor(outcome)
    rollouts = make_rollouts(trajectory, logp, group=group, reward=reward, outcome=reward)
    batches = {}
    for name, objective in OBJECTIVES.items():
        generator = torch.Generator().manual_seed(0)
        batches[name], _ = plan_batches(
            objective,
            rollouts,
            objective.init(),
            num_batches=updates,
            generator=generator,
        )
    return policy, trajectory, batches


def _activations(policy: Any, trajectory: Any, batch: Batch) -> int:
    """Returns the activation memory of an update in a single forward pass, in bytes."""
    needed = torch.zeros(trajectory.mask.shape, dtype=torch.bool)
    needed[batch.rows] = batch.credit.weight != 0
    if not needed.any():
        return 0
    policy.step_log_probs(trajectory, needed)  # measures the FLOPs of a row
    with saved_bytes(policy.model) as saved:
        scores = policy.step_log_probs(trajectory, needed)
    assert scores.logp.requires_grad
    return saved.total


def _fastest(work: Callable[[], object]) -> float:
    """Returns the CPU seconds of the fastest of several runs."""
    seconds = []
    for _ in range(REPEATS):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return min(seconds)


def table(results: dict[str, Any]) -> str:
    """Returns a Markdown table of the seconds of a round and the saving by masking, by size."""
    titles = ["parameters", "kept", "chunks", "inference s", "updates s", "updates faster"]
    titles += ["activations", "peak MB", "gradient's share", "round faster"]
    titles += ["if simulation were free", "and all groups had signal"]
    rows = list[list[str]]()
    for row in results["sizes"]:
        for name in OBJECTIVES:
            seconds = (row["inference_seconds"], row[name]["update_seconds"])
            peak = f"{row[name]['peak_bytes'] / 1e6:.0f}"
            if name == "all":
                saved = ["100%", "", "100%", f"{row['gradient_share']:.0%}", "", "", ""]
            else:
                saved = _savings(row, name, results["sampled_chunks"])
            share, faster, activations, *rounds = saved
            cells = [f"{row['parameters'] / 1e6:.1f} M", name, share]
            cells += [*(f"{each:.1f}" for each in seconds), faster, activations, peak, *rounds]
            rows.append(cells)
    return markdown_table(titles, rows)


def _savings(row: dict[str, Any], name: str, sampled: int) -> list[str]:
    """Returns the table cells with the saving of a budget of chunks.

    The last cell assumes that all groups have signal: the seconds per trained chunk measured here
    then hold for every sampled chunk.
    """
    saved = row["savings"][name]
    taught = sampled / row["all"]["trained_chunks"]
    inference, full, own = (
        row["inference_seconds"],
        row["all"]["update_seconds"] * taught,
        row[name]["update_seconds"] * taught,
    )
    return [
        f"{saved['chunk_share']:.0%}",
        f"{saved['update_speedup']:.1f}x",
        f"{saved['activation_share']:.0%}",
        "",
        f"{saved['amdahl_speedup']:.2f}x",
        f"{saved['free_simulation_speedup']:.2f}x",
        f"{(full + inference) / (own + inference):.2f}x",
    ]


def claims(results: dict[str, Any]) -> list[str]:
    """Returns the numbers of the text of docs/action-chunks.md."""
    sizes = results["sizes"]
    trained = [100 * row["all"]["trained_chunks"] / results["sampled_chunks"] for row in sizes]
    faster, left, rounds = (
        [row["savings"]["two"][name] for row in sizes]
        for name in ("update_speedup", "activation_share", "amdahl_speedup")
    )
    return [
        f"its simulation takes {results['simulation_seconds']:.0f}",
        f"{span(trained)} % of all chunks are of such groups",
        f"updates are {span(faster, '.1f')} times as fast",
        f"activations are {span([100 * (1 - each) for each in left])} % smaller",
        f"predicts rounds {span(rounds, '.2f')} times as fast",
    ]


def draw(results: dict[str, Any]) -> Figure:
    """Returns a bar chart of the seconds of a round by policy size and chunks kept."""
    with styled():
        figure = Figure(figsize=(9.0, 4.8), layout="constrained")
        axes = figure.subplots()
        labels, seconds = [], []
        for row in results["sizes"]:
            for name in OBJECTIVES:
                labels.append(f"{row['parameters'] / 1e6:.1f} M, {name}")
                beside = (results["simulation_seconds"], row["inference_seconds"])
                seconds.append([*beside, row[name]["update_seconds"]])
        lengths = np.array(seconds)
        starts = np.cumsum(lengths, axis=1) - lengths
        for index, part in enumerate(PARTS):
            axes.barh(labels, lengths[:, index], left=starts[:, index], label=part)
        axes.invert_yaxis()
        axes.set_xlabel("processor seconds of a round")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.12), ncols=len(PARTS))
    return figure


if __name__ == "__main__":
    main()
