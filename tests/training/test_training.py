"""Training: what is planned, packed, scored and updated."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from grpo.errors import UnsoundError
from grpo.modalities.tokens.policy import TokenPolicy, TokenTrajectory
from grpo.objective.algorithms import gspo, rloo
from grpo.objective.base import Objective, chain
from grpo.objective.penalty import penalize_kl
from grpo.params.parameters import Training
from grpo.runtime.artifacts.files import Scratch
from grpo.training.batches import Batch, pack_microbatches, plan_batches
from grpo.training.frozen import compute_log_probs, measure_drift
from grpo.training.metrics import UpdateMetrics
from grpo.training.schedule import LearningRate
from grpo.training.updates import (
    Iteration,
    Loss,
    TrainingSettings,
    run_update,
    run_updates,
)
from grpo.types import Rollouts
from grpo.wiring.policies import make_optimizer
from tests.modalities.tiny import rewarded, sampled_scores, seeded, tiny_policy

TRAINING = Training(
    iterations_per_round=1,
    updates_per_iteration=2,
    staleness=0,
    stored_rollouts="all",
    learning_rate=0.01,
    betas=(0.9, 0.99),
    weight_decay=0.0,
    max_grad_norm=1.0,
    tokens_per_microbatch=64,
    updates_per_checkpoint=1,
    updates_per_audit=0,
    ranks=1,
)
SIZES = [4, 4, 2, 6]


def settings_of(tokens: int = 64) -> TrainingSettings:
    return TrainingSettings(
        updates_per_iteration=2,
        max_grad_norm=1e9,
        tokens_per_microbatch=tokens,
        updates_per_checkpoint=1,
        updates_per_audit=0,
    )


def sampled_round(*, uniform_group: int | None = None):
    """Returns a policy, its rollouts with every other one rewarded, and their trajectory."""
    policy = tiny_policy()
    prompts = ["a=", "bb=", "ccc=", "dddd="]
    trajectory, logp = policy.sample(prompts, group_sizes=SIZES, generator=seeded())
    reward = (torch.arange(len(logp)) % 2).float()
    if uniform_group is not None:
        reward[trajectory.group == uniform_group] = 1.0
    rollouts = rewarded(trajectory, logp, reward)
    return policy, rollouts, trajectory


def one_batch(objective: Objective, rollouts: Rollouts) -> Batch:
    batches, _ = plan_batches(objective, rollouts, {}, num_batches=1, generator=seeded())
    return batches[0]


def update_once(
    policy: TokenPolicy,
    rollouts: Rollouts,
    trajectory: TokenTrajectory,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    tokens: int = 64,
    largest: float = 1e9,
    update: int = 0,
    schedule: LearningRate | None = None,
) -> UpdateMetrics:
    """Takes one step of RLOO on all rollouts as one batch."""
    objective = rloo()
    return run_update(
        Loss(
            policy=policy,
            objective=objective,
            trajectory=trajectory,
            proximal=sampled_scores(rollouts),
            reference=None,
            tokens_per_microbatch=settings_of(tokens).tokens_per_microbatch,
        ),
        one_batch(objective, rollouts),
        optimizer=optimizer or make_optimizer(policy.model, TRAINING),
        max_grad_norm=largest,
        update=update,
        schedule=schedule,
    )


@given(
    sizes=st.lists(st.integers(2, 9), min_size=1, max_size=12),
    num_batches=st.integers(1, 6),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_batches_hold_whole_groups_and_every_rollout_once(
    sizes: list[int], num_batches: int, seed: int
):
    group = torch.repeat_interleave(torch.arange(len(sizes)) * 3, torch.tensor(sizes))
    count = len(group)
    rollouts = Rollouts(
        group=group,
        reward=torch.rand(count, generator=seeded(seed)),
        outcome=torch.zeros(count),
        mask=torch.ones(count, 1, dtype=torch.bool),
        behavior_logp=torch.zeros(count, 1),
    )
    objective = rloo()
    batches, _ = plan_batches(
        objective, rollouts, {}, num_batches=num_batches, generator=seeded(seed)
    )
    rows = torch.cat([batch.rows for batch in batches])
    assert sorted(rows.tolist()) == list(range(count))
    groups = [set(group[batch.rows].tolist()) for batch in batches]
    assert sum(map(len, groups)) == len(set().union(*groups))


@given(widths=st.lists(st.integers(1, 50), min_size=1, max_size=40), budget=st.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_microbatches_keep_the_budget_and_hold_every_row_once(widths: list[int], budget: int):
    packed = pack_microbatches(torch.tensor(widths), budget)
    assert sorted(torch.cat(packed).tolist()) == list(range(len(widths)))
    for rows in packed:
        widest = max(widths[row] for row in rows.tolist())
        assert len(rows) == 1 or len(rows) * widest <= budget


def test_scores_are_computed_where_needed_and_nowhere_else():
    policy, rollouts, trajectory = sampled_round()
    needed = torch.zeros(rollouts.mask.shape)
    needed[3, 0] = needed[5, :2] = 1
    needed *= rollouts.mask
    scored = compute_log_probs(policy, trajectory, needed, 64).logp
    assert torch.equal(~scored.isnan(), needed != 0)
    kept = needed != 0
    torch.testing.assert_close(scored[kept], rollouts.behavior_logp[kept], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("tokens", [8, 40, 10_000])
def test_the_size_of_microbatches_does_not_change_an_update(tokens: int):
    """G5: gradients add up, so weights after one step agree."""
    weights = []
    for budget in (tokens, 97):
        policy, rollouts, trajectory = sampled_round()
        optimizer = torch.optim.SGD(policy.model.parameters(), lr=0.1)
        update_once(policy, rollouts, trajectory, optimizer=optimizer, tokens=budget)
        weights.append(policy.model.lm_head.weight.detach().clone())
    torch.testing.assert_close(weights[0], weights[1], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("largest", [0.01, 1e9])
def test_a_step_is_that_of_a_gradient_of_at_most_the_largest_norm(largest: float):
    policy, rollouts, trajectory = sampled_round()
    before = torch.cat([each.detach().flatten() for each in policy.model.parameters()])
    optimizer = torch.optim.SGD(policy.model.parameters(), lr=1.0)
    metrics = update_once(policy, rollouts, trajectory, optimizer=optimizer, largest=largest)
    after = torch.cat([each.detach().flatten() for each in policy.model.parameters()])
    assert metrics.grad_norm > 0.02  # as it was before
    step = float((after - before).norm())
    assert step == pytest.approx(min(largest, metrics.grad_norm), rel=1e-4)


def test_rollouts_of_weight_0_are_never_forwarded():
    policy, rollouts, trajectory = sampled_round(uniform_group=3)
    assert policy.flops.training.body > 0  # measured once, on three passes of its own
    forwarded = []

    def count_rollouts(body: nn.Module, inputs: tuple[()], given: dict[str, Any], _: Any):
        reads_all = given["input_ids"].shape[1] == given["attention_mask"].shape[-1]
        reads_prompts_only = given["use_cache"] and reads_all
        forwarded.append(0 if reads_prompts_only else len(given["input_ids"]))

    policy.model.get_decoder().register_forward_hook(count_rollouts, with_kwargs=True)
    metrics = update_once(policy, rollouts, trajectory)
    assert sum(forwarded) == metrics.trained_rollouts == sum(SIZES) - SIZES[3]
    assert metrics.trained_steps == int(rollouts.mask[trajectory.group != 3].sum())
    assert metrics.uniform_group_fraction == 0.25


def test_a_batch_without_signal_takes_no_step():
    policy, rollouts, trajectory = sampled_round()
    flat = Rollouts(
        group=rollouts.group,
        reward=torch.ones(len(rollouts.reward)),
        outcome=torch.ones(len(rollouts.reward)),
        mask=rollouts.mask,
        behavior_logp=rollouts.behavior_logp,
    )
    before = policy.model.lm_head.weight.detach().clone()
    metrics = update_once(policy, flat, trajectory)
    assert torch.equal(policy.model.lm_head.weight, before)
    assert (metrics.trained_rollouts, metrics.grad_norm) == (0, 0.0)


def test_a_first_update_starts_at_ratio_1_and_clips_nothing():
    """G1 on a real model: no drift, no clip, no divergence."""
    policy, rollouts, trajectory = sampled_round()
    metrics = update_once(policy, rollouts, trajectory)
    assert metrics.clip_fraction == 0
    assert metrics.ratio_max == pytest.approx(1, abs=1e-4)
    assert metrics.kl_to_start == pytest.approx(0, abs=1e-8)


def test_a_clip_within_three_times_the_drift_is_refused():
    """U27: with a drift of 0.1, GSPO's 3e-4 would clip noise."""
    _, rollouts, _ = sampled_round()
    drifted = rollouts.behavior_logp + 0.1
    objective = gspo()
    with pytest.raises(UnsoundError, match="U27"):
        measure_drift(objective, [one_batch(objective, rollouts)], drifted)
    wide = gspo(0.5, 0.5)
    assert measure_drift(wide, [one_batch(wide, rollouts)], drifted) == pytest.approx(0.1, abs=1e-3)


