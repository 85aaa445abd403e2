"""Trains rounds in any number of ranks and writes the results of each rank to files."""

import os
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator

from grpo.errors import ArtifactError
from grpo.modalities.shared.directories import (
    gather_trained,
    read_trainable,
    trainable,
    write_trained,
)
from grpo.modalities.shared.recomputation import recompute_blocks
from grpo.modalities.tokens.policy import TokenPolicy
from grpo.objective.algorithms import grpo, gspo, rloo
from grpo.objective.base import Objective, chain, credit_link
from grpo.objective.link import Link
from grpo.params.parameters import Training
from grpo.runtime.artifacts.files import Scratch, write_json
from grpo.runtime.artifacts.usage import Usage
from grpo.runtime.ranks import (
    all_texts,
    local_shard,
    num_ranks,
    process_group,
    require_same,
    run_in_ranks,
    sum_counts,
    this_rank,
)
from grpo.training.updates import Iteration, run_updates
from grpo.types import Credit, Rollouts
from grpo.wiring.iterations import training_settings
from grpo.wiring.policies import make_optimizer
from tests.modalities.tiny import rewarded, seeded, tiny_moe, tiny_policy

PROMPTS = ["a=", "bb=", "ccc=", "a longer prompt=", "e="]
SIZES = [5, 4, 2, 6, 2]
COUNTS = [0, 1, 2**32, 2**62 + 1, 10**21]  # added exactly, beyond 64 bits too
TRAINING = Training(
    iterations_per_round=1,
    updates_per_iteration=3,
    staleness=0,
    stored_rollouts="all",
    learning_rate=0.01,
    betas=(0.9, 0.99),
    weight_decay=0.1,
    max_grad_norm=1.0,
    tokens_per_microbatch=48,
    updates_per_checkpoint=2,
    updates_per_audit=0,
    ranks=1,
)


class Interrupted(Exception):
    """Simulates a kill within a process."""


@dataclass(frozen=True, kw_only=True)
class Made:
    """Settings of a training round."""

    objective: Objective
    policy: Callable[..., TokenPolicy] = tiny_policy
    has_reference: bool = False
    dtype: torch.dtype = torch.float32
    trained: str = ""  # part of the names of the weights that are
    changes: dict[str, int] = field(default_factory=dict)  # of TRAINING
    is_rounded: bool = False  # weights in bfloat16, whatever the rest is in

    @property
    def weights(self) -> torch.dtype:
        return torch.bfloat16 if self.is_rounded else self.dtype


def keep_rollouts(number: int) -> Objective:
    """Keeps the first few rollouts of a batch."""

    def credit(before: Credit, rollouts: Rollouts, generator: Generator) -> Credit:
        kept = torch.arange(len(rollouts.group)) < number
        return before.keep(kept[:, None].expand(before.weight.shape))

    return credit_link(Link("keep_rollouts", {"number": number}), credit)


def recomputing(policy: Callable[..., TokenPolicy], **settings: Any) -> TokenPolicy:
    """Returns a policy whose blocks compute their activations again."""
    made = policy(**settings)
    recompute_blocks(made.model)
    return made


ROUNDS = {
    "grpo": Made(
        objective=grpo(),
        policy=partial(tiny_policy, tie_word_embeddings=True),
        has_reference=True,
    ),
    "double": Made(
        objective=grpo(),
        policy=partial(tiny_policy, tie_word_embeddings=True),
        has_reference=True,
        dtype=torch.float64,
    ),
    "rounded": Made(objective=rloo(), is_rounded=True),
    "gspo": Made(objective=gspo()),
    "experts": Made(objective=rloo(), policy=partial(tiny_moe, routing="replay_sampled")),
    "recomputed": Made(
        objective=rloo(), policy=partial(recomputing, tiny_moe, routing="replay_sampled")
    ),
    "shared": Made(objective=rloo(), policy=partial(recomputing, tiny_policy)),
    "queries": Made(objective=rloo(), trained="q_proj"),
    "few": Made(objective=chain(rloo(), keep_rollouts(1)), changes={"updates_per_audit": 1}),
    "alone": Made(objective=rloo(), changes={"updates_per_iteration": 1}),
}


