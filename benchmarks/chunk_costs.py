"""What a round with chunks costs as the policy grows: simulation, inference, gradient, memory.

python -m benchmarks.chunk_costs WORKSPACE   # of a finished seed of benchmarks.allocation_chunks

Takes one round's rollouts and rewards, and policies of four sizes with random weights: what their
updates cost does not depend on what they have learned. Per size it measures the processor seconds
of inference for every chunk that was sampled, those of the round's updates with all chunks and with
three per rollout, and what a whole update's forward pass saves for its backward pass; and once the
processor seconds of simulation. From these follow the share of gradients in a round, the saving
that Amdahl's law predicts from the saving on updates, and the saving itself. One thread; writes
results/chunk_costs.json and docs/chunk_costs.svg.
"""

import argparse
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch.optim import AdamW
from transformers import LlamaConfig, LlamaModel

from benchmarks.demo import RESULTS, ROOT, machine, revision_of
from grpo.artifacts.files import read_json, write_json
from grpo.artifacts.tables import PROMPTS, REWARDS, read_table
from grpo.batches import Batch, plan_batches
from grpo.build.action_chunks import SIMULATOR
from grpo.fixed_scores import score_steps
from grpo.objective.algorithms import chunk_grpo, pcm
from grpo.objective.base import Objective
from grpo.policies.action_chunks import ActionChunkPolicy
from grpo.policies.action_model import ActionChunkModel, ChunkShape
from grpo.policies.activations import saved_bytes
from grpo.policies.base import make_rollouts
from grpo.policies.chunk_decoding import ChunkDecoding
from grpo.policies.phases import LABELLERS
from grpo.report.drawing import styled
from grpo.sampling import read_batch
from grpo.simulation.pool import EnvironmentPool
from grpo.training import TrainingSettings, run_update

OUT = RESULTS / "chunk_costs.json"
FIGURE = ROOT / "docs" / "chunk_costs.svg"
SIZES = {"1 M": (192, 2), "4 M": (320, 3), "13 M": (512, 4), "38 M": (768, 5)}  # width, layers
UPDATES = 16
REPEATS = 3
ROLLOUTS_PLAYED = 24
OBJECTIVES: dict[str, Objective] = {
    "all": chunk_grpo(tokens=32),
    "pcm": pcm(tokens=32, budget=3),
}
SETTINGS = TrainingSettings(
    updates_per_round=UPDATES,
    max_grad_norm=1.0,
    tokens_per_microbatch=8192,
    updates_per_checkpoint=UPDATES,
    updates_per_audit=0,
)


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chunk_costs")
    parser.add_argument("workspace", type=Path, nargs="?")
    workspace = parser.parse_args().workspace
    if workspace:
        write_json(OUT, measure(workspace / "artifacts"))
    results = read_json(OUT)
    draw(results).savefig(FIGURE, metadata={"Date": None})
    print(table(results))


def measure(artifacts: Path) -> dict[str, Any]:
    """Returns what every size costs on the rollouts of round all-1."""
    torch.set_num_threads(1)
    sampled = read_batch(artifacts / "rollouts" / "all-1")
    simulation = simulation_seconds(artifacts)
    chunks = int(sampled.table["steps"].sum())
    sizes = {name: _measure_size(artifacts, *size) for name, size in SIZES.items()}
    for row in sizes.values():
        row |= compare(row, simulation * chunks)
    return {
        "command": "python -m benchmarks.chunk_costs WORKSPACE",
        "revision": revision_of("HEAD"),
        "machine": machine(),
        "sampled_chunks": chunks,
        "rollouts": len(sampled.table),
        "simulation_seconds_per_chunk": simulation,
        "sizes": sizes,
    }


def compare(row: dict[str, Any], simulation: float) -> dict[str, float]:
    """Returns the share of gradients in a round, and what masking saves of the round.

    Args:
      simulation: Seconds of a round.
    """
    beside = simulation + row["inference_seconds"]
    full, masked = (row[name]["update_seconds"] for name in OBJECTIVES)
    share, saving = full / (full + beside), full / masked
    return {
        "simulation_seconds": simulation,
        "gradient_share": share,
        "update_speedup": saving,
        "activation_share": row["pcm"]["activation_bytes"] / row["all"]["activation_bytes"],
        "chunk_share": row["pcm"]["trained_chunks"] / row["all"]["trained_chunks"],
        "amdahl_speedup": 1 / (share / saving + 1 - share),
        "round_speedup": (full + beside) / (masked + beside),
    }


