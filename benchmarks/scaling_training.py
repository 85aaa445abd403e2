"""Measures seconds and memory of updates in one rank and in two.

python -m benchmarks.scaling_training    # on an idle machine with two cores
python -m benchmarks.scaling_training draw    # table and figure from the results

Trains four GRPO updates on the same 128 rollouts with randomly initialized Llamas of two sizes, in
one rank and in two, three times each in turn, in new processes of one thread. A further run of each
measures the peak resident memory of log-probs and updates, minus the memory before the model was
made; its malloc returns freed memory to the system at once, which is slower. Writes
results/scaling_training.json and docs/scaling_training.svg.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from matplotlib.figure import Figure
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.demo import RESULTS, ROOT, machine, revision_of
from benchmarks.figures import save_figure
from benchmarks.workspaces import reset_peak, resident_peak
from grpo.modalities.policy import make_rollouts
from grpo.modalities.shared.tokenizers import make_byte_tokenizer
from grpo.modalities.tokens.policy import Decoding, TokenPolicy
from grpo.objective.algorithms import grpo
from grpo.params.parameters import Training
from grpo.report.style import styled
from grpo.runtime.artifacts.files import Scratch, read_json, write_json
from grpo.runtime.artifacts.usage import Usage
from grpo.runtime.markdown import markdown_table
from grpo.runtime.ranks import local_shard, num_ranks, process_group, run_in_ranks, this_rank
from grpo.training.updates import Iteration, run_updates
from grpo.wiring.iterations import training_settings
from grpo.wiring.policies import make_optimizer

OUT = RESULTS / "scaling_training.json"
FIGURE = ROOT / "docs" / "scaling_training.svg"
SIZES = {"3 M": (256, 704, 4), "30 M": (640, 1728, 6)}  # hidden size, intermediate size, layers
RANKS = (1, 2)
REPEATS = 3
PROMPTS = 16
ROLLOUTS_PER_PROMPT = 8
MAX_STEPS = 32
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
LOSS_TOLERANCE = 1e-4  # float32 sums differ by their order between one and two ranks
TRAINING = Training(
    iterations_per_round=1,
    updates_per_iteration=4,
    staleness=0,
    stored_rollouts="all",
    learning_rate=0.0003,
    betas=(0.9, 0.99),
    weight_decay=0.0,
    max_grad_norm=1.0,
    tokens_per_microbatch=1024,
    updates_per_checkpoint=100,
    updates_per_audit=0,
    ranks=1,
)


def main() -> None:
    """Runs the measurements unless the argument is `draw`; writes the figure, prints the table."""
    match sys.argv[1:]:
        case []:
            write_json(OUT, measure())
        case ["rank", size, ranks, out]:
            _train_in_ranks(size, int(ranks), Path(out))
            return
        case ["draw"]:
            pass
        case others:
            sys.exit(f"{' '.join(others)}: must be draw or absent; omit it to measure")
    results = read_json(OUT)
    save_figure(draw(results), FIGURE)
    print(table(results))


def measure() -> dict[str, Any]:
    """Returns the measurements of every size with every number of ranks."""
    cases = [(size, str(ranks)) for size in SIZES for ranks in RANKS]
    timed: list[list[Any]] = [[] for _ in cases]
    for _ in range(REPEATS):
        for case, runs in zip(cases, timed):
            runs.append(_run(*case, {}))
    return {
        "command": "python -m benchmarks.scaling_training",
        "revision": revision_of("HEAD"),
        "machine": machine(),
        "cases": [
            {"size": case[0], "ranks": case[1], "timed": runs, "weighed": _run(*case, GIVES_BACK)}
            for case, runs in zip(cases, timed)
        ],
    }


def _run(size: str, ranks: str, settings: dict[str, str]) -> list[dict[str, Any]]:
    """Runs a training in new processes and returns the measurements of each rank."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.scaling_training", "rank", size, ranks, folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **settings}
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
        return [read_json(file) for file in sorted(Path(folder).glob("rank-*.json"))]


def _train_in_ranks(size: str, ranks: int, out: Path) -> None:
    """Trains and writes the measurements of this rank."""
    torch.set_num_threads(1)
    store = out / "store"

    def work(usage: Usage) -> None:
        with process_group(ranks, "cpu", store=store):
            write_json(out / f"rank-{this_rank()}.json", _train(size, Scratch(str(out), "a")))

    run_in_ranks(ranks, work, Usage(), store=store)


