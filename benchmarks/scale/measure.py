"""Measures parts of a large run: one block of each model, files, hashes and a judge."""

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from benchmarks.demo import ROOT, machine, revision_of
from benchmarks.scale.inputs import make_class, make_config
from grpo.modalities.shared.directories import copy_weights, offer_weights
from grpo.modalities.shared.flops import TokenFlops
from grpo.modalities.shared.recomputation import saved_bytes
from grpo.modalities.tokens.policy import TokenTrajectory
from grpo.rewards.base import Task
from grpo.rewards.math import verify_math
from grpo.runtime.artifacts.files import digest, remove, sha256_of
from grpo.runtime.artifacts.tables import REWARDS, write_table
from grpo.runtime.artifacts.tensors import write_tensors
from grpo.runtime.machine import DTYPES
from grpo.runtime.shared_tensors import SharedTensors
from grpo.sampling.judging import judge_text
from grpo.sampling.rollouts import SampledBatch, read_batch, write_batch
from grpo.types import Cost

VOCABULARY = 64  # of the model around one block
ROWS, WIDTH = 2, 128  # of the batch through one block
SMALL_GB, LARGE_GB = 0.06, 1.2  # sizes of a policy's directory
PARTS = {"model": 1, "optimizer": 6}  # ratio of bfloat16 weights to float32 copies and two moments
GROUP, STEPS = 16, 800
REWARDED = 4096
OFFERED_GB, OFFERED_TENSORS = 2.0, 32
SIDE_BY_SIDE_GB, REPEATS = 0.5, 3
CHARACTERS_PER_STEP = 4  # in English text
JUDGED = 200


def measure(runs: dict[str, Any]) -> dict[str, Any]:
    """Returns all measurements."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        files = measure_files(Path(folder))
        stored = measure_rollouts(Path(folder))
        offered = measure_weights()
    return {
        "blocks": {name: measure_block(spec) for name, spec in runs.items()},
        "files": files,
        "rollouts": stored,
        "weights": offered,
        "judge_cpu_seconds": measure_judge(),
        "stage_cpu_seconds": _children(
            lambda: subprocess.run([sys.executable, "-c", "import stages.train"], check=True)
        ),
        "machine": machine(),
        "revision": revision_of("HEAD"),
    }


def measure_block(spec: dict[str, Any]) -> dict[str, Any]:
    """Returns the activation memory per token and the FLOPs of one block of a model."""
    activations = {}
    config = make_config(spec, num_hidden_layers=1, vocab_size=VOCABULARY)
    for name, dtype in DTYPES.items():
        model = make_class(spec)(config).to(dtype).eval()
        activations[name] = activation_bytes(model, rows=ROWS, width=WIDTH)
    flops = TokenFlops(model)
    return {
        "activation_bytes": activations,
        "forward_flops": list(flops.forward),
        "training_flops": list(flops.training),
        "vocabulary": VOCABULARY,
    }


def activation_bytes(model: Any, *, rows: int, width: int) -> float:
    """Returns the activation memory per token of the first block, without shared tensors.

    Keys and values are repeated per query head, as on a GPU if rollouts differ in length.
    """
    body = model.get_decoder()
    hidden = torch.randn(rows, width, model.config.hidden_size, dtype=model.dtype)
    positions = torch.arange(width).expand(rows, width)
    mask = torch.zeros(rows, 1, width, width, dtype=model.dtype)
    rotary = body.rotary_emb(hidden, positions)
    with saved_bytes(model) as saved:
        output = body.layers[0](
            hidden.requires_grad_(),
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=rotary,
        )
    assert output.requires_grad
    shared: int = sum(each.nbytes for each in (mask, *rotary))
    return (saved.total - shared) / (rows * width)


def measure_files(folder: Path) -> dict[str, float]:
    """Returns CPU seconds per GB of a policy's directory, by operation.

    `dvc repro` hashes the outputs of a stage. The cache uses links here, so that copying, which
    depends on the disk, is excluded.
    """
    for command in (["init", "--no-scm"], ["config", "cache.type", "hardlink"]):
        dvc = [sys.executable, "-m", "dvc", *command, "--quiet"]
        subprocess.run(dvc, cwd=folder, check=True)
    stage = "stages:\n  make:\n    cmd: mv made policy\n    outs: [policy]\n"
    (folder / "dvc.yaml").write_text(stage)
    small, large = (_handle(folder, size) for size in (SMALL_GB, LARGE_GB))
    slopes = {name: (large[name] - small[name]) / (LARGE_GB - SMALL_GB) for name in small}
    return {
        **slopes,
        "dvc_repro": small["md5"] - SMALL_GB * slopes["md5"],
        "side_by_side": _hash_side_by_side(folder),
    }


def _handle(folder: Path, size: float) -> dict[str, float]:
    """Returns the CPU seconds of writing and of hashing a policy's directory of a size in GB."""
    made = folder / "made"
    made.mkdir()
    written = {
        made / f"{name}.safetensors": {
            "all": torch.randn(int(size * parts / sum(PARTS.values()) * 1e9 / 4))
        }
        for name, parts in PARTS.items()
    }

    def write_all() -> None:
        for path, tensors in written.items():
            write_tensors(path, tensors)

    repro = [sys.executable, "-m", "dvc", "repro", "--quiet"]
    seconds = {
        "write": _own(write_all),
        "sha256": _own(lambda: digest([made])),
        "md5": _children(lambda: subprocess.run(repro, cwd=folder, check=True)),
    }
    for path in ("policy", ".dvc/cache", "dvc.lock"):
        remove(folder / path)
    return seconds


