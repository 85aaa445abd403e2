"""Measures what a sampled step costs by the prompts of its batch.

python -m benchmarks.sampling_batches WORKSPACE    # of a finished run of params.yaml
python -m benchmarks.sampling_batches              # prints the table of the results

The base policy samples the groups that an iteration of `plain` and of `composed` sampled, those of
`composed` also in batches of fewer rollouts, which have prompts of similar length. Writes
results/sampling_batches.json.
"""

import argparse
import time
from contextlib import chdir
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from benchmarks.demo import RESULTS, machine, revision_of
from grpo.modalities.policy import Policy
from grpo.params.parameters import BASE, read_params
from grpo.runtime.artifacts.files import read_json, write_json
from grpo.runtime.artifacts.stored_iterations import iterations_of
from grpo.runtime.artifacts.tables import PROMPTS, ROLLOUTS, read_table
from grpo.runtime.markdown import markdown_table
from grpo.sampling.drawing import batch_prompts
from grpo.wiring.policies import draws_of_round, load_policy

NAME = "sampling_batches"
ROUNDS = ("plain-1", "composed-1")
ITERATION = 4  # of a round
BATCHES = {"plain-1": (1024,), "composed-1": (1024, 512, 256)}  # rollouts per batch, by round
REPEATS = 5  # the fastest counts


def main() -> None:
    """Measures in a workspace, or prints what was measured."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{NAME}")
    parser.add_argument("workspace", nargs="?", type=Path)
    out, workspace = RESULTS / f"{NAME}.json", parser.parse_args().workspace
    if workspace:
        with chdir(workspace):
            rows = measure()
        command = f"python -m benchmarks.{NAME} WORKSPACE"
        about = {"command": command, "revision": revision_of("HEAD"), "machine": machine()}
        write_json(out, {**about, "iteration": ITERATION, "rows": rows})
    print(table(read_json(out)))


def measure() -> list[dict[str, Any]]:
    """Returns the cost of sampling an iteration's groups, by round and size of the batches."""
    torch.set_num_threads(1)
    params, artifacts = read_params(), Path("artifacts")
    base = artifacts / "policies" / BASE
    prompts = read_table(artifacts / "prompts" / "train.parquet", PROMPTS).set_index("prompt_id")
    rows = []
    for name in ROUNDS:
        draws = draws_of_round(params, name)
        policy = load_policy(params, base=base, directory=base, draws=draws)
        rollouts = read_table(iterations_of(artifacts, name)[ITERATION].table, ROLLOUTS)
        groups = rollouts.groupby("prompt_id", sort=False).size().rename("rollouts").reset_index()
        groups["prompt"] = groups["prompt_id"].map(prompts["prompt"])
        for per_batch in BATCHES[name]:
            batches = batch_prompts(groups, per_batch)
            seconds, steps = min(sample(policy, batches) for _ in range(REPEATS))
            rows.append(
                {
                    "round": name,
                    "prompts": len(groups),
                    "rollouts": int(groups["rollouts"].sum()),
                    "longest_prompts": [int(each["prompt"].str.len().max()) for each in batches],
                    "sampled_steps": steps,
                    "cpu_seconds": round(seconds, 4),
                }
            )
    return rows


def sample(policy: Policy[Any], batches: list[pd.DataFrame]) -> tuple[float, int]:
    """Returns the CPU seconds of sampling the batches, and their steps."""
    start, steps = time.process_time(), 0
    for index, batch in enumerate(batches):
        generator = torch.Generator().manual_seed(index)
        asked, sizes = batch["prompt"].tolist(), batch["rollouts"].tolist()
        trajectory, _ = policy.sample(asked, group_sizes=sizes, generator=generator)
        steps += int(trajectory.mask.sum())
    return time.process_time() - start, steps


def table(results: dict[str, Any]) -> str:
    """Returns the results as the Markdown table of docs/allocation_tokens.md."""
    rows = []
    for each in results["rows"]:
        widths = ", ".join(map(str, each["longest_prompts"]))
        cost = f"{each['cpu_seconds'] / each['sampled_steps'] * 1e6:.0f}"
        counts = [str(each[name]) for name in ("prompts", "rollouts", "sampled_steps")]
        rows.append([each["round"], *counts, widths, f"{each['cpu_seconds']:.2f}", cost])
    titles = ["groups of", "prompts", "rollouts", "steps", "longest prompt of each batch"]
    return markdown_table([*titles, "CPU s", "µs per step"], rows)


def claims(results: dict[str, Any]) -> list[str]:
    """Returns the mean lengths of rollouts in the two rounds."""
    lengths = {
        each["round"]: f"{each['sampled_steps'] / each['rollouts']:.0f}"
        for each in reversed(results["rows"])
    }
    other, own = (lengths[name] for name in ROUNDS)
    return [f"Rollouts of `composed` were shorter here, {own} steps on average instead of {other}"]


if __name__ == "__main__":
    main()
