"""Audits: what they measure, what they leave alone, and what they cost."""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from torch import Generator, Tensor

from grpo.objective.advantage import center_by_group_mean, leave_one_out, scale_by_group_std
from grpo.objective.algorithms import rloo
from grpo.objective.base import Objective, chain, credit_link
from grpo.objective.link import Link
from grpo.objective.links import ALGORITHMS
from grpo.objective.penalty import penalize_kl
from grpo.objective.trust import clip_surrogate
from grpo.objective.weight import (
    average_over_prompts,
    drop_uniform_groups,
    keep_extreme_rollouts,
)
from grpo.runtime.artifacts.files import Scratch
from grpo.training.audits import Auditor, compare_gradients, needs_advantage
from grpo.training.batches import Batch
from grpo.training.frozen import compute_log_probs
from grpo.training.metrics import UpdateMetrics
from grpo.training.updates import (
    Iteration,
    Loss,
    TrainedIteration,
    add_gradient,
    run_update,
    run_updates,
)
from grpo.types import Cost, Credit, Rollouts
from grpo.wiring.policies import make_optimizer
from tests.modalities.tiny import sampled_scores, seeded, tiny_policy
from tests.objective.batches import credit_of, ragged_rollouts
from tests.training.test_training import TRAINING, one_batch, sampled_round, settings_of


def keep_random_rows(fraction: float, *, weigh: bool = False) -> Objective:
    """Keeps each rollout with probability `fraction`; unbiased if it weighs by 1/fraction."""

    def credit(before: Credit, rollouts: Rollouts, generator: Generator) -> Credit:
        kept = torch.rand(len(rollouts.group), generator=generator) < fraction
        after = before.keep(kept[:, None].expand(before.weight.shape))
        return replace(after, weight=after.weight / fraction) if weigh else after

    return credit_link(Link("keep_random_rows", {"fraction": fraction}), credit)


def keep_first_step() -> Objective:
    """Keeps the first step of every rollout."""

    def credit(before: Credit, rollouts: Rollouts, generator: Generator) -> Credit:
        return before.keep((torch.arange(before.weight.shape[1]) == 0).expand_as(rollouts.mask))

    return credit_link(Link("keep_first_step", {}), credit)


def train(
    objective: Objective,
    *,
    updates_per_audit: int,
    updates: int = 2,
    name: str = "a",
    uniform_group: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
):
    """Returns a policy after its updates, from number 5 on, and what its training left."""
    policy, rollouts, trajectory = sampled_round(uniform_group=uniform_group)
    trained = run_updates(
        Iteration(
            policy=policy,
            trajectory=trajectory,
            rollouts=rollouts,
            objective=objective,
            objective_state=objective.init(),
            optimizer=make_optimizer(policy.model, TRAINING),
            reference=tiny_policy(seed=1),
            settings=replace(
                settings_of(), updates_per_audit=updates_per_audit, updates_per_iteration=updates
            ),
            first_update=5,
            generator=seeded(),
        ),
        scratch=Scratch("train", name),
        progress=progress,
    )
    return policy, trained


def weights_of(policy) -> list[Tensor]:
    return [each.detach().clone() for each in policy.model.parameters()]


def without_audits(trained: TrainedIteration) -> list[UpdateMetrics]:
    return [replace(m, audit_cosine=None, audit_norm_ratio=None) for m in trained.metrics]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def audit_batch(batch: Batch, rollouts: Rollouts, trajectory, policy, objective):
    """Returns the metrics of an audited update, and the cost of the audit."""
    auditor = Auditor(objective, 1)
    metrics = run_update(
        Loss(
            policy=policy,
            objective=objective,
            trajectory=trajectory,
            proximal=sampled_scores(rollouts),
            reference=sampled_scores(rollouts, -0.1),
            tokens_per_microbatch=settings_of().tokens_per_microbatch,
        ),
        batch,
        optimizer=torch.optim.SGD(policy.model.parameters(), lr=0.0),
        max_grad_norm=settings_of().max_grad_norm,
        update=0,
        auditor=auditor,
    )
    return metrics, auditor.cost