def train_both(folder: Path, names: Collection[str] = ROUNDS, device: str = "cpu") -> None:
    """Trains rounds in two ranks, then in one."""
    train_all(folder / "two", 2, names, device)
    train_all(folder / "one", 1, names, device, started=folder / "two")


def train_all(
    folder: Path, ranks: int, names: Collection[str], device: str, started: Path | None = None
) -> None:
    """Trains rounds in so many ranks; `grpo` also with an interruption.

    Args:
      started: Where another number of ranks has trained: what it left is trained on, too.
    """
    folder.mkdir()
    os.chdir(folder)
    torch.set_num_threads(1)
    store = folder / "store"

    def work(usage: Usage) -> None:
        with process_group(ranks, device, store=store):
            if ranks > 1:
                with pytest.raises(ArtifactError, match="a number must be the same for all ranks"):
                    require_same("a number", this_rank())
            require_same("a number", ranks)
            assert sum_counts(COUNTS) == [ranks * each for each in COUNTS]
            texts = ["", "a path", "/proc/1/fd/2 \u00e9"]
            assert all_texts(texts[this_rank()]) == texts[:ranks]
            for name in names:
                train(name, folder / name, device)
            if "grpo" not in names:
                return
            with suppress(Interrupted):
                train("grpo", folder / "resumed", device, stop_at=2)
            train("grpo", folder / "resumed", device)
            for each in (folder, started) if started else ():
                train("grpo", folder / f"after {each.name}", device, start=each / "grpo")

    run_in_ranks(ranks, work, Usage(), store=store)


def train(
    name: str, out: Path, device: str, *, start: Path | None = None, stop_at: int | None = None
) -> None:
    """Trains a round, and writes what every rank then has; `stop_at`: before that update."""

    def progress(done: int, total: int) -> None:
        if done == stop_at:
            raise Interrupted

    made = ROUNDS[name]
    policy, reference = made.policy(), made.policy(seed=1)
    if start:
        read_trainable(start, policy.model, optimizer=None)
    trajectory, logp = policy.sample(PROMPTS, group_sizes=SIZES, generator=seeded())
    reward = (torch.arange(len(logp)) % 2).to(made.dtype)
    torch.set_default_dtype(made.dtype)
    for each in (policy, reference):
        each.model.to(made.weights)
        for weight_name, weight in each.model.named_parameters():
            weight.requires_grad_(made.trained in weight_name)
        if num_ranks() > 1:
            each.shard(device)
        else:
            each.model.to(device)
    training = TRAINING.model_copy(update=made.changes)
    optimizer = make_optimizer(policy.model, training)
    if start:
        read_trainable(start, policy.model, optimizer)
    trained = run_updates(
        Iteration(
            policy=policy,
            trajectory=trajectory,
            rollouts=rewarded(trajectory, logp, reward),
            objective=made.objective,
            objective_state=made.objective.init(),
            optimizer=optimizer,
            reference=reference if made.has_reference else None,
            settings=training_settings(training),
            first_update=0,
            generator=seeded(),
        ),
        scratch=Scratch(out.name, "a"),
        progress=progress,
    )
    torch.set_default_dtype(torch.float32)
    weights = trainable(policy.model).values()
    held = {
        "weights": sum(local_shard(each).numel() for each in policy.model.parameters()),
        "gradients": sum(
            local_shard(optimizer.master_weight(each).grad).numel() for each in weights
        ),
        "moments": sum(local_shard(each["exp_avg"]).numel() for each in optimizer.state.values()),
    }
    tensors = gather_trained(policy.model, optimizer)
    out.mkdir(exist_ok=True)
    write_json(out / f"held-{this_rank()}.json", held)
    if this_rank() == 0:
        write_trained(out, tensors)
        write_json(out / "metrics.json", [asdict(each) for each in trained.metrics])
        write_json(out / "cost.json", [asdict(policy.cost), asdict(trained.audit_cost)])
        write_json(out / "drift.json", trained.drift_max)
