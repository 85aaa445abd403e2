"""Repeats the updates of both sides in plain PyTorch, from the rollouts that each has sampled.

python -m benchmarks.peer_trl_run.replay PYTHON_OF_TRL [SEED...]

If a side updates as the algorithm says, the repeated weights are its weights up to rounding. Writes
benchmarks/results/peer_trl_run_replay.json.
"""

import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.demo import RESULTS, machine, revision_of
from benchmarks.peer_trl.processes import versions
from benchmarks.peer_trl_run.runs import FOLDER, base_workspace, reproduce, time_theirs
from benchmarks.peer_trl_run.settings import BETAS, MAX_GRAD_NORM, SIZES, params_of
from grpo.params.yaml import dump_yaml
from grpo.runtime.artifacts.files import read_json, write_json
from grpo.runtime.artifacts.stored_iterations import iterations_of
from grpo.runtime.artifacts.tables import REWARDS, ROLLOUTS, read_table
from grpo.runtime.artifacts.tensors import read_tensors

OUT = RESULTS / "peer_trl_run_replay.json"
SIZE, SEEDS = "10.4M-half", [34]
UPDATES = 6
EPSILON = 1e-4  # added to the deviation of a group's rewards
Weights = dict[str, torch.Tensor]
Rollout = tuple[list[int], list[int], float]  # tokens of prompt and answer, reward


def main(python: str, seeds: list[int]) -> None:
    """Measures and prints how far the weights of each side are from the repeated ones."""
    found = {str(seed): {"same": _ours(seed), "trl": _theirs(seed, python)} for seed in seeds}
    about = {
        "command": "python -m benchmarks.peer_trl_run.replay PYTHON_OF_TRL SEED...",
        "revision": revision_of("HEAD"),
        "machine": machine(),
        "versions": versions(python),
        "size": SIZE,
        "updates": UPDATES,
    }
    write_json(OUT, {**about, "seeds": found})
    print(found)


def claims(results: dict[str, Any]) -> list[str]:
    """Returns the distances that docs/speed.md names."""
    ((seed, found),) = results["seeds"].items()
    same, trl = found["same"], found["trl"]
    return [
        f"The first {results['updates']} of the {SIZES[SIZE].updates} updates of seed {seed}",
        f"{same['distance']:.1e} (`same`) and {trl['distance']:.1e} (TRL)",
        f"the weights had moved by {same['moved']:.2f} and {trl['moved']:.2f}",
    ]


def _ours(seed: int) -> dict[str, float]:
    size, name = SIZES[SIZE], "same-1"
    workspace = FOLDER / f"{SIZE}-{seed}-replay"
    shutil.rmtree(workspace, ignore_errors=True)
    shutil.copytree(base_workspace(SIZE, seed), workspace, symlinks=True)
    params = params_of(size, seed, "same")
    arm = params["arms"]["same"]
    arm["training"] |= {"iterations_per_round": UPDATES, "stored_rollouts": "all"}
    arm["curriculum"][0]["split_at_random"]["prompts_per_phase"] = UPDATES * size.prompts_per_update
    (workspace / "params.yaml").write_text(dump_yaml(params))
    reproduce(workspace, f"train@{name}")
    artifacts = workspace / "artifacts"
    batches = []
    for each in iterations_of(artifacts, name):
        table, tensors = read_table(each.table, ROLLOUTS), read_tensors(each.tensors)
        rewards = read_table(each.rewards, REWARDS).set_index("rollout_id")["reward"]
        asked = _rows(tensors, "prompt_tokens", "prompt_lengths")
        prompts = dict(zip(table["group"].unique(), asked))  # stored in the order of the groups
        rows = zip(table["group"], _rows(tensors, "tokens", "steps"), rewards[table["rollout_id"]])
        batches.append([(prompts[group], answer, float(reward)) for group, answer, reward in rows])
    return _compare(artifacts / "policies" / "base", batches, artifacts / "policies" / name)


def _rows(tensors: Weights, name: str, lengths: str) -> list[list[int]]:
    return [each.tolist() for each in torch.split(tensors[name], tensors[lengths].tolist())]


def _theirs(seed: int, python: str) -> dict[str, float]:
    out, sampled = FOLDER / f"{SIZE}-{seed}-replay-trl", FOLDER / f"{SIZE}-{seed}-replay.json"
    time_theirs(
        SIZE, seed, python, out, updates=UPDATES, updates_per_save=0, rollouts_file=str(sampled)
    )
    base = base_workspace(SIZE, seed) / "artifacts" / "policies" / "base"
    encode = AutoTokenizer.from_pretrained(base)
    batches = [
        [
            (encode(prompt)["input_ids"], answer, reward)
            for prompt, answer, reward in zip(each["prompts"], each["answers"], each["rewards"])
        ]
        for each in read_json(sampled)
    ]
    return _compare(base, batches, out / f"update-{UPDATES}")


def _compare(base: Path, batches: list[list[Rollout]], trained: Path) -> dict[str, float]:
    """Returns distances of a side's weights from the repeated ones and from the base."""
    start = time.perf_counter()
    repeated = repeat_updates(base, batches, SIZES[SIZE].learning_rate)
    weights = load_file(trained / "model.safetensors")
    before = load_file(base / "model.safetensors")
    return {
        "distance": _distance(weights, repeated),
        "moved": _distance(weights, before),
        "seconds": round(time.perf_counter() - start, 1),
    }


def _distance(weights: Weights, others: Weights) -> float:
    """Returns the Euclidean distance over all weights."""
    squares = [((each - others[name]).double() ** 2).sum() for name, each in weights.items()]
    return float(sum(squares) ** 0.5)


def repeat_updates(base: Path, batches: list[list[Rollout]], learning_rate: float) -> Weights:
    """Returns the weights after one update per batch, of groups in order of their rollouts."""
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(BETAS[0], BETAS[1]), weight_decay=0.0
    )
    for batch in batches:
        rewards = torch.tensor([reward for *_, reward in batch]).view(-1, SIZES[SIZE].group_size)
        center, scale = rewards.mean(1, keepdim=True), rewards.std(1, keepdim=True) + EPSILON
        advantages = ((rewards - center) / scale).flatten().tolist()
        num_steps = sum(len(answer) for _, answer, _ in batch)
        optimizer.zero_grad()
        for (prompt, answer, _), advantage in zip(batch, advantages):
            if advantage:
                tokens = torch.tensor([prompt + answer])
                logits = model(input_ids=tokens).logits[0, len(prompt) - 1 : -1]
                logp = logits.log_softmax(1).gather(1, tokens[0, len(prompt) :, None])
                (-advantage * logp.sum() / num_steps).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
    return dict(model.state_dict())


if __name__ == "__main__":
    main(sys.argv[1], [int(seed) for seed in sys.argv[2:]] or SEEDS)