def flat_gradient(policy, trajectory, rollouts: Rollouts, objective, credit: Credit) -> Tensor:
    """Returns the gradient of a credit as one vector."""
    policy.model.zero_grad()
    add_gradient(
        Loss(
            policy=policy,
            objective=objective,
            trajectory=trajectory,
            proximal=sampled_scores(rollouts),
            reference=sampled_scores(rollouts, -0.1),
            tokens_per_microbatch=10_000,
        ),
        Batch(rows=torch.arange(len(rollouts.group)), rollouts=rollouts, credit=credit),
        credit,
    )
    return torch.cat([each.grad.double().flatten() for each in policy.model.parameters()])


def test_cosine_and_norm_ratio_run_over_all_tensors_and_none_is_zero():
    used = [torch.tensor([3.0]), torch.tensor([[4.0]]), None]
    full = [torch.tensor([4.0]), torch.tensor([[3.0]]), None]
    assert compare_gradients(used, full) == pytest.approx((24 / 25, 1.0))
    # (3, 4) against (3, 0): cosine 3/5, norms 5 and 3.
    assert compare_gradients(used, [torch.tensor([3.0]), None, None]) == pytest.approx(
        (3 / 5, 5 / 3)
    )
    assert compare_gradients([None] * 3, full) == (0.0, 0.0)
    assert compare_gradients([None], [torch.zeros(2)]) == (1.0, 1.0)
    assert compare_gradients(used, [None] * 3) == (0.0, None)


def test_an_audit_compares_with_the_gradient_of_everything_that_was_sampled():
    """Against both gradients as flat vectors, in one microbatch each."""
    objective = chain(rloo(), keep_random_rows(0.5))
    policy, rollouts, trajectory = sampled_round()
    batch = one_batch(objective, rollouts)
    metrics, _ = audit_batch(batch, rollouts, trajectory, policy, objective)
    ordered = replace(batch.credit, full=None)
    trajectory = trajectory.select(batch.rows, rollouts.mask.shape[1])
    used = flat_gradient(policy, trajectory, batch.rollouts, objective, ordered)
    full = flat_gradient(policy, trajectory, batch.rollouts, objective, batch.credit.full)
    cosine = float(torch.nn.functional.cosine_similarity(used, full, dim=0))
    assert metrics.audit_cosine == pytest.approx(cosine, abs=1e-5)
    assert metrics.audit_norm_ratio == pytest.approx(float(used.norm() / full.norm()), rel=1e-5)
    assert 0.2 < cosine < 0.99


@pytest.mark.parametrize(
    ("objective", "updates"),
    [
        (rloo(), 2),
        (chain(rloo(), keep_random_rows(0.5)), 2),
        (chain(rloo(), keep_random_rows(0.5)), 1),  # one update scores itself
        (chain(rloo(), keep_extreme_rollouts(2)), 2),
    ],
    ids=["uniform", "random", "random-once", "extremes"],
)
def test_updates_are_the_same_bits_with_and_without_audits(objective: Objective, updates: int):
    plain, without = train(objective, updates_per_audit=0, updates=updates, name="without")
    audited, with_audits = train(objective, updates_per_audit=1, updates=updates, name="with")
    assert all(each.audit_cosine is not None for each in with_audits.metrics)
    for first, second in zip(weights_of(plain), weights_of(audited), strict=True):
        assert torch.equal(first, second)
    assert without.metrics == without_audits(with_audits)
    assert plain.cost == audited.cost
    assert without.audit_cost == Cost()


def test_the_last_of_every_n_updates_is_audited():
    """Updates 5 and 6, every 6: the update of number 5 is the sixth of the arm."""
    _, trained = train(chain(rloo(), keep_random_rows(0.5)), updates_per_audit=6)
    assert [each.audit_cosine is not None for each in trained.metrics] == [True, False]


