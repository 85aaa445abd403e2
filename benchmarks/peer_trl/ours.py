"""Measures a scenario with this project and prints the measurements as JSON.

python -m benchmarks.peer_trl.ours '{"size": "3M", "settings": {"rows": 8}}'
"""

import json
import sys
import tempfile

import torch
from torch import Tensor

from benchmarks.peer_trl import workload
from benchmarks.peer_trl.workload import Clock, Scenario, now
from grpo.modalities.policy import make_rollouts
from grpo.modalities.shared.optimizer import PreciseAdamW
from grpo.modalities.tokens.policy import Decoding, TokenPolicy, TokenTrajectory
from grpo.objective.algorithms import grpo
from grpo.objective.base import Objective, chain
from grpo.objective.weight import drop_uniform_groups
from grpo.runtime.artifacts.files import Scratch
from grpo.runtime.machine import prepare_machine
from grpo.schema import Machine
from grpo.training.updates import Iteration, TrainingSettings, run_updates
from grpo.types import Rollouts


def main(scenario: Scenario) -> None:
    """Measures a scenario after its warm-up."""
    compiles = bool(scenario.settings.get("compile"))
    prepare_machine(Machine(device="cpu", dtype="float32", threads=1, compile=compiles))
    policy = make_policy(scenario, workload.WARMUP_TOKENS)
    weights = workload.sum_weights(policy.model)
    optimizer = PreciseAdamW(
        policy.model.parameters(), lr=workload.LEARNING_RATE, weight_decay=0.0, fused=True
    )  # the default of both sides
    if compiles:
        policy.forward.compile("inductor")
    clock, start_bytes = Clock(), workload.resident_bytes()
    for seed in range(scenario.warmups + scenario.model.measured_updates):
        if seed == scenario.warmups:
            clock.end_warmup()
            before = policy.cost.flops
        update_once(policy, optimizer, scenario, clock, seed=seed)
        policy.decoding = Decoding(temperature=1.0, max_steps=workload.COMPLETION_TOKENS)
    flops = policy.cost.flops - before
    measured = workload.summary(
        clock, scenario, start_bytes=start_bytes, weights=weights, flops=flops
    )
    print(json.dumps(measured))


def make_policy(scenario: Scenario, max_steps: int) -> TokenPolicy:
    """Returns a policy of the scenario's size."""
    return TokenPolicy(
        workload.make_model(scenario.model),
        workload.make_tokenizer(scenario.model),
        decoding=Decoding(temperature=1.0, max_steps=max_steps),
        uses_chat_template=False,
    )


def update_once(
    policy: TokenPolicy, optimizer: PreciseAdamW, scenario: Scenario, clock: Clock, *, seed: int
) -> None:
    """Samples a batch, computes its rewards and takes one optimizer step, as a round does."""
    start, prompts = now(), workload.make_prompts(scenario)
    sizes = [workload.ROLLOUTS_PER_GROUP] * len(prompts)
    generator = torch.Generator().manual_seed(seed)
    trajectory, logp = policy.sample(prompts, group_sizes=sizes, generator=generator)
    clock.measure("generation", start)
    start = now()
    reward = torch.tensor(
        [
            workload.reward(row.tolist(), prompts[group], scenario.uniform_fraction)
            for row, group in zip(trajectory.tokens, trajectory.group.tolist())
        ]
    )
    clock.measure("scoring", start)
    start = now()
    rollouts = rewarded(trajectory, logp, reward)
    take_step(
        policy,
        optimizer,
        trajectory,
        rollouts,
        objective=objective(),
        settings=training_settings(scenario),
        generator=generator,
    )
    clock.measure("update", start)


def take_step(
    policy: TokenPolicy,
    optimizer: PreciseAdamW,
    trajectory: TokenTrajectory,
    rollouts: Rollouts,
    *,
    objective: Objective,
    settings: TrainingSettings,
    generator: torch.Generator,
) -> None:
    """Takes one optimizer step on rollouts, as a round does."""
    with tempfile.TemporaryDirectory() as folder:
        run_updates(
            Iteration(
                policy=policy,
                trajectory=trajectory,
                rollouts=rollouts,
                objective=objective,
                objective_state={},
                optimizer=optimizer,
                settings=settings,
                first_update=0,
                generator=generator,
            ),
            scratch=Scratch(folder, "benchmark"),
            progress=lambda done, total: None,
        )


def rewarded(trajectory: TokenTrajectory, logp: Tensor, reward: Tensor) -> Rollouts:
    """Returns rollouts whose outcomes equal their rewards."""
    return make_rollouts(trajectory, logp, group=trajectory.group, reward=reward, outcome=reward)


def training_settings(scenario: Scenario) -> TrainingSettings:
    """Returns settings with one update per round and no checkpoints."""
    width = scenario.longest_prompt + workload.COMPLETION_TOKENS
    return TrainingSettings(
        updates_per_iteration=1,
        max_grad_norm=workload.MAX_GRAD_NORM,
        tokens_per_microbatch=scenario.settings["rows"] * width,
        updates_per_checkpoint=2,
        updates_per_audit=0,
    )


def objective() -> Objective:
    """Returns GRPO without penalty that drops groups without signal."""
    return chain(grpo(workload.CLIP, workload.CLIP, beta=0.0), drop_uniform_groups())


if __name__ == "__main__":
    main(workload.read_scenario(sys.argv[1]))
