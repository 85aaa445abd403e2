"""Measures the cost of an update by number of denoising steps: all steps, or one per prompt.

python -m benchmarks.denoising_steps          # runs every case, then writes the results
python -m benchmarks.denoising_steps --show   # prints the table of the results

The model is that of recipes/glyphs.yaml, untrained. Every case runs in a separate process, so that
its peak resident memory is measured alone. Writes results/denoising_steps.json.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim import AdamW

from benchmarks.demo import RESULTS, ROOT, machine, revision_of
from benchmarks.workspaces import reset_peak, resident_peak
from grpo.modalities.denoising.bases import make_pipeline
from grpo.modalities.denoising.policy import DenoisingPolicy
from grpo.modalities.denoising.sde_steps import Denoising
from grpo.modalities.policy import make_rollouts
from grpo.objective.algorithms import flash_grpo, flow_grpo
from grpo.params.parameters import read_params
from grpo.runtime.artifacts.files import read_json, write_json
from grpo.runtime.markdown import markdown_table
from grpo.training.batches import plan_batches
from grpo.training.updates import Loss, TrainingSettings, run_update
from grpo.types import Cost

OUT = RESULTS / "denoising_steps.json"
NUM_STEPS = (10, 20, 40)
ARMS = {"flow": "all", "flash": "one_per_prompt"}
PROMPTS, GROUP, REPEATS, DIMENSIONS = 12, 8, 3, 512
Case = dict[str, float | str]


def main() -> None:
    """Runs one case or all cases, or prints the table of the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.denoising_steps")
    parser.add_argument("--case", nargs=3, metavar=("ARM", "STEPS", "SEED"))
    parser.add_argument("--show", action="store_true")
    arguments = parser.parse_args()
    if arguments.case:
        arm, steps, seed = arguments.case
        print(json.dumps(measure(arm, int(steps), int(seed))))
        return
    if not arguments.show:
        about = {"command": "python -m benchmarks.denoising_steps", "machine": machine()}
        write_json(OUT, {**about, "revision": revision_of("HEAD"), "cases": run_all()})
    print(table(read_json(OUT)["cases"]))


def run_all() -> list[Case]:
    """Returns the measurements of all cases, repeated in turn."""
    cases = []
    for seed in range(REPEATS):
        for steps in NUM_STEPS:
            for arm in ARMS:
                command = [sys.executable, "-m", "benchmarks.denoising_steps", "--case"]
                shown = subprocess.run(
                    [*command, arm, str(steps), str(seed)],
                    cwd=ROOT,
                    check=True,
                    capture_output=True,
                )
                cases.append(json.loads(shown.stdout.splitlines()[-1]))
    return cases


def measure(arm: str, steps: int, seed: int) -> Case:
    """Returns the bytes that sampling stored and the cost of one update."""
    torch.set_num_threads(1)
    policy = _policy(steps, ARMS[arm])
    generator = torch.Generator().manual_seed(seed)
    captions = [f"{index:02d}" for index in range(PROMPTS)]
    trajectory, logp = policy.sample(captions, group_sizes=[GROUP] * PROMPTS, generator=generator)
    reward = torch.rand(len(logp), generator=generator)
    rollouts = make_rollouts(
        trajectory, logp, group=trajectory.group, reward=reward, outcome=reward.round()
    )
    make = {"flow": flow_grpo, "flash": flash_grpo}[arm]
    objective = make(DIMENSIONS, low=0.005, high=0.005)
    batches, _ = plan_batches(objective, rollouts, {}, num_batches=1, generator=generator)
    _ = policy._training_flops  # counted once per model, not per update
    optimizer = AdamW(policy.model.parameters(), lr=0.0)
    policy.cost = Cost()
    reset_peak()
    start = time.process_time()
    run_update(
        Loss(
            policy=policy,
            objective=objective,
            trajectory=trajectory,
            proximal=None,
            reference=None,
            tokens_per_microbatch=_settings().tokens_per_microbatch,
        ),
        batches[0],
        optimizer=optimizer,
        max_grad_norm=_settings().max_grad_norm,
        update=0,
    )
    stored = trajectory.pack(logp)
    return {
        "arm": arm,
        "num_steps": steps,
        "update_cpu_seconds": round(time.process_time() - start, 3),
        "update_peak_bytes": resident_peak(),
        "update_flops": policy.cost.flops,
        "stored_bytes": sum(each.numel() * each.element_size() for each in stored.values()),
    }


def table(cases: list[Case]) -> str:
    """Returns a Markdown table of means over the repeats, with their range if they differ."""
    titles = ["arm", "steps", "CPU s of an update", "GFLOPs", "stored MB", "peak MB"]
    rows = list[list[str]]()
    for arm in ARMS:
        for steps in NUM_STEPS:
            own = [each for each in cases if (each["arm"], each["num_steps"]) == (arm, steps)]
            seconds = np.array([each["update_cpu_seconds"] for each in own])
            peaks = np.array([each["update_peak_bytes"] for each in own]) / 2**20
            cells = [
                arm,
                str(steps),
                f"{seconds.mean():.2f} [{seconds.min():.2f}, {seconds.max():.2f}]",
                f"{float(own[0]['update_flops']) / 1e9:.1f}",
                f"{float(own[0]['stored_bytes']) / 2**20:.2f}",
                f"{peaks.mean():.0f} [{peaks.min():.0f}, {peaks.max():.0f}]",
            ]
            rows.append(cells)
    return markdown_table(titles, rows)


def _policy(steps: int, stochastic: str) -> DenoisingPolicy:
    params: Any = read_params(Path(ROOT / "recipes" / "glyphs.yaml"))
    pipeline = make_pipeline(params, ROOT / "data")
    pipeline.transformer.requires_grad_()
    decoding = Denoising(
        num_steps=steps,
        density="flow_sde",
        noise_level=0.7,
        stochastic="all" if stochastic == "all" else "one_per_prompt",
        window=(0, steps - 1),
        guidance=1.0,
    )
    settings = params.policy
    return DenoisingPolicy(
        pipeline,
        decoding=decoding,
        canvas=settings.canvas,
        num_tokens=settings.caption_tokens,
    )


def _settings() -> TrainingSettings:
    """Returns settings in which one forward pass covers all steps of a rollout."""
    return TrainingSettings(
        updates_per_iteration=1,
        max_grad_norm=1.0,
        tokens_per_microbatch=1_000_000,
        updates_per_checkpoint=1,
        updates_per_audit=0,
    )


if __name__ == "__main__":
    main()