def test_an_audit_costs_what_the_full_credit_costs_beside_the_policys_own():
    objective = chain(rloo(), keep_random_rows(0.5))
    policy, rollouts, trajectory = sampled_round()
    batch = one_batch(objective, rollouts)
    _, cost = audit_batch(batch, rollouts, trajectory, policy, objective)
    other, _, _ = sampled_round()
    whole = replace(batch, credit=batch.credit.full)
    other.cost = Cost()
    metrics, none = audit_batch(whole, rollouts, trajectory, other, objective)
    assert cost == other.cost
    assert cost.trained_steps == metrics.trained_steps == int(rollouts.mask.sum())
    assert none == Cost()


def test_steps_that_only_audits_need_are_scored_for_audited_updates_alone():
    objective = chain(rloo(), keep_random_rows(0.5))
    _, rollouts, _ = sampled_round()
    batch = one_batch(objective, rollouts)
    weight = torch.zeros(rollouts.mask.shape)
    for update, is_audited in [(3, True), (2, False)]:
        unscored = Auditor(objective, 4).audit_only_weights([batch], update, weight) != 0
        assert bool(unscored.any()) == is_audited
    left_out = (batch.credit.full.weight != 0) & (batch.credit.weight == 0)
    unscored = Auditor(objective, 4).audit_only_weights([batch], 3, weight)
    assert torch.equal(unscored[batch.rows] != 0, left_out)


def test_uniform_groups_are_left_out_at_no_cost_and_without_any_change():
    """Their advantages are 0: recorded as exactly 1, and so it is when computed."""
    objective = rloo()
    policy, rollouts, trajectory = sampled_round(uniform_group=3)
    batch = one_batch(objective, rollouts)
    assert (batch.credit.weight == 0)[rollouts.mask[batch.rows]].any()
    metrics, cost = audit_batch(batch, rollouts, trajectory, policy, objective)
    assert (metrics.audit_cosine, metrics.audit_norm_ratio, cost) == (1.0, 1.0, Cost())
    trajectory = trajectory.select(batch.rows, rollouts.mask.shape[1])
    used, full = (
        flat_gradient(policy, trajectory, batch.rollouts, objective, each)
        for each in (batch.credit, batch.credit.full)
    )
    torch.testing.assert_close(used, full, rtol=1e-5, atol=1e-6)


def test_a_penalty_on_what_was_left_out_is_computed():
    """U24: uniform groups have no advantage, but they have a divergence."""
    objective = chain(rloo(), penalize_kl(20.0, "k2"))
    policy, rollouts, trajectory = sampled_round(uniform_group=3)
    batch = one_batch(objective, rollouts)
    metrics, cost = audit_batch(batch, rollouts, trajectory, policy, objective)
    assert cost.flops > 0
    assert metrics.audit_cosine < 0.999


@pytest.mark.parametrize(
    "selection",
    [keep_first_step(), keep_random_rows(0.999999, weigh=True)],
    ids=["steps", "weight"],
)
def test_a_selection_of_steps_or_one_that_weighs_is_computed(selection: Objective):
    objective = chain(rloo(), selection)
    policy, rollouts, trajectory = sampled_round()
    batch = one_batch(objective, rollouts)
    _, cost = audit_batch(batch, rollouts, trajectory, policy, objective)
    assert cost.flops > 0


def test_a_batch_of_which_nothing_is_kept_has_cosine_0():
    objective = chain(rloo(), keep_random_rows(0.0))
    policy, rollouts, trajectory = sampled_round()
    batch = one_batch(objective, rollouts)
    metrics, _ = audit_batch(batch, rollouts, trajectory, policy, objective)
    assert (metrics.audit_cosine, metrics.audit_norm_ratio) == (0.0, 0.0)


def test_an_unbiased_selection_keeps_the_length_along_the_full_gradient_on_average():
    """E[cosine * norm_ratio] = 1 for inverse-inclusion weights; without them it is `fraction`."""
    fraction, draws = 0.5, 1000
    objective = rloo()
    policy, rollouts, trajectory = sampled_round()
    credit = credit_of(objective, rollouts)
    of_row = torch.stack(
        [
            flat_gradient(policy, trajectory, rollouts, objective, credit.keep(only))
            for only in torch.eye(len(rollouts.group)).bool()[:, :, None].expand(-1, -1, 6)
        ]
    )
    for weigh, expected in [(True, 1.0), (False, fraction)]:
        link = keep_random_rows(fraction, weigh=weigh)
        values = []
        for seed in range(draws):
            kept, _ = link.credit(credit, rollouts, {}, seeded(seed))
            share = (kept.weight.sum(dim=1) / credit.weight.sum(dim=1)).double()
            audit = compare_gradients([share @ of_row], [of_row.sum(dim=0)])
            values.append(audit.cosine * audit.norm_ratio)
        found = torch.tensor(values)
        assert abs(float(found.mean()) - expected) < 4 * float(found.std()) / draws**0.5