def train(
    policy,
    rollouts,
    trajectory,
    *,
    objective,
    scratch,
    reference=None,
    progress=lambda done, total: None,
):
    return run_updates(
        Iteration(
            policy=policy,
            trajectory=trajectory,
            rollouts=rollouts,
            objective=objective,
            objective_state=objective.init(),
            optimizer=make_optimizer(policy.model, TRAINING),
            reference=reference,
            settings=settings_of(),
            first_update=5,
            generator=seeded(),
        ),
        scratch=scratch,
        progress=progress,
    )


def test_a_round_raises_the_probability_of_what_was_rewarded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    policy, rollouts, trajectory = sampled_round()
    trained = train(policy, rollouts, trajectory, objective=rloo(), scratch=Scratch("train", "a"))
    after = compute_log_probs(policy, trajectory, rollouts.mask.float(), 64).logp
    change = torch.where(rollouts.mask, after - rollouts.behavior_logp, 0.0).sum(dim=1)
    assert change[rollouts.reward == 1].mean() > change[rollouts.reward == 0].mean()
    assert [each.update for each in trained.metrics] == [5, 6]


def test_a_penalty_pulls_towards_the_reference(tmp_path, monkeypatch):
    """A large beta keeps the policy closer to the base than none."""
    monkeypatch.chdir(tmp_path)
    distance = {}
    for beta in (0.0, 20.0):
        policy, rollouts, trajectory = sampled_round()
        train(
            policy,
            rollouts,
            trajectory,
            objective=chain(rloo(), penalize_kl(beta, "k2")),
            scratch=Scratch("train", str(beta)),
            reference=tiny_policy(),
        )
        after = compute_log_probs(policy, trajectory, rollouts.mask.float(), 64).logp
        distance[beta] = float((after - rollouts.behavior_logp)[rollouts.mask].abs().mean())
    assert distance[20.0] < distance[0.0]
