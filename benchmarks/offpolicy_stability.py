"""How far stale updates drift: GRPO and GSPO, dense and mixture of experts, with routing replayed.

python -m benchmarks.offpolicy_stability          # runs what is missing, then table and figures
python -m benchmarks.offpolicy_stability --table  # only the table and the figures

Every run makes 48 updates of 64 rollouts. What differs is how many updates share one round of
rollouts, so how old the rollouts are by the time they are used. The sampler is a copy of the policy
in bfloat16, the trainer computes in float32, as engines differ in practice. Task, warm-up and judge
are those of params.yaml. Writes results/offpolicy_stability.json after every run.
"""

import argparse
import copy
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from benchmarks.demo import RESULTS, ROOT, machine, revision_of
from benchmarks.figures import save_figure
from benchmarks.offpolicy_report import draw, table
from grpo.modalities.shared.directories import load_base
from grpo.modalities.tokens.modality import RoutingMode, ScratchBase, TokenPolicyParams
from grpo.modalities.tokens.policy import Decoding, TokenPolicy, TokenTrajectory
from grpo.modalities.tokens.routing import find_routers, recorded
from grpo.objective.algorithms import grpo, gspo
from grpo.objective.base import Objective, chain
from grpo.objective.weight import drop_uniform_groups
from grpo.params.parameters import Parameters, Training, read_params
from grpo.runtime.artifacts.files import read_json, write_bytes
from grpo.runtime.machine import prepare_machine
from grpo.runtime.seeds import derive_seed
from grpo.sampling.rollouts import local_executor, sample_rollouts
from grpo.sampling.scoring import score_rollouts
from grpo.schema import DATA
from grpo.tasks.base import PromptTables
from grpo.training.audits import Auditor
from grpo.training.batches import plan_batches
from grpo.training.frozen import compute_log_probs
from grpo.training.metrics import UpdateMetrics
from grpo.training.updates import Loss, TrainingSettings, run_update
from grpo.types import Rollouts
from grpo.wiring.policies import build_base, make_optimizer
from grpo.wiring.rewards import build_reward
from grpo.wiring.tasks import build_prompts

