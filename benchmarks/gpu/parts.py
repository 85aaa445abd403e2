"""What is measured, part by part; each runs in a process of its own.

python -m benchmarks.gpu.parts NAME DEVICE SIZE OUT    # writes the result of a part as JSON
"""

import argparse
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from contextlib import chdir
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.sizes import (
    QWEN,
    Device,
    Target,
    describe_device,
    make_policy,
    make_prompts,
    reward_of,
    shape_of,
)
from benchmarks.peer_trl.ours import rewarded, take_step
from benchmarks.scale.inputs import Run
from benchmarks.scale.inputs import make_model as make_shape
from benchmarks.scale.measure import measure_block
from benchmarks.scale.results import training_bytes
from benchmarks.workspaces import ROOT, make_workspace, reset_peak, resident_peak, run_stages
from grpo.errors import MissingExtraError
from grpo.modalities.shared.optimizer import PreciseAdamW
from grpo.modalities.tokens.modality import DEFAULT_VLLM
from grpo.modalities.tokens.policy import TokenPolicy, TokenTrajectory
from grpo.objective.algorithms import grpo
from grpo.objective.base import Objective, chain
from grpo.objective.trust import truncate_mismatch
from grpo.runtime.artifacts.files import read_json, write_json
from grpo.training.updates import TrainingSettings
from tests.twins.recipes import make_twin, needing_a_twin, read

Result = dict[str, Any]
LEARNING_RATE = 1e-6
PRODUCT_SIDE = {"cpu": 1024, "cuda": 8192}  # of the matrices whose product is the speed to reach
NO_CUDA = "no CUDA device"
VLLM_ON_CPU = DEFAULT_VLLM.model_copy(update={"memory_share": 0.1, "compiled": False})


@dataclass(frozen=True, kw_only=True)
class Part:
    """A measurement, the longest time that it may take, and why it cannot run here."""

    run: Callable[[Target], Result]
    seconds: int
    find_obstacle: Callable[[Target], str | None] = lambda target: None


def run_tests(target: Target) -> Result:
    """Runs tests/gpu; returns counts, and the first line of each failure by the test's name."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu", "-q"]
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider", f"--junitxml={out}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        if not out.exists():
            raise SystemExit(f"pytest wrote no results: {done.stdout}{done.stderr}")
        cases = list(ElementTree.parse(out).getroot().iter("testcase"))
    ends = {each.get("name", ""): {child.tag for child in each} for each in cases}
    told = {
        case.get("name", ""): child.get("message", "")
        for case in cases
        for child in case
        if child.tag in ("failure", "error")
    }
    skipped = [name for name, tags in ends.items() if "skipped" in tags]
    return {
        "passed": len(ends) - len(told) - len(skipped),
        "skipped": len(skipped),
        "failures": {name: message.partition("\n")[0] for name, message in told.items()},
    }


def run_twin(name: str, target: Target) -> Result:
    """Runs all stages of a recipe's tiny twin on the device in bfloat16, without its report."""
    with tempfile.TemporaryDirectory() as folder:
        workspace = Path(folder)
        twin = make_twin(read(name), workspace / "made")
        twin["machine"] |= {"device": target.device, "dtype": "bfloat16"}
        make_workspace(workspace, twin)
        for each in (workspace / "made").iterdir():
            each.rename(workspace / "data" / each.name)
        run_stages(workspace)
        training = workspace / "artifacts" / "training"
        updates = [pd.read_csv(training / each / "updates.csv") for each in twin["rounds"]]
        drifts = [read_json(training / each / "summary.json") for each in twin["rounds"]]
    losses = pd.concat(updates)["loss"]
    if not np.isfinite(losses).all():
        raise SystemExit(f"a loss is not finite: {losses.tolist()}")
    return {
        "rounds": len(updates),
        "updates": len(losses),
        "drift_max": max(each["drift_max"] for each in drifts),
    }