def _train(size: str, scratch: Scratch) -> dict[str, Any]:
    """Returns the cost of one round for this rank, and its losses."""
    before = psutil.Process().memory_info().rss
    policy = _make_policy(*SIZES[size])
    number = sum(each.numel() for each in policy.model.parameters())
    generator = torch.Generator().manual_seed(0)
    prompts = [f"{index:02d} and {7 * index:03d} make what? " for index in range(PROMPTS)]
    trajectory, logp = policy.sample(
        prompts, group_sizes=[ROLLOUTS_PER_PROMPT] * PROMPTS, generator=generator
    )
    reward = (torch.arange(len(logp)) % ROLLOUTS_PER_PROMPT == 0).float()
    if num_ranks() > 1:
        policy.shard("cpu")
    optimizer = make_optimizer(policy.model, TRAINING)
    times: list[tuple[float, float]] = []
    reset_peak()
    trained = run_updates(
        Iteration(
            policy=policy,
            trajectory=trajectory,
            rollouts=make_rollouts(
                trajectory, logp, group=trajectory.group, reward=reward, outcome=reward
            ),
            objective=grpo(beta=0.0),
            objective_state={},
            optimizer=optimizer,
            settings=training_settings(TRAINING),
            first_update=0,
            generator=generator,
        ),
        scratch=scratch,
        progress=lambda done, total: times.append((time.perf_counter(), time.process_time())),
    )
    seconds, processor_seconds = np.diff(np.array(times), axis=0).T.tolist()
    kept = [*policy.model.parameters(), *(each.grad for each in policy.model.parameters())]
    kept += [each[name] for each in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return {
        "parameters": number,
        "seconds": seconds,
        "processor_seconds": processor_seconds,
        "kept_bytes": sum(local_shard(each).nbytes for each in kept),
        "peak_bytes": resident_peak() - before,
        "losses": [each.loss for each in trained.metrics],
    }


def _make_policy(hidden: int, inner: int, layers: int) -> TokenPolicy:
    """Returns a policy with random weights."""
    tokenizer = make_byte_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=128,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return TokenPolicy(
        LlamaForCausalLM(config).eval(),
        tokenizer,
        decoding=Decoding(temperature=1.0, max_steps=MAX_STEPS),
        uses_chat_template=False,
    )


def losses_agree(results: dict[str, Any]) -> bool:
    """Returns whether all runs of a size have equal losses up to rounding."""
    alone = {case["size"]: case["weighed"][0] for case in results["cases"] if case["ranks"] == "1"}
    return all(
        np.allclose(run["losses"], alone[case["size"]]["losses"], atol=LOSS_TOLERANCE, rtol=0)
        for case in results["cases"]
        for ranks in (case["weighed"], *case["timed"])
        for run in ranks
    )


def table(results: dict[str, Any]) -> str:
    """Returns a Markdown table of seconds and CPU seconds per update and of memory per rank."""
    titles = ["parameters", "ranks", "seconds per update", "times faster"]
    titles += ["processor seconds, all ranks", "weights, gradients, moments MB", "peak MB per rank"]
    rows = list[list[str]]()
    alone = {case["size"]: case for case in results["cases"] if case["ranks"] == "1"}
    for case in results["cases"]:
        middle, low, high = _seconds(case)
        faster = _seconds(alone[case["size"]])[0] / middle
        processor = np.median([_processor_seconds(each) for each in case["timed"]])
        cells = [f"{case['weighed'][0]['parameters'] / 1e6:.1f} M", case["ranks"]]
        cells += [f"{middle:.2f} [{low:.2f}, {high:.2f}]", f"{faster:.2f}x", f"{processor:.2f}"]
        cells += [f"{_largest(case, name) / 1e6:.0f}" for name in ("kept_bytes", "peak_bytes")]
        rows.append(cells)
    return markdown_table(titles, rows)


def _seconds(case: dict[str, Any]) -> tuple[float, float, float]:
    """Returns median, minimum and maximum over repeats of the slowest rank's update seconds."""
    each = [max(float(np.mean(rank["seconds"])) for rank in ranks) for ranks in case["timed"]]
    return float(np.median(each)), min(each), max(each)


def _processor_seconds(ranks: list[dict[str, Any]]) -> float:
    """Returns the mean CPU seconds per update, summed over ranks."""
    return sum(float(np.mean(rank["processor_seconds"])) for rank in ranks)


def _largest(case: dict[str, Any], name: str) -> int:
    """Returns the largest number of bytes over ranks."""
    return max(int(rank[name]) for rank in case["weighed"])


def draw(results: dict[str, Any]) -> Figure:
    """Returns plots of seconds, peak memory and losses for one and two ranks."""
    with styled():
        figure = Figure(figsize=(11.0, 3.6), layout="constrained")
        time_axes, peak_axes, loss_axes = figure.subplots(1, 3)
        places, width = np.arange(len(SIZES)), 0.8 / len(RANKS)
        for index, ranks in enumerate(map(str, RANKS)):
            cases = [case for case in results["cases"] if case["ranks"] == ranks]
            at = places + (index - 0.5) * width
            label = "1 rank" if ranks == "1" else f"{ranks} ranks"
            time_axes.bar(at, [_seconds(case)[0] for case in cases], width, label=label)
            peak_axes.bar(at, [_largest(case, "peak_bytes") / 1e6 for case in cases], width)
            losses = cases[-1]["weighed"][0]["losses"]
            loss_axes.plot(range(1, len(losses) + 1), losses, marker="os"[index], ls="-:"[index])
        for axes, title in ((time_axes, "seconds per update"), (peak_axes, "peak MB of a rank")):
            axes.set(title=title, xlabel="parameters")
            axes.set_xticks(places, list(SIZES))
            axes.set_yscale("log")
        loss_axes.set(title=f"loss of {list(SIZES)[-1]}", xlabel="update")
        loss_axes.set_xticks(range(1, TRAINING.updates_per_iteration + 1))
        time_axes.legend()
    return figure


if __name__ == "__main__":
    main()