def test_an_audited_round_resumes_to_the_same_bits():
    class Interrupted(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done == 1:
            raise Interrupted

    objective = chain(rloo(), keep_random_rows(0.5), penalize_kl(0.1, "k2"))
    whole, expected = train(objective, updates_per_audit=1, name="whole")
    with pytest.raises(Interrupted):
        train(objective, updates_per_audit=1, name="parts", progress=stop)
    resumed, found = train(objective, updates_per_audit=1, name="parts")
    for first, second in zip(weights_of(whole), weights_of(resumed), strict=True):
        assert torch.equal(first, second)
    assert list(map(asdict, found.metrics)) == list(map(asdict, expected.metrics))
    assert (found.audit_cost, resumed.cost) == (expected.audit_cost, whole.cost)
    assert found.audit_cost.flops > 0


def test_scores_of_audited_steps_are_those_of_the_policy():
    """No step that an audit needs is left NaN, which would silently count as 0."""
    objective = chain(rloo(), keep_random_rows(0.5))
    _, trained = train(objective, updates_per_audit=1)
    policy, rollouts, trajectory = sampled_round()
    for batch in trained.batches:
        full = torch.zeros(rollouts.mask.shape)
        full[batch.rows] = batch.credit.full.weight
        scored = compute_log_probs(policy, trajectory, full, 64).logp
        assert not scored[full != 0].isnan().any()
    assert all(0 < each.audit_cosine < 1 for each in trained.metrics)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_without_advantage_only_a_penalty_has_a_gradient(name: str):
    chains = ("flow_grpo", "flash_grpo", "awm", "diffusion_nft")
    dimensions = {each: {"dimensions": 8} for each in chains}
    chunks = {"chunk_grpo": {"tokens": 8}, "pcm": {"tokens": 8, "budget": 2}}
    needed = {"dr_grpo": {"horizon": 8}, **dimensions, **chunks}
    objective = ALGORITHMS[name](**needed.get(name, {}))
    penalized = any(link.settings.get("beta") for link in objective.links)
    assert needs_advantage(objective) is not penalized
    assert not needs_advantage(chain(objective, penalize_kl(1e-6, "k3")))


@given(rollouts=ragged_rollouts(binary=True))
@settings(max_examples=10, deadline=None)
def test_the_full_credit_is_that_of_the_chain_without_its_selections(rollouts: Rollouts):
    """Wherever they stand, twice or once, random or not."""
    parts = [
        leave_one_out(),
        scale_by_group_std(),
        average_over_prompts(),
        clip_surrogate(0.2, 0.2),
    ]
    whole = credit_of(chain(*parts), rollouts)
    assert whole.full is None
    for place in range(len(parts) + 1):
        chained = [*parts[:place], drop_uniform_groups(), *parts[place:], keep_random_rows(0.5)]
        full = credit_of(chain(*chained), rollouts).full
        assert torch.equal(full.weight, whole.weight)
        assert torch.equal(full.advantage, whole.advantage)
        assert full.full is None


def test_a_selection_draws_the_same_numbers_after_another_selection():
    """Following the full credit takes nothing from the generator."""
    rollouts = sampled_round()[1]
    late = chain(center_by_group_mean(), average_over_prompts(), keep_random_rows(0.5))
    after_another = chain(
        center_by_group_mean(), drop_uniform_groups(), average_over_prompts(), keep_random_rows(0.5)
    )
    assert torch.equal(credit_of(late, rollouts).weight, credit_of(after_another, rollouts).weight)