def measure_throughput(model: str, target: Target) -> Result:
    """Measures seconds, tokens and FLOPs per second of sampling and of an update."""
    policy, optimizer = _start(target, model)
    speed = product_speed(target.device)
    times: dict[str, list[float]] = {"sampling": [], "update": []}
    flops: dict[str, int] = {}
    steps = tokens = 0
    for repeat in range(1 + target.work.repeats):
        seconds, before = {}, policy.cost
        start = _now(target)
        trajectory, logp = _sample(policy, target, model, seed=repeat)
        seconds["sampling"] = _now(target) - start
        sampled, start = policy.cost, _now(target)
        _update(policy, optimizer, target, trajectory, logp)
        seconds["update"] = _now(target) - start
        if repeat:
            for part, each in seconds.items():
                times[part].append(each)
        flops = {
            "sampling": sampled.flops - before.flops,
            "update": policy.cost.flops - sampled.flops,
        }
        steps = int(trajectory.mask.sum())
        tokens = steps + len(trajectory.group) * target.work.prompt_tokens
    busy = {
        "sampling": busy_seconds(target, lambda: _sample(policy, target, model, seed=0)),
        "update": busy_seconds(
            target, lambda: _update(policy, optimizer, target, trajectory, logp)
        ),
    }
    sheet = describe_device(target)["data_sheet_flops"]
    found: Result = {
        "parameters": sum(each.numel() for each in policy.model.parameters()),
        "work": asdict(target.work),
        "product_flops_per_second": speed,
        "data_sheet_flops_per_second": sheet,
    }
    for part, seconds_each in times.items():
        median = float(np.median(seconds_each))
        rate = flops[part] / median
        found[part] = {
            "seconds": [round(each, 4) for each in seconds_each],
            # Tokens of prompts count for the update, once per rollout as other trainers count them.
            "tokens_per_second": round((steps if part == "sampling" else tokens) / median, 1),
            "busy_seconds": busy[part],
            "flops": flops[part],
            "share_of_product": round(rate / speed, 4),
            "mfu": None if sheet is None else round(rate / sheet, 4),
        }
    return found


def busy_seconds(target: Target, work: Callable[[], object]) -> float | None:
    """Returns the seconds that a GPU computes or copies for some work; None on a CPU."""
    if target.device == "cpu":
        return None
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
        work()
        target.synchronize()
    total = sum(each.self_device_time_total for each in found.key_averages())
    return float(round(total / 1e6, 4))


def product_speed(device: Device) -> float:
    """Returns FLOPs per second of a large square product in bfloat16, the best of ten."""
    side = PRODUCT_SIDE[device]
    left, right = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))
    target, best = Target(device=device, size="tiny"), float("inf")
    for _ in range(10):
        start = _now(target)
        torch.mm(left, right)
        best = min(best, _now(target) - start)
    return float(2 * side**3 / best)


def measure_memory(model: str, target: Target) -> Result:
    """Measures the peak memory of an update and compares it with `predict_bytes`."""
    before = 0 if target.device == "cuda" else resident_peak()
    policy, optimizer = _start(target, model)
    weights = sum(each.nbytes for each in policy.model.parameters())
    trajectory, logp = _sample(policy, target, model, seed=0)
    _update(policy, optimizer, target, trajectory, logp)  # makes the moments
    if target.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    else:
        reset_peak()
    _update(policy, optimizer, target, trajectory, logp)
    peak = torch.cuda.max_memory_allocated() if target.device == "cuda" else resident_peak()
    peak -= before
    predicted = predict_bytes(target, model)
    total = sum(predicted.values())
    return {
        "weight_bytes": weights,
        "peak_bytes": peak,
        "peak_is_of": "tensors" if target.device == "cuda" else "what the process has added",
        "predicted_bytes": predicted,
        "predicted_total_bytes": total,
        "measured_per_predicted": round(peak / total, 3),
    }


