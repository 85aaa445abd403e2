"""Measures the drift of stale updates: GRPO and GSPO, dense and MoE models, with routing replay.

python -m benchmarks.offpolicy_stability          # runs missing cases, then table and figures
python -m benchmarks.offpolicy_stability --table  # only the table and the figures

Every run makes 48 updates of 64 rollouts. Runs differ in the number of updates per round of
rollouts, that is in staleness. The sampler is a bfloat16 copy of the policy, and the trainer
computes in float32, to simulate the mismatch between engines. Task, warm-up and judge are those of
recipes/reasoning-short.yaml. Writes results/offpolicy_stability.json after every run.
"""

import argparse
import copy
import json
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from benchmarks.demo import RESULTS, ROOT, machine, revision_of
from benchmarks.figures import save_figure
from benchmarks.offpolicy_report import draw, table
from benchmarks.workspaces import SHORT_ROLLOUTS
from grpo.modalities.shared.directories import load_base
from grpo.modalities.tokens.modality import RoutingMode, ScratchBase, TokenPolicyParams
from grpo.modalities.tokens.policy import Decoding, TokenPolicy, TokenTrajectory
from grpo.modalities.tokens.routing import find_routers, recorded
from grpo.objective.algorithms import grpo, gspo
from grpo.objective.base import Objective, chain
from grpo.objective.weight import drop_uniform_groups
from grpo.params.parameters import Parameters, Training, read_params
from grpo.runtime.artifacts.files import locked, read_json, write_bytes
from grpo.runtime.machine import prepare_machine
from grpo.runtime.seeds import derive_seed
from grpo.sampling.drawing import local_executor, sample_rollouts
from grpo.sampling.scoring import score_rollouts
from grpo.schema import DATA
from grpo.tasks.base import PromptTables
from grpo.training.audits import Auditor
from grpo.training.batches import plan_batches
from grpo.training.frozen import compute_log_probs
from grpo.training.metrics import UpdateMetrics
from grpo.training.updates import Loss, run_update
from grpo.types import Rollouts
from grpo.wiring.policies import build_base, make_optimizer
from grpo.wiring.rewards import build_reward
from grpo.wiring.tasks import build_prompts

SEEDS = (0, 1, 2)
PROMPTS_PER_UPDATE, ROLLOUTS_PER_PROMPT = 8, 8
EVALUATION_PROMPTS, EVALUATION_ROLLOUTS = 300, 4
MAX_GRAD_NORM, TOKENS_PER_MICROBATCH = 1.0, 16_384
ROLLOUTS_PER_PASS = 256  # of a pass that records choices of experts: 4096 would take 13 GB
COLUMNS = (
    *("outcome_mean", "trained_rollouts", "clip_fraction", "kl_to_start", "ratio_min"),
    "ratio_max",
)
DIGITS = 6
Base = tuple[str, dict[str, int | float | str | bool]]  # architecture, config
CLIP = {"low": 0.2, "high": 0.28}
GSPO_CLIP, GSPO_STEPS = {"low": 3e-4, "high": 4e-4}, 1000  # of the paper, for long rollouts


@dataclass(frozen=True, kw_only=True)
class Suite:
    """What all runs of one results file share."""

    name: str  # of the results
    params: Parameters  # task, warm-up, judge and decoding
    bases: dict[str, Base]  # by model
    updates: int
    updates_per_evaluation: int
    learning_rate: float

    @property
    def out(self) -> Path:
        return RESULTS / f"{self.name}.json"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run: its model, routing, algorithm, updates per round and seed."""

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
    """Inputs that all runs of one model share."""

    suite: Suite
    params: Parameters
    tables: PromptTables
    directory: Path  # of the base policy


def make_bases(*, hidden: int, width: int, experts: int, positions: int) -> dict[str, Base]:
    """Returns a dense model and a mixture of experts of one family, by name.

    Two experts are active per token, of half the width each.
    """
    heads = 4
    shape: dict[str, int | float | str | bool] = {
        "hidden_size": hidden,
        "num_hidden_layers": 3,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": positions,
        "tie_word_embeddings": True,
        "initializer_range": 0.04,
    }
    dense = {**shape, "head_dim": hidden // heads, "intermediate_size": width}
    mixture = {
        **shape,
        "moe_intermediate_size": width // 2,
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }
    return {"dense": ("Qwen3ForCausalLM", dense), "moe": ("Qwen3MoeForCausalLM", mixture)}


def cases() -> Iterator[Case]:
    """Yields all runs, seed by seed.

    Skips equivalent runs: on-policy, GSPO equals GRPO (rule U10), and replay of the trainer's own
    routing equals live routing.
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
    """Returns all pairs of model and routing mode that are not equivalent."""
    stale: list[tuple[str, RoutingMode]] = [("moe", "replay_proximal")] if is_stale else []
    return [("dense", "live"), ("moe", "live"), ("moe", "replay_sampled"), *stale]