def simulation_seconds(artifacts: Path) -> float:
    """Returns the processor seconds that a chunk takes in the simulator, starts included."""
    scenes = read_table(artifacts / "prompts" / "train.parquet", PROMPTS)["prompt"]
    chosen = scenes.iloc[:: len(scenes) // ROLLOUTS_PLAYED][:ROLLOUTS_PLAYED].tolist()
    generator, length = np.random.default_rng(0), 12
    before, played = _child_seconds(), 0
    with EnvironmentPool(SIMULATOR, processes=1, timeout_seconds=60.0) as pool:
        for scene in chosen:
            moment = pool.play({0: scene})[0]
            for _ in range(length):
                if moment.ending is None:
                    moment = pool.play({0: generator.uniform(-0.5, 0.5, (8, 4)).tolist()})[0]
                    played += 1
    return (_child_seconds() - before) / played


def _child_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _measure_size(artifacts: Path, width: int, layers: int) -> dict[str, Any]:
    """Returns parameters, seconds of inference, and what updates of both kinds cost."""
    policy, trajectory, batches = _prepare(artifacts, width, layers)
    with torch.no_grad():
        inference = _fastest(lambda: score_steps(policy, trajectory, trajectory.mask.float(), 8192))
    row: dict[str, Any] = {
        "parameters": sum(each.numel() for each in policy.model.parameters()),
        "inference_seconds": inference,
    }
    for name, planned in batches.items():
        weight = torch.zeros(trajectory.mask.shape)
        for batch in planned:
            weight[batch.rows] = batch.credit.weight

        def update(name: str = name, planned: list[Batch] = planned, weight: Any = weight) -> None:
            proximal = score_steps(policy, trajectory, weight, 8192)
            optimizer = AdamW(policy.model.parameters(), lr=1e-6)
            for index, batch in enumerate(planned):
                run_update(
                    policy,
                    trajectory,
                    batch,
                    objective=OBJECTIVES[name],
                    optimizer=optimizer,
                    proximal=proximal,
                    reference=None,
                    settings=SETTINGS,
                    update=index,
                )

        row[name] = {
            "update_seconds": _fastest(update),
            "trained_chunks": int((weight != 0).sum()),
            "activation_bytes": max(_activations(policy, trajectory, each) for each in planned),
        }
    return row


def _prepare(artifacts: Path, width: int, layers: int) -> tuple[Any, Any, dict[str, list[Batch]]]:
    """Returns a policy of a size, the round's rollouts, and its updates under both objectives."""
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
        label=LABELLERS["progress"],
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
            objective, rollouts, objective.init(), num_batches=UPDATES, generator=generator
        )
    return policy, trajectory, batches


def _activations(policy: Any, trajectory: Any, batch: Batch) -> int:
    """Returns what the forward pass of an update saves, all of it in one pass."""
    needed = torch.zeros(trajectory.mask.shape, dtype=torch.bool)
    needed[batch.rows] = batch.credit.weight != 0
    if not needed.any():
        return 0
    policy.score(trajectory, needed)  # measures the FLOPs of a row
    with saved_bytes(policy.model) as saved:
        scores = policy.score(trajectory, needed)
    assert scores.logp.requires_grad
    return saved.total


def _fastest(work: Callable[[], object]) -> float:
    """Returns the processor seconds of the fastest of a few times."""
    seconds = []
    for _ in range(REPEATS):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return min(seconds)


def table(results: dict[str, Any]) -> str:
    """Returns Markdown: seconds of a round by size, and what masking saves."""
    lines = [
        "| parameters | simulation s | inference s | updates s, all chunks | updates s, three "
        "| gradient's share | updates faster | activations | Amdahl | round faster |",
        "|" + "---|" * 10,
    ]
    for row in results["sizes"].values():
        cells = [
            f"{row['parameters'] / 1e6:.1f} M",
            f"{row['simulation_seconds']:.0f}",
            f"{row['inference_seconds']:.1f}",
            *(f"{row[name]['update_seconds']:.1f}" for name in OBJECTIVES),
            f"{row['gradient_share']:.0%}",
            f"{row['update_speedup']:.1f}x",
            f"{row['activation_share']:.0%}",
            f"{row['amdahl_speedup']:.2f}x",
            f"{row['round_speedup']:.2f}x",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(results: dict[str, Any]) -> Figure:
    """Returns where a round's seconds go as the policy grows, with all chunks and with three."""
    parts = ("simulation", "inference", "updates")
    with styled():
        figure = Figure(figsize=(9.0, 4.2), layout="constrained")
        axes = figure.subplots()
        labels, bottoms = [], []
        for size, row in results["sizes"].items():
            for name in OBJECTIVES:
                seconds = (
                    row["simulation_seconds"],
                    row["inference_seconds"],
                    row[name]["update_seconds"],
                )
                labels.append(f"{size}, {name}")
                bottoms.append(np.array(seconds) / sum(seconds))
        shares = np.array(bottoms)
        starts = np.cumsum(shares, axis=1) - shares
        for index, part in enumerate(parts):
            axes.barh(labels, shares[:, index], left=starts[:, index], label=part)
        axes.invert_yaxis()
        axes.set_xlabel("share of a round's processor seconds")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.12), ncols=3)
    return figure


if __name__ == "__main__":
    main()