def predict_bytes(target: Target, model: str) -> dict[str, float]:
    """Returns the memory of an update on one GPU by content, by the formulas of benchmarks.scale.

    A single rank gathers no blocks; its weights are those of all parts.
    """
    spec = {"architecture": "Qwen2ForCausalLM", "config": shape_of(target, model)}
    work = target.work
    run = Run(
        gpus=1,
        prompts_per_iteration=work.prompts,
        rollouts_per_group=work.rollouts_per_group,
        prompt_tokens=work.prompt_tokens,
        mean_steps=work.max_steps,
        max_steps=work.max_steps,
        updates_per_iteration=1,
        iterations_per_round=1,
        iterations_per_checkpoint=1,
        tokens_per_microbatch=work.tokens_per_microbatch,
        rounds=1,
        eval_prompts=1,
        eval_rollouts=1,
    )
    found = training_bytes(run, make_shape(spec, measure_block(spec)))
    gathered = ("gathered blocks", "a block's gradient", "embeddings and head, with gradients")
    return {name: each for name, each in found.items() if name not in gathered}


def compare_vllm(target: Target) -> Result:
    """Samples with vLLM and with transformers' model; compares seconds and log-probs."""
    from grpo.modalities.tokens.vllm import VllmPolicy, start_engine

    model = next(iter(QWEN))
    target.prepare()
    plain = make_policy(target, model)
    with tempfile.TemporaryDirectory() as folder:
        plain.model.save_pretrained(folder)
        plain.tokenizer.save_pretrained(folder)
        host = make_policy(Target(device="cpu", size=target.size), model)
        settings = DEFAULT_VLLM if target.device == "cuda" else VLLM_ON_CPU
        dtype = str(host.model.dtype).removeprefix("torch.")
        engine = VllmPolicy(
            host.model,
            host.tokenizer,
            base=Path(folder),
            directory=Path(folder),
            decoding=plain.decoding,
            uses_chat_template=False,
            start=partial(start_engine, settings, dtype, 1),
        )
        found: Result = {}
        for name, policy in (("transformers", plain), ("vllm", engine)):
            times = []
            for seed in range(1 + target.work.repeats):
                start = _now(target)
                trajectory, logp = _sample(policy, target, model, seed=seed)
                times.append(_now(target) - start)
            steps = int(trajectory.mask.sum())
            found[f"{name}_tokens_per_second"] = round(steps / float(np.median(times[1:])), 1)
        with torch.no_grad():
            scored = plain.log_prob(trajectory).cpu()
    apart = (scored - logp.cpu())[trajectory.mask].abs().double().numpy()
    found["logp_difference_mean"] = float(apart.mean())
    found["logp_difference_p99"] = float(np.percentile(apart, 99))
    return found


def compare_trl(target: Target) -> Result:
    """Measures whole updates of TRL's GRPOTrainer and of this project, sampling included."""
    from benchmarks.gpu.trl import seconds_of_updates

    model = next(iter(QWEN))
    theirs = seconds_of_updates(target, model)
    policy, optimizer = _start(target, model)
    ours = []
    for seed in range(1 + target.work.repeats):
        start = _now(target)
        _update(policy, optimizer, target, *_sample(policy, target, model, seed=seed))
        ours.append(_now(target) - start)
    median = {"ours": float(np.median(ours[1:])), "trl": float(np.median(theirs[1:]))}
    return {
        "ours_seconds": [round(each, 4) for each in ours[1:]],
        "trl_seconds": [round(each, 4) for each in theirs[1:]],
        "ours_per_trl": round(median["ours"] / median["trl"], 3),
    }


