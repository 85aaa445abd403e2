"""Measures what a sampled step costs by the prompts and the lengths of its batch.

python -m benchmarks.sampling_batches WORKSPACE    # of a finished run of params.yaml
python -m benchmarks.sampling_batches              # prints the table of the results

The base policy samples the groups that ten iterations of `plain` and of `composed` sampled: as in
the run; with all rollouts of the mean length, so that none ends before the others; and a single
step of each, which is little more than reading the prompts. Those of `composed` are also sampled in
batches of at most 256 rollouts, which have prompts of similar length. Writes
results/sampling_batches.json.
"""

import argparse
import time
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from benchmarks.demo import RESULTS, machine, revision_of
from grpo.modalities.tokens.policy import TokenPolicy
from grpo.params.parameters import BASE, read_params
from grpo.runtime.artifacts.files import read_json, write_json
from grpo.runtime.artifacts.stored_iterations import iterations_of
from grpo.runtime.artifacts.tables import PROMPTS, ROLLOUTS, read_table
from grpo.runtime.markdown import markdown_table
from grpo.sampling.drawing import batch_prompts
from grpo.wiring.policies import draws_of_round, load_policy

NAME = "sampling_batches"
ROUNDS = ("plain-1", "composed-1")
ITERATIONS = 10  # the first of a round
BATCHES = {"plain-1": (1024,), "composed-1": (1024, 256)}  # rollouts per batch, by round
REPEATS = 5  # the fastest counts
PARTS = ("reading", "decoding", "uneven")  # of a step's cost
COUNTS = ("rollouts_per_batch", "batches", "prompts", "rollouts", "sampled_steps")


def main() -> None:
    """Measures in a workspace, or prints what was measured."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{NAME}")
    parser.add_argument("workspace", nargs="?", type=Path)
    out, workspace = RESULTS / f"{NAME}.json", parser.parse_args().workspace
    if workspace:
        with chdir(workspace):
            seed, rows = read_params().seed, measure()
        command = f"python -m benchmarks.{NAME} WORKSPACE"
        about = {"command": command, "revision": revision_of("HEAD"), "machine": machine()}
        write_json(out, {**about, "seed": seed, "iterations": ITERATIONS, "rows": rows})
    print(table(read_json(out)))


def measure() -> list[dict[str, Any]]:
    """Returns the cost of sampling the iterations' groups, by round and size of the batches."""
    torch.set_num_threads(1)
    params, artifacts = read_params(), Path("artifacts")
    base = artifacts / "policies" / BASE
    prompts = read_table(artifacts / "prompts" / "train.parquet", PROMPTS).set_index("prompt_id")
    rows = []
    for name in ROUNDS:
        draws = draws_of_round(params, name)
        policy = load_policy(params, base=base, directory=base, draws=draws)
        if not isinstance(policy, TokenPolicy):
            raise TypeError(f"a workspace of params.yaml has a TokenPolicy, got {type(policy)}")
        tables = [each.table for each in iterations_of(artifacts, name)[:ITERATIONS]]
        groups = [groups_of(read_table(each, ROLLOUTS), prompts["prompt"]) for each in tables]
        for per_batch in BATCHES[name]:
            batches = [batch for each in groups for batch in batch_prompts(each, per_batch)]
            rows.append(
                {
                    "round": name,
                    "rollouts_per_batch": per_batch,
                    "batches": len(batches),
                    "prompts": sum(map(len, batches)),
                    "rollouts": sum(int(each["rollouts"].sum()) for each in batches),
                    **costs(policy, batches),
                }
            )
    return rows


def groups_of(rollouts: pd.DataFrame, prompts: pd.Series) -> pd.DataFrame:
    """Returns the prompts of an iteration's rollouts, with the numbers of their rollouts."""
    groups = rollouts.groupby("prompt_id", sort=False).size().rename("rollouts").reset_index()
    return groups.assign(prompt=groups["prompt_id"].map(prompts))


def costs(policy: TokenPolicy, batches: list[pd.DataFrame]) -> dict[str, Any]:
    """Returns sampled steps and CPU seconds of batches, and the µs of each part of a step.

    The parts sum to the whole: what the first step of every rollout costs, a further step where all
    rollouts are equally long, and the rest, which is what unequal lengths add.
    """
    rollouts = sum(int(each["rollouts"].sum()) for each in batches)
    seconds, steps = fastest(policy, batches)
    limit, ends = policy.decoding.max_steps, policy.end_tokens
    policy.end_tokens = ends[:0]  # so that a rollout ends at its limit alone
    policy.decoding = replace(policy.decoding, max_steps=1)
    first_seconds, _ = fastest(policy, batches)
    policy.decoding = replace(policy.decoding, max_steps=round(steps / rollouts))
    equal_seconds, equal_steps = fastest(policy, batches)
    policy.decoding, policy.end_tokens = replace(policy.decoding, max_steps=limit), ends
    reading = first_seconds / steps
    decoding = (equal_seconds - first_seconds) / equal_steps
    parts = (reading, decoding, seconds / steps - reading - decoding)
    return {
        "sampled_steps": steps,
        "cpu_seconds": round(seconds, 4),
        "microseconds": {name: round(1e6 * each, 2) for name, each in zip(PARTS, parts)},
    }


def fastest(policy: TokenPolicy, batches: list[pd.DataFrame]) -> tuple[float, int]:
    """Returns the CPU seconds of sampling the batches, and their steps, of the fastest repeat."""
    return min(sample(policy, batches) for _ in range(REPEATS))


def sample(policy: TokenPolicy, batches: list[pd.DataFrame]) -> tuple[float, int]:
    """Returns the CPU seconds of sampling the batches once, and their steps."""
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
        parts = [each["microseconds"][name] for name in PARTS]
        costs = [f"{cost:.0f}" for cost in (sum(parts), *parts)]
        rows.append([each["round"], *(str(each[name]) for name in COUNTS), *costs])
    titles = ["groups of", "rollouts per batch, at most", "batches", "prompts", "rollouts", "steps"]
    parts = ["µs per step", "reading prompts", "decoding", "unequal lengths"]
    return markdown_table([*titles, *parts], rows)


def claims(results: dict[str, Any]) -> list[str]:
    """Returns what docs/allocation_tokens.md says of reading prompts in the two rounds."""
    other, own = (
        next(each["microseconds"] for each in results["rows"] if each["round"] == name)
        for name in ROUNDS
    )
    ratio = own["reading"] / other["reading"]
    whole = [f"{sum(each.values()):.0f}" for each in (own, other)]
    return [
        f"{ratio:.0f} times as much per step",
        f"{whole[0]} µs per step instead of {whole[1]}",
        f"of a finished default run (here of seed {results['seed']})",
        f"It ran at {results['revision'][:7]}, a later revision",
    ]


if __name__ == "__main__":
    main()