def prepare(suite: Suite, model: str) -> Bench:
    """Returns prompts and base policy of a model; the first call runs the warm-up."""
    params = suite.params
    assert isinstance(params.policy.base, ScratchBase)
    architecture, config = suite.bases[model]
    base = params.policy.base.model_copy(update={"architecture": architecture, "config": config})
    policy = params.policy.model_copy(update={"base": base})
    params = params.model_copy(update={"policy": policy})
    prepare_machine(params.machine)
    tables = build_prompts(params, ROOT / "data")
    directory = ROOT / ".work" / suite.name / model
    if not directory.exists():
        made = build_base(params, ROOT / "data")
        for _ in made.warm_up(tables.warmup):
            pass
        made.save(directory)
    return Bench(suite=suite, params=params, tables=tables, directory=directory)


def objective_of(algorithm: str, steps: float) -> Objective:
    """Returns GRPO with clip-higher, or GSPO with a clip range for rollouts of `steps`.

    The standard deviation of a mean of T log ratios is proportional to 1 / sqrt(T). In standard
    deviations, `gspo` has the range of the token-level clip, and `gspo_narrow` has the range of the
    paper at its rollout length.
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
    """Returns a bfloat16 copy of the policy."""
    model = copy.deepcopy(policy.model)
    nn.Module.to(model, torch.bfloat16)
    return TokenPolicy(model, policy.tokenizer, decoding=policy.decoding, uses_chat_template=False)


def judged(
    bench: Bench, policy: TokenPolicy, prompts: pd.DataFrame, *, rollouts: int, seed: int
) -> tuple[TokenTrajectory, Rollouts]:
    """Returns rollouts of the prompts after a round trip through storage, as in the pipeline."""
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
    """Returns mean@4 on held-out prompts, with the same seeds for every policy."""
    prompts = bench.tables.eval.sample(EVALUATION_PROMPTS, random_state=0)
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
    """Returns the metrics of every update, round and evaluation of a run."""
    start = time.process_time()
    policy = load(bench, case.routing)
    first_arm = next(iter(bench.params.arms.values()))
    training = Training.model_validate(
        first_arm.training.model_copy(update={"learning_rate": bench.suite.learning_rate})
    )
    optimizer = make_optimizer(policy.model, training)
    shuffled = bench.tables.train.sample(frac=1, random_state=case.seed)
    updates: list[UpdateMetrics] = []
    rounds: list[dict[str, float]] = []
    evaluations = {"0": evaluate(bench, policy)}
    while len(updates) < bench.suite.updates:
        count = PROMPTS_PER_UPDATE * case.updates_per_round
        used = len(updates) * PROMPTS_PER_UPDATE
        rows = np.arange(used, used + count) % len(shuffled)
        prompts = shuffled.iloc[rows]
        rounds.append(train_round(bench, case, policy, optimizer, prompts, updates))
        if len(updates) % bench.suite.updates_per_evaluation == 0:
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
    """Samples in bfloat16, trains in float32, appends to `updates` and returns round metrics.

    Unlike `grpo.training.updates.run_updates`, accepts a drift that is large relative to the clip
    range (rule U27), because this benchmark measures the drift.
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
    proximal = compute_log_probs(policy, trajectory, rollouts.mask.float(), TOKENS_PER_MICROBATCH)
    for batch in batches:
        updates.append(
            run_update(
                Loss(
                    policy=policy,
                    objective=objective,
                    trajectory=trajectory,
                    proximal=proximal,
                    reference=None,
                    tokens_per_microbatch=TOKENS_PER_MICROBATCH,
                ),
                batch,
                optimizer=optimizer,
                max_grad_norm=MAX_GRAD_NORM,
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


def live_choices(policy: TokenPolicy, trajectory: TokenTrajectory) -> Tensor | None:
    """Returns the experts that the current policy chooses; None for a dense policy."""
    if not find_routers(policy.model):
        return None
    live = TokenPolicy(
        policy.model,
        policy.tokenizer,
        decoding=Decoding(temperature=1.0, max_steps=policy.decoding.max_steps),
        uses_chat_template=False,
    )
    _ = live.flops.forward  # counted before recording, because its passes choose experts, too
    steps = trajectory.tokens.shape[1]
    pieces = torch.arange(len(trajectory.group)).split(ROLLOUTS_PER_PASS)
    return torch.cat([_choices(live, trajectory.select(rows, steps)) for rows in pieces])


@torch.no_grad()
def _choices(policy: TokenPolicy, trajectory: TokenTrajectory) -> Tensor:
    """Returns the experts that the policy chooses for every token that it reads, row by row."""
    with recorded(policy.model) as passes:
        policy.log_prob(trajectory)
    read = torch.cat([trajectory.prompt_mask[trajectory.group], trajectory.mask[:, 1:]], dim=1)
    chosen: Tensor = passes[0].unflatten(0, read.shape)[read].sort().values
    return chosen


def changed_choices(
    policy: TokenPolicy, trajectory: TokenTrajectory, before: Tensor | None
) -> dict[str, float]:
    """Returns the fractions of expert choices changed by the updates and by bfloat16 sampling."""
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
    """Runs missing cases, then writes table and figures from the results."""
    suite = Suite(
        name="offpolicy_stability",
        params=read_params(SHORT_ROLLOUTS),
        bases=make_bases(hidden=96, width=288, experts=8, positions=128),
        updates=48,
        updates_per_evaluation=16,
        learning_rate=3e-4,
    )
    runs = run_cases(suite, cases(), make_parser(suite).parse_args())
    for name, figure in draw(runs).items():
        save_figure(figure, ROOT / "docs" / name)
    print(table(runs))


def make_parser(suite: Suite) -> argparse.ArgumentParser:
    """Returns the parser of the arguments that choose cases."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{suite.name}")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, help="run only these")
    return parser


def run_cases(suite: Suite, wanted: Iterable[Case], chosen: argparse.Namespace) -> dict[str, Any]:
    """Runs the chosen cases whose results are missing. Returns all results."""
    benches: dict[str, Bench] = {}
    for case in [] if chosen.table else wanted:
        if case.seed in chosen.seeds and case.name not in read_runs(suite):
            if case.model not in benches:
                benches[case.model] = prepare(suite, case.model)
            found = run(benches[case.model], case)
            # Other processes may run other seeds at the same time.
            with locked(ROOT / ".work" / f"{suite.name}.lock"):
                write_runs(suite, {**read_runs(suite), case.name: found})
            print(case.name, found["cpu_seconds"], flush=True)
    return read_runs(suite)


def read_runs(suite: Suite) -> dict[str, Any]:
    """Returns the results so far."""
    found: dict[str, Any] = read_json(suite.out)["runs"] if suite.out.exists() else {}
    return found


def write_runs(suite: Suite, runs: dict[str, Any]) -> None:
    """Writes the results of a suite."""
    head = {
        "command": f"python -m benchmarks.{suite.name}",
        "machine": machine(),
        "bases": suite.bases,
        "clip": CLIP,
        "gspo_clip": {**GSPO_CLIP, "steps": GSPO_STEPS},
        "learning_rate": suite.learning_rate,
        "prompts_per_update": PROMPTS_PER_UPDATE,
        "rollouts_per_prompt": ROLLOUTS_PER_PROMPT,
        "evaluation_prompts": EVALUATION_PROMPTS,
        "evaluation_rollouts": EVALUATION_ROLLOUTS,
    }
    write_lines(suite.out, head, runs)


def write_lines(out: Path, head: dict[str, Any], runs: dict[str, Any]) -> None:
    """Writes results with one line per run."""
    lines = [f"{json.dumps(name)}: {json.dumps(run, sort_keys=True)}" for name, run in runs.items()]
    text = json.dumps(head, indent=2)[:-2] + ',\n  "runs": {\n' + ",\n".join(lines) + "\n}}\n"
    write_bytes(out, text.encode())


if __name__ == "__main__":
    main()