def compare_ranks(target: Target) -> Result:
    """Trains in two ranks and in one; compares weights and moments."""
    from tests.pipeline.processes import start_function
    from tests.pipeline.test_ranks import difference, tensors
    from tests.pipeline.trained_in_ranks import train_both

    names = ("alone", "rounded")  # float32, and bfloat16 with float32 copies
    with tempfile.TemporaryDirectory() as folder, chdir(ROOT):
        start = time.perf_counter()
        process = start_function(train_both, Path(folder), names, target.device)
        process.join()
        seconds = time.perf_counter() - start
        if process.exitcode != 0:
            raise SystemExit(f"training in ranks ended with exit code {process.exitcode}")
        apart = {
            name: difference(*(tensors(Path(folder) / each / name) for each in ("two", "one")))
            for name in names
        }
    backend = "NCCL" if target.device == "cuda" else "gloo"
    return {"backend": backend, "seconds": round(seconds, 1), "largest_difference": apart}


def _start(target: Target, model: str) -> tuple[TokenPolicy, PreciseAdamW]:
    """Returns a policy and its optimizer."""
    target.prepare()
    policy = make_policy(target, model)
    _ = policy.flops.forward, policy.flops.training  # counted before a clock starts
    parameters = policy.model.parameters()
    return policy, PreciseAdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0, fused=True)


def _sample(
    policy: TokenPolicy, target: Target, model: str, *, seed: int
) -> tuple[TokenTrajectory, torch.Tensor]:
    sizes = [target.work.rollouts_per_group] * target.work.prompts
    generator = torch.Generator().manual_seed(seed)
    return policy.sample(make_prompts(target, model), group_sizes=sizes, generator=generator)


def _update(
    policy: TokenPolicy,
    optimizer: PreciseAdamW,
    target: Target,
    trajectory: TokenTrajectory,
    logp: torch.Tensor,
) -> None:
    """Takes one optimizer step on rollouts, as a round does."""
    reward = torch.tensor([reward_of(row) for row in trajectory.tokens.tolist()])
    take_step(
        policy,
        optimizer,
        trajectory,
        rewarded(trajectory, logp, reward),
        objective=_objective(),
        settings=TrainingSettings(
            updates_per_iteration=1,
            max_grad_norm=1.0,
            tokens_per_microbatch=target.work.tokens_per_microbatch,
            updates_per_checkpoint=2,
            updates_per_audit=0,
        ),
        generator=torch.Generator().manual_seed(0),
    )


def _objective() -> Objective:
    """Returns GRPO with the correction that bfloat16 sampling needs (rule U27)."""
    return chain(truncate_mismatch(), grpo(beta=0.0))


def _now(target: Target) -> float:
    """Returns wall-clock seconds after the device's work."""
    target.synchronize()
    return time.perf_counter()


def _needs_vllm(target: Target) -> str | None:
    from grpo.modalities.tokens.vllm import find_python

    try:
        find_python()
    except MissingExtraError as error:
        return f"vllm is not installed: {error}"
    return None


def _needs_trl(target: Target) -> str | None:
    return "trl is not installed" if find_spec("trl") is None else None


def _needs_two_devices(target: Target) -> str | None:
    found = torch.cuda.device_count()
    if target.device == "cuda" and found < 2:
        return f"needs two CUDA devices, found {found}"
    return None


PARTS: dict[str, Part] = {
    "tests": Part(run=run_tests, seconds=120),
    **{
        f"throughput {model}": Part(run=partial(measure_throughput, model), seconds=120)
        for model in QWEN
    },
    "vllm": Part(run=compare_vllm, seconds=240, find_obstacle=_needs_vllm),
    "trl": Part(run=compare_trl, seconds=150, find_obstacle=_needs_trl),
    **{f"memory {model}": Part(run=partial(measure_memory, model), seconds=90) for model in QWEN},
    "two ranks": Part(run=compare_ranks, seconds=120, find_obstacle=_needs_two_devices),
    **{f"twin {name}": Part(run=partial(run_twin, name), seconds=120) for name in needing_a_twin()},
}


def main() -> None:
    """Writes the result of a part."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.parts", description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("device")
    parser.add_argument("size")
    parser.add_argument("out", type=Path)
    chosen = parser.parse_args()
    target = Target(device=chosen.device, size=chosen.size)
    write_json(chosen.out, PARTS[chosen.part].run(target))


if __name__ == "__main__":
    main()