OUT = RESULTS / "offpolicy_stability.json"
WORK = ROOT / ".work" / "offpolicy_stability"
SEEDS = (0, 1, 2)
UPDATES, UPDATES_PER_EVALUATION = 48, 16
PROMPTS_PER_UPDATE, ROLLOUTS_PER_PROMPT = 8, 8
EVALUATION_PROMPTS, EVALUATION_ROLLOUTS = 300, 4
LEARNING_RATE = 3e-4
COLUMNS = (
    *("outcome_mean", "trained_rollouts", "clip_fraction", "kl_to_start", "ratio_min"),
    "ratio_max",
)
DIGITS = 6
SHAPE: dict[str, int | float | str | bool] = {
    "hidden_size": 96,
    "head_dim": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "initializer_range": 0.04,
}
# Of one class family; per token, two experts of 144 are as wide as the dense layer of 288.
BASES: dict[str, tuple[str, dict[str, int | float | str | bool]]] = {
    "dense": ("Qwen3ForCausalLM", {**SHAPE, "intermediate_size": 288}),
    "moe": (
        "Qwen3MoeForCausalLM",
        {
            **SHAPE,
            "moe_intermediate_size": 144,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
    ),
}
CLIP = {"low": 0.2, "high": 0.28}
GSPO_CLIP, GSPO_STEPS = {"low": 3e-4, "high": 4e-4}, 1000  # the paper's, for its long rollouts


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run: what is trained, on rollouts how old, with which routing."""

    model: str
    routing: RoutingMode
    algorithm: str
    updates_per_round: int
    seed: int

    @property
    def name(self) -> str:
        return "/".join(map(str, asdict(self).values()))


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What all runs of one model share."""

    params: Parameters
    tables: PromptTables
    directory: Path  # of the base policy


def cases() -> Iterator[Case]:
    """Yields every run, all of one seed before the next.

    On-policy, GSPO is GRPO (rule U10), and routing that the trainer chose itself is live routing.
    """
    for seed in SEEDS:
        for updates in (1, 4, 8, 16):
            algorithms = ["grpo", "gspo"] if updates > 1 else ["grpo"]
            for algorithm in [*algorithms, *(["gspo_narrow"] if updates == 8 else [])]:
                for model, routing in kinds(is_stale=updates > 1):
                    yield Case(
                        model=model,
                        routing=routing,
                        algorithm=algorithm,
                        updates_per_round=updates,
                        seed=seed,
                    )


def kinds(*, is_stale: bool) -> list[tuple[str, RoutingMode]]:
    """Returns every model with every routing that makes a difference."""
    stale: list[tuple[str, RoutingMode]] = [("moe", "replay_proximal")] if is_stale else []
    return [("dense", "live"), ("moe", "live"), ("moe", "replay_sampled"), *stale]


def prepare(model: str) -> Bench:
    """Returns a model's prompts and base policy, warmed up on the first call."""
    params = read_params(ROOT / "params.yaml")
    assert isinstance(params.policy.base, ScratchBase)
    architecture, config = BASES[model]
    base = params.policy.base.model_copy(update={"architecture": architecture, "config": config})
    policy = params.policy.model_copy(update={"base": base})
    params = params.model_copy(update={"policy": policy})
    prepare_machine(params.machine)
    tables = build_prompts(params, ROOT / "data")
    directory = WORK / model
    if not directory.exists():
        made = build_base(params, ROOT / "data")
        for _ in made.warm_up(tables.warmup):
            pass
        made.save(directory)
    return Bench(params=params, tables=tables, directory=directory)


def objective_of(algorithm: str, steps: float) -> Objective:
    """Returns GRPO with clip-higher, or GSPO with a range for rollouts of `steps`.

    A mean of T log ratios varies with 1 / sqrt(T). `gspo` clips as many standard deviations as the
    clip of tokens does, `gspo_narrow` as many as the paper's range does at its length.
    """
    if algorithm == "grpo":
        return chain(grpo(**CLIP, beta=0.0), drop_uniform_groups())
    clip, per_step = (CLIP, 1) if algorithm == "gspo" else (GSPO_CLIP, GSPO_STEPS)
    scaled = {side: value * (per_step / steps) ** 0.5 for side, value in clip.items()}
    return chain(gspo(**scaled), drop_uniform_groups())


def load(bench: Bench, routing: RoutingMode) -> TokenPolicy:
    model, tokenizer = load_base(bench.directory, torch.float32)
    policy = bench.params.policy
    assert isinstance(policy, TokenPolicyParams)
    decoding = Decoding(temperature=1.0, max_steps=policy.max_steps, routing=routing)
    return TokenPolicy(model, tokenizer, decoding=decoding, uses_chat_template=False)


def sampler_of(policy: TokenPolicy) -> TokenPolicy:
    """Returns a copy of the policy that computes in bfloat16."""
    model = copy.deepcopy(policy.model)
    nn.Module.to(model, torch.bfloat16)
    return TokenPolicy(model, policy.tokenizer, decoding=policy.decoding, uses_chat_template=False)


def judged(
    bench: Bench, policy: TokenPolicy, prompts: pd.DataFrame, *, rollouts: int, seed: int
) -> tuple[TokenTrajectory, Rollouts]:
    """Returns rollouts of the prompts, stored and read again as the pipeline does."""
    with tempfile.TemporaryDirectory() as scratch:
        batch = sample_rollouts(
            local_executor(policy),
            prompts.assign(rollouts=rollouts),
            rollouts_per_batch=512,
            seed=seed,
            scratch=Path(scratch),
        )
    rewards = score_rollouts(batch.table, prompts, build_reward(bench.params, DATA))
    group = torch.tensor(batch.table["group"].to_numpy())
    trajectory, logp = policy.unpack(batch.tensors, group)
    outcome = torch.tensor(rewards["outcome"].to_numpy(), dtype=torch.float32)
    judged = Rollouts(
        group=group, reward=outcome, outcome=outcome, mask=trajectory.mask, behavior_logp=logp
    )
    return trajectory, judged


def evaluate(bench: Bench, policy: TokenPolicy) -> float:
    """Returns mean@4 on held-out prompts, the same draws for every policy."""
    prompts = bench.tables.eval.head(EVALUATION_PROMPTS)
    live = TokenPolicy(
        policy.model,
        policy.tokenizer,
        decoding=Decoding(temperature=1.0, max_steps=policy.decoding.max_steps),
        uses_chat_template=False,
    )
    seed = derive_seed(0, "evaluate")
    _, rollouts = judged(bench, live, prompts, rollouts=EVALUATION_ROLLOUTS, seed=seed)
    return float(rollouts.outcome.double().mean())


def run(bench: Bench, case: Case) -> dict[str, Any]:
    """Returns what every update, round and evaluation of a run showed."""
    start = time.process_time()
    policy = load(bench, case.routing)
    training = Training.model_validate(
        bench.params.arms["uniform"].training.model_copy(update={"learning_rate": LEARNING_RATE})
    )
    optimizer = make_optimizer(policy.model, training)
    shuffled = bench.tables.train.sample(frac=1, random_state=case.seed)
    updates: list[UpdateMetrics] = []
    rounds: list[dict[str, float]] = []
    evaluations = {"0": evaluate(bench, policy)}
    while len(updates) < UPDATES:
        count = PROMPTS_PER_UPDATE * case.updates_per_round
        used = len(updates) * PROMPTS_PER_UPDATE
        prompts = shuffled.iloc[used : used + count]
        rounds.append(train_round(bench, case, policy, optimizer, prompts, updates))
        if len(updates) % UPDATES_PER_EVALUATION == 0:
            evaluations[str(len(updates))] = evaluate(bench, policy)
    return {
        "revision": revision_of("HEAD"),
        "case": asdict(case),
        "evaluations": evaluations,
        "rounds": rounds,
        "updates": {
            name: [round(float(getattr(each, name)), DIGITS) for each in updates]
            for name in COLUMNS
        },
        "cpu_seconds": round(time.process_time() - start, 1),
    }


def train_round(
    bench: Bench,
    case: Case,
    policy: TokenPolicy,
    optimizer: torch.optim.Optimizer,
    prompts: pd.DataFrame,
    updates: list[UpdateMetrics],
) -> dict[str, float]:
    """Samples in bfloat16, trains in float32; adds to `updates` and returns the round's numbers.

    As `grpo.training.updates.train_round`, without its refusal of a drift that is large for the
    clip (rule U27): here the drift is what is looked at.
    """
    seed = derive_seed(case.seed, "round", len(updates))
    trajectory, rollouts = judged(
        bench, sampler_of(policy), prompts, rollouts=ROLLOUTS_PER_PROMPT, seed=seed
    )
    objective = objective_of(case.algorithm, float(rollouts.mask.sum(dim=1).double().mean()))
    batches, _ = plan_batches(
        objective,
        rollouts,
        objective.init(),
        num_batches=case.updates_per_round,
        generator=torch.Generator().manual_seed(seed),
    )
    trajectory = policy.replayed(trajectory)
    chosen_before = live_choices(policy, trajectory)
    proximal = compute_log_probs(policy, trajectory, rollouts.mask.float(), 16_384)
    for batch in batches:
        updates.append(
            run_update(
                Loss(
                    policy=policy,
                    objective=objective,
                    trajectory=trajectory,
                    proximal=proximal,
                    reference=None,
                    tokens_per_microbatch=settings(case).tokens_per_microbatch,
                ),
                batch,
                optimizer=optimizer,
                max_grad_norm=settings(case).max_grad_norm,
                update=len(updates),
                auditor=Auditor(objective, 0),
            )
        )
    mismatch = (proximal.logp - rollouts.behavior_logp)[rollouts.mask].abs().double()
    numbers = {
        "drift_max": float(mismatch.max()),
        "drift_mean": float(mismatch.mean()),
        "steps_mean": float(rollouts.mask.sum(dim=1).double().mean()),
        "outcome_mean": float(rollouts.outcome.double().mean()),
        **changed_choices(policy, trajectory, chosen_before),
    }
    return {name: round(value, DIGITS) for name, value in numbers.items()}


def settings(case: Case) -> TrainingSettings:
    return TrainingSettings(
        updates_per_round=case.updates_per_round,
        max_grad_norm=1.0,
        tokens_per_microbatch=16_384,
        updates_per_checkpoint=UPDATES,
        updates_per_audit=0,
    )


def live_choices(policy: TokenPolicy, trajectory: TokenTrajectory) -> Tensor | None:
    """Returns the experts that the policy itself chooses now; None for a dense policy."""
    if not find_routers(policy.model):
        return None
    live = TokenPolicy(
        policy.model,
        policy.tokenizer,
        decoding=Decoding(temperature=1.0, max_steps=policy.decoding.max_steps),
        uses_chat_template=False,
    )
    _ = live.flops.forward  # measured now: its passes choose experts too
    with torch.no_grad(), recorded(policy.model) as passes:
        live.log_prob(trajectory)
    read = torch.cat([trajectory.prompt_mask[trajectory.group], trajectory.mask[:, 1:]], dim=1)
    chosen: Tensor = passes[0].unflatten(0, read.shape)[read].sort().values
    return chosen


def changed_choices(
    policy: TokenPolicy, trajectory: TokenTrajectory, before: Tensor | None
) -> dict[str, float]:
    """Returns how many choices a round's updates have changed, and a bfloat16 sampler had."""
    after = live_choices(policy, trajectory)
    if before is None or after is None:
        return {}
    moved = (before != after).any(dim=2)
    numbers = {"routers_changed": float(moved.double().mean())}
    routing = trajectory.routing
    if routing is not None and not routing.is_open:
        read = torch.cat([trajectory.prompt_mask[trajectory.group], trajectory.mask[:, 1:]], dim=1)
        width, num_read = trajectory.prompt.shape[1], trajectory.tokens.shape[1] - 1
        sampled = routing.read(width, num_read)[read].sort().values
        numbers["routers_mismatched"] = float((before != sampled).any(dim=2).double().mean())
    return numbers


def main() -> None:
    """Runs what is missing, then writes table and figures from the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.offpolicy_stability")
    parser.add_argument("--table", action="store_true", help="run nothing")
    is_table_only = parser.parse_args().table
    runs: dict[str, Any] = read_json(OUT)["runs"] if OUT.exists() else {}
    benches: dict[str, Bench] = {}
    for case in [] if is_table_only else cases():
        if case.name not in runs:
            if case.model not in benches:
                benches[case.model] = prepare(case.model)
            runs[case.name] = run(benches[case.model], case)
            write_runs(runs)
            print(case.name, runs[case.name]["cpu_seconds"], flush=True)
    for name, figure in draw(runs).items():
        save_figure(figure, ROOT / "docs" / name)
    print(table(runs))


def write_runs(runs: dict[str, Any]) -> None:
    """Writes the results, one line per run."""
    head = {
        "command": "python -m benchmarks.offpolicy_stability",
        "machine": machine(),
        "bases": BASES,
        "clip": CLIP,
        "gspo_clip": {**GSPO_CLIP, "steps": GSPO_STEPS},
        "learning_rate": LEARNING_RATE,
        "prompts_per_update": PROMPTS_PER_UPDATE,
        "rollouts_per_prompt": ROLLOUTS_PER_PROMPT,
        "evaluation_prompts": EVALUATION_PROMPTS,
        "evaluation_rollouts": EVALUATION_ROLLOUTS,
    }
    lines = [f"{json.dumps(name)}: {json.dumps(run, sort_keys=True)}" for name, run in runs.items()]
    text = json.dumps(head, indent=2)[:-2] + ',\n  "runs": {\n' + ",\n".join(lines) + "\n}}\n"
    write_bytes(OUT, text.encode())


if __name__ == "__main__":
    main()