def _hash_side_by_side(folder: Path) -> float:
    """Returns how many times as fast two threads hash two files as one thread does."""
    content = os.urandom(int(1e9 * SIDE_BY_SIDE_GB))
    files = [folder / f"{index}.bin" for index in range(2)]
    for file in files:
        file.write_bytes(content)

    def seconds(threads: int) -> float:
        with ThreadPoolExecutor(threads) as pool:
            start = time.perf_counter()
            list(pool.map(sha256_of, files))
            return time.perf_counter() - start

    one, two = (min(seconds(threads) for _ in range(REPEATS)) for threads in (1, 2))
    for file in files:
        file.unlink()
    return one / two


def measure_weights() -> dict[str, float]:
    """Returns the CPU seconds per GB of weights that a trainer offers in memory and a worker loads.

    Weights are offered for the first time in fresh memory, `first`, and then again, `offer`. The
    worker copies them into a model on the CPU, which stands for the copy to its GPU. The fastest of
    several.
    """
    size = int(1e9 * OFFERED_GB / 2 / OFFERED_TENSORS)
    tensors = {
        f"layer_{index}": torch.randn(size, dtype=torch.bfloat16)
        for index in range(OFFERED_TENSORS)
    }
    trained = torch.nn.ParameterDict(tensors)
    model = torch.nn.ParameterDict({name: torch.zeros_like(each) for name, each in tensors.items()})
    spent = dict[str, list[float]](first=[], offer=[], load=[])

    def carry(part: str, shared: SharedTensors | None) -> SharedTensors:
        start = time.process_time()
        shared = offer_weights(trained, shared)
        offered = time.process_time()
        assert shared
        copy_weights(model, shared.path)
        spent[part].append(offered - start)
        spent["load"].append(time.process_time() - offered)
        return shared

    for _ in range(REPEATS):
        carry("offer", carry("first", None))
        assert all(torch.equal(model[name], each) for name, each in tensors.items())
    return {part: min(seconds) / OFFERED_GB for part, seconds in spent.items()}


def measure_rollouts(folder: Path) -> dict[str, float]:
    """Returns the bytes of stored rollouts by step, of rewards by rollout, and CPU seconds.

    An iteration's rollouts are written by a worker, read by the stage, written by it and read by
    every rank: `seconds_per_step` is of twice that. The texts are pages of this repository.
    """
    pages = "\n".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))
    length, count = STEPS * CHARACTERS_PER_STEP, REWARDED
    prompts = count // GROUP
    starts = np.random.default_rng(0).integers(len(pages) - length, size=count).tolist()
    table = _numbered(count).assign(
        text=[pages[start : start + length] for start in starts],
        steps=STEPS,
        is_finished=True,
    )
    mask = torch.ones(count, STEPS, dtype=torch.bool)
    trajectory = TokenTrajectory(
        group=torch.tensor(table["group"]),
        prompt=torch.zeros(prompts, 1, dtype=torch.long),
        prompt_mask=torch.ones(prompts, 1, dtype=torch.bool),
        tokens=torch.randint(VOCABULARY, mask.shape),
        mask=mask,
    )
    tensors = trajectory.pack(-torch.rand(mask.shape))
    batch = SampledBatch(table=table, tensors=tensors, cost=Cost())
    once = _own(lambda: write_batch(folder / "rollouts", batch))
    once += _own(lambda: read_batch(folder / "rollouts"))
    outcome = torch.randint(2, (REWARDED,)).double().numpy()
    judged = _numbered(REWARDED).drop(columns="group")
    judged = judged.assign(outcome=outcome, reward=outcome, status="scored", detail="")
    write_table(judged, folder / "rewards.parquet", REWARDS)
    stored = sum(path.stat().st_size for path in (folder / "rollouts").iterdir())
    return {
        "bytes_per_step": stored / mask.sum().item(),
        "seconds_per_step": 2 * once / mask.sum().item(),
        "reward_bytes_per_rollout": (folder / "rewards.parquet").stat().st_size / REWARDED,
    }


def _numbered(count: int) -> pd.DataFrame:
    """Returns the id columns of rollouts and their groups."""
    group = pd.Series(range(count)) // GROUP
    prompt = "prompt-" + group.astype(str).str.zfill(5)
    member = (pd.Series(range(count)) % GROUP).astype(str)
    return pd.DataFrame({"rollout_id": prompt + "/" + member, "prompt_id": prompt, "group": group})


def measure_judge() -> float:
    """Returns the CPU seconds of judging one answer with the math judge."""
    task = Task(family="math", prompt="", answer=r"\frac{3}{4}", entry={})

    def judge_all() -> None:
        for index in range(JUDGED):
            text = "step by step " * 200 + rf"The answer is $\frac{{{index}}}{{4}}$"
            judge_text(
                verify_math, text, task, answer_pattern="The answer is(.*)", timeout_seconds=5.0
            )

    return _own(judge_all) / JUDGED


def _own(work: Callable[[], object]) -> float:
    """Returns the CPU seconds of work in this process."""
    start = time.process_time()
    work()
    return time.process_time() - start


def _children(work: Callable[[], object]) -> float:
    """Returns the CPU seconds of child processes of the work."""

    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    start = spent()
    work()
    return spent() - start
