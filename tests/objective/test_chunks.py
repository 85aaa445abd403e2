"""Probabilistic chunk masking: METHODS' fixtures, by hand, and by counting draws."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor

from grpo.objective.advantage import center_by_moving_average
from grpo.objective.algorithms import chunk_grpo, pcm, rloo
from grpo.objective.base import (
    Objective,
    assign_credit,
    chain,
    continued_state,
    loss_terms,
    scalar_loss,
)
from grpo.objective.chunks import (
    NUM_PHASES,
    draw_systematically,
    draw_without_replacement,
    inclusion_probabilities,
    keep_highest_phase,
    learn_contrast,
    neyman_allocation,
    phase_contrast,
    sample_chunks_by_phase,
    sample_steps_by_advantage,
    sample_steps_uniformly,
)
from grpo.types import ActionChunks, Credit, Rollouts

DRAWS = 20_000
COUNTS = (30, 6, 16, 4, 8)
WEIGHTS = (0.35, 1.0, 0.6, 0.45, 0.1)
BUDGET = 12
PLACKETT_LUCE = (0.154, 0.382, 0.248, 0.190, 0.046)  # METHODS part 1
PROPORTIONAL = (0.146, 0.418, 0.251, 0.188, 0.042)  # B w / sum of w
HIGHEST = "keep_highest_phase"
NAME = "sample_chunks_by_phase"


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def fixture_rows(rows: int) -> tuple[Tensor, Tensor]:
    """Returns the fixture's phases and weights, once per row."""
    phase = torch.repeat_interleave(torch.arange(5), torch.tensor(COUNTS))
    return phase, torch.tensor(WEIGHTS)[phase].expand(rows, -1)


def by_phase(values: Tensor) -> Tensor:
    """Returns the mean over a phase's chunks."""
    phase, _ = fixture_rows(1)
    total = torch.zeros(5, dtype=torch.float64).index_add(0, phase, values.double())
    return total / torch.tensor(COUNTS)


def acted(
    outcome: list[float],
    *,
    steps: int = 6,
    shift: float = 1.0,
    seed: int = 0,
    group: list[int] | None = None,
) -> Rollouts:
    """Returns rollouts of six chunks or fewer in two phases; successes differ in the second.

    A chunk's action has two numbers, noise of 0.1; in phase 1 a success's are moved by `shift`.
    """
    generator = seeded(seed)
    count = len(outcome)
    mask = torch.ones(count, steps, dtype=torch.bool)
    mask[0, -1] = False
    phase = (torch.arange(steps) >= steps // 2).long().expand(count, -1)
    action = 0.1 * torch.randn(count, steps, 2, generator=generator)
    moved = torch.tensor(outcome)[:, None] * (phase == 1)
    action[..., 0] += shift * moved
    return Rollouts(
        group=torch.tensor(group or [0] * count),
        reward=torch.tensor(outcome),
        outcome=torch.tensor(outcome),
        mask=mask,
        behavior_logp=torch.full(mask.shape, -1.0) * mask,
        chunks=ActionChunks(
            phase=torch.where(mask, phase, -1),
            action=action,
            is_executed=mask[:, :, None].expand(action.shape),
        ),
    )


def gradient(objective: Objective, rollouts: Rollouts, seed: int = 0) -> Tensor:
    """Returns the gradient by log-prob after a step away from the policy that sampled."""
    credit, _ = assign_credit(objective, rollouts, objective.init(), seeded(seed))
    logp = (rollouts.behavior_logp + 0.01).requires_grad_()
    terms = loss_terms(
        objective,
        logp=logp,
        proximal_logp=rollouts.behavior_logp,
        reference_logp=None,
        credit=credit,
    )
    (found,) = torch.autograd.grad(scalar_loss(terms, credit), logp)
    return found


MIXED = [1.0, 0.0, 1.0, 0.0, 0.0, 1.0]


def test_a_budget_for_all_chunks_is_plain_grpo_to_the_bit():
    rollouts = acted(MIXED)
    plain = gradient(chunk_grpo(tokens=32), rollouts)
    for weights in ("none", "ht"):
        whole = pcm(tokens=32, budget=6, weights=weights, floor=1.0)
        assert torch.equal(gradient(whole, rollouts), plain)
    for sample in (sample_steps_uniformly, sample_steps_by_advantage):
        assert torch.equal(gradient(chain(chunk_grpo(tokens=32), sample(6)), rollouts), plain)
    assert plain.abs().sum() > 0


def test_without_weights_a_rollout_is_averaged_over_what_was_kept():
    """Successes are shorter than failures: each must weigh what it did, whatever is kept."""
    rollouts = acted(MIXED)
    plain, _ = assign_credit(chunk_grpo(tokens=32), rollouts, {}, seeded())
    objective = pcm(tokens=32, budget=2)
    credit, _ = assign_credit(objective, rollouts, objective.init(), seeded())
    torch.testing.assert_close(credit.weight.sum(dim=1), plain.weight.sum(dim=1))
    kept = credit.weight[credit.weight != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / 12))  # 6 rollouts, 2 chunks each


@pytest.mark.parametrize("weights", ["none", "ht"])
@pytest.mark.parametrize("budget", [1, 2, 5, 9])
def test_every_rollout_keeps_its_budget(weights: str, budget: int):
    rollouts = acted(MIXED)
    objective = pcm(tokens=32, budget=budget, weights=weights)
    for seed in range(20):
        credit, _ = assign_credit(objective, rollouts, objective.init(), seeded(seed))
        kept = credit.weight != 0
        assert not (kept & ~rollouts.mask).any()
        length = rollouts.mask.sum(dim=1)
        assert torch.equal(kept.sum(dim=1), length.clamp(max=budget))
        assert credit.full is not None
        assert torch.equal(credit.full.weight != 0, rollouts.mask)


def test_the_unit_of_chances_changes_no_draw():
    _, weight = fixture_rows(50)
    candidate = torch.ones(weight.shape, dtype=torch.bool)
    drawn = [
        draw_without_replacement(weight * unit, candidate, BUDGET, seeded()) for unit in (1, 8)
    ]
    assert torch.equal(*drawn)
    chances = [inclusion_probabilities(weight * unit, candidate, BUDGET) for unit in (1, 8)]
    torch.testing.assert_close(*chances)


def test_neyman_allocation_of_the_fixture():
    counts = torch.tensor(COUNTS)
    deviations = torch.tensor([0.2, 1.5, 0.8, 0.6, 0.1], dtype=torch.float64)
    best = neyman_allocation(float(BUDGET), counts, deviations)
    assert best.tolist() == pytest.approx([2.32, 3.48, 4.95, 0.93, 0.31], abs=0.005)

    def variance(division: Tensor) -> float:
        return float((counts**2 * deviations**2 / division).sum())

    assert variance(best) == pytest.approx(80.083, abs=5e-4)
    assert variance(torch.full((5,), BUDGET / 5)) == pytest.approx(119.683, abs=5e-4)
    assert variance(BUDGET * counts / counts.sum()) == pytest.approx(141.12, abs=5e-3)
    # The closed form: (sum of N sqrt(V))^2 / B.
    assert variance(best) == pytest.approx(float((counts * deviations).sum() ** 2 / BUDGET))


def test_chances_without_replacement_are_those_of_the_fixture_and_not_proportional():
    _, weight = fixture_rows(DRAWS)
    candidate = torch.ones(weight.shape, dtype=torch.bool)
    kept = draw_without_replacement(weight, candidate, BUDGET, seeded())
    found = by_phase(kept.double().mean(dim=0))
    error = (found * (1 - found) / DRAWS / torch.tensor(COUNTS)).sqrt()
    # The fixture is printed to three digits.
    assert ((found - torch.tensor(PLACKETT_LUCE)).abs() < 3 * error + 5e-4).all()
    assert ((found - torch.tensor(PROPORTIONAL)).abs() > 3 * error + 5e-4).any()


def test_systematic_draws_have_exactly_the_stated_chances():
    _, weight = fixture_rows(DRAWS)
    candidate = torch.ones(weight.shape, dtype=torch.bool)
    inclusion = inclusion_probabilities(weight, candidate, BUDGET)
    assert by_phase(inclusion[0]).tolist() == pytest.approx(PROPORTIONAL, abs=5e-4)
    kept = draw_systematically(inclusion, seeded())
    assert (kept.sum(dim=1) == BUDGET).all()
    found = kept.double().mean(dim=0)
    error = (inclusion[0] * (1 - inclusion[0]) / DRAWS).sqrt()
    assert ((found - inclusion[0]).abs() < 4 * error).all()


def test_chances_that_would_pass_one_are_certain_and_the_rest_share_what_is_left():
    weight = torch.tensor([[8.0, 1.0, 1.0, 0.0, 5.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    candidate = torch.tensor([[True, True, True, True, False], [True, True, False, False, False]])
    inclusion = inclusion_probabilities(weight, candidate, 2)
    # 2 * 8 / 10 passes 1: it is certain, and one draw is left for two of equal weight.
    assert inclusion.tolist() == [[1.0, 0.5, 0.5, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0, 0.0]]


def test_weighted_gradients_average_to_the_full_one_and_unweighted_ones_do_not():
    """METHODS' G7: 3 standard errors of 300 draws, whatever the chances depend on.

    Each draw is a group of its own; all have the same rollouts.
    """
    copies = 300
    group = torch.arange(copies).repeat_interleave(len(MIXED)).tolist()
    many = acted(MIXED * copies, group=group)
    first = acted(MIXED)
    assert first.chunks is not None
    chunks = ActionChunks(*(torch.cat([each] * copies) for each in first.chunks))
    many = replace(many, mask=torch.cat([first.mask] * copies), chunks=chunks)
    many = replace(many, behavior_logp=-1.0 * many.mask)
    full = gradient(chunk_grpo(tokens=32), many)
    # Along a direction that rises with the step, of successes alone: failures would cancel them.
    along = torch.linspace(1, 2, 6, dtype=torch.float64) * many.outcome[:, None]
    target = (full * along).sum() / copies
    means, errors = {}, {}
    for weights in ("none", "ht"):
        drawn = gradient(pcm(tokens=32, budget=2, weights=weights), many).double() * along
        by_draw = drawn.view(copies, -1).sum(dim=1)
        means[weights], errors[weights] = by_draw.mean(), by_draw.std() / copies**0.5
    assert (means["ht"] - target).abs() < 3 * errors["ht"]
    assert (means["none"] - target).abs() > 6 * errors["none"]


RARE = [1.0, 0.0, 0.0, 0.0]  # z-scores sqrt(3) and -1 / sqrt(3)
BY_ADVANTAGE = chain(chunk_grpo(tokens=32), sample_steps_by_advantage(1))


def test_a_rare_success_keeps_more_steps_than_the_failures_beside_it():
    """Four steps for four rollouts, in the ratio of advantages 3 : 1 : 1 : 1."""
    rollouts = acted([*RARE, 1.0, 1.0], group=[0] * 4 + [1] * 2)
    counts = []
    for seed in range(100):
        credit, _ = assign_credit(BY_ADVANTAGE, rollouts, {}, seeded(seed))
        kept = credit.weight != 0
        assert not (kept & ~rollouts.mask).any()
        assert int(kept.sum()) == 4
        counts.append(kept.sum(dim=1))
        # Every step that is kept is worth the same: the advantages are in the chances.
        worth = (credit.weight * credit.advantage).abs()[kept]
        torch.testing.assert_close(worth, worth[:1].expand(4))
    found = torch.stack(counts).double()
    assert (found[:, 0] == 2).all()
    assert (found[:, 4:] == 0).all()
    mean, error = found[:, 1:4].mean(dim=0), found[:, 1:4].std(dim=0) / 10
    assert ((mean - 2 / 3).abs() < 4 * error).all()


def test_gradients_of_steps_kept_by_advantage_average_to_the_full_one():
    """3 standard errors of 400 draws, along 12 directions of any sign."""
    rollouts = acted([*RARE, 0.0, 1.0, 1.0, 0.0], group=[0] * 4 + [1] * 4)
    full = gradient(chunk_grpo(tokens=32), rollouts).double()
    drawn = torch.stack([gradient(BY_ADVANTAGE, rollouts, seed) for seed in range(400)]).double()
    along = torch.randn(12, *full.shape, generator=seeded(1), dtype=torch.float64)
    errors = torch.einsum("drs,krs->dk", drawn - full, along)
    assert (errors.mean(dim=0).abs() < 3 * errors.std(dim=0) / 400**0.5).all()


def test_chances_by_advantage_have_the_least_variance_of_their_budget():
    """Of independent gradients of length 1: sum of (w A)^2 / chance, in closed form."""
    credit, _ = assign_credit(chunk_grpo(tokens=32), acted(RARE), {}, seeded())
    size = (credit.weight * credit.advantage).abs().double()
    line = size.flatten()[None]
    budget = len(RARE)
    best = inclusion_probabilities(line, line != 0, budget)

    def variance(chance: Tensor) -> float:
        return float((line[line != 0] ** 2 / chance[line != 0]).sum())

    assert variance(best) == pytest.approx(float(size.sum() ** 2) / budget)
    alike = inclusion_probabilities(torch.ones_like(size), size != 0, 1).flatten()[None]
    # The square of the mean over the mean of squares of advantages: 4 p (1 - p) at p = 1/4.
    assert variance(best) / variance(alike) == pytest.approx(0.75)


def test_contrast_is_where_success_and_failure_act_differently():
    contrast = phase_contrast(acted([1.0, 0.0] * 20, shift=0.7))
    assert float(contrast[1]) == pytest.approx(0.7, abs=0.05)
    assert float(contrast[0]) < 0.05
    assert contrast[2:].isnan().all()


def test_contrast_is_measured_within_groups():
    """Two tasks whose actions differ, one solved and one not: no contrast in either."""
    group = [0] * 4 + [1] * 4
    rollouts = acted([1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0], shift=0.0, group=group)
    chunks = rollouts.chunks
    assert chunks is not None
    action = chunks.action + 5.0 * (rollouts.group == 1)[:, None, None]
    moved = replace(rollouts, chunks=chunks._replace(action=action))
    torch.testing.assert_close(
        phase_contrast(moved), phase_contrast(rollouts), equal_nan=True, atol=1e-5, rtol=1e-5
    )


def test_contrast_of_equal_means_is_zero_and_chances_fall_to_the_floor():
    rollouts = acted([1.0, 0.0] * 4, shift=0.0)
    chunks = rollouts.chunks
    assert chunks is not None
    still = replace(rollouts, chunks=chunks._replace(action=torch.ones_like(chunks.action)))
    objective = sample_chunks_by_phase(3, floor=0.2)
    _, state = assign_credit(objective, still, objective.init(), seeded())
    assert [state[NAME][f"keep_{phase}"] for phase in range(2)] == [0.2, 0.2]


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_those_who_act_alike_have_no_contrast_wherever_they_end(data: st.DataObject):
    """Every rollout follows one schedule and ends anywhere, in the middle of a chunk too."""
    seed = data.draw(st.integers(0, 2**32 - 1))
    generator = seeded(seed)
    solved = torch.randint(0, 2, (12,), generator=generator).float()
    rollouts = acted(solved.tolist(), group=[0] * 6 + [1] * 6)
    end = torch.randint(1, 13, (12, 1), generator=generator)  # of 6 chunks of 2 numbers
    is_executed = (torch.arange(12) < end).view(12, 6, 2)
    mask = is_executed.any(dim=2)
    phase = torch.randint(0, NUM_PHASES, (6,), generator=generator).expand(12, -1)
    action = torch.randn(6, 2, generator=generator).expand(12, -1, -1)
    action = torch.where(is_executed, action, data.draw(st.sampled_from([0.0, torch.nan])))
    chunks = ActionChunks(torch.where(mask, phase, -1), action, is_executed)
    contrast = phase_contrast(replace(rollouts, mask=mask, chunks=chunks))
    assert (contrast.nan_to_num() < 1e-6).all()


@given(st.floats(width=32), st.integers(0, 9))
@settings(max_examples=20, deadline=None)
def test_actions_that_were_not_carried_out_change_nothing(value: float, seed: int):
    rollouts = acted(MIXED)
    chunks = rollouts.chunks
    assert chunks is not None
    chance = torch.rand(chunks.action.shape, generator=seeded(seed))
    is_executed = chunks.is_executed & (chance < 0.9)
    other = torch.where(is_executed, chunks.action, value)
    objective = pcm(tokens=32, budget=2)
    first, second = (
        assign_credit(
            objective,
            replace(rollouts, chunks=ActionChunks(chunks.phase, action, is_executed)),
            objective.init(),
            seeded(),
        )
        for action in (chunks.action, other)
    )
    assert first[1] == second[1]
    assert torch.equal(first[0].weight, second[0].weight)


def test_contrast_of_rollouts_that_each_go_their_own_way_is_about_zero():
    """Steps of a rollout share its deviation: they are no samples of their own."""
    group = torch.arange(200).repeat_interleave(6)
    rollouts = acted(MIXED * 200, shift=0.0, group=group.tolist())
    chunks = rollouts.chunks
    assert chunks is not None
    deviation = torch.randn(len(group), 1, 2, generator=seeded())
    moved = replace(rollouts, chunks=chunks._replace(action=chunks.action + deviation))
    # |D|^2 is 4/3 by chance, with a deviation of 4/3; 0.4 is four standard errors of 200 groups.
    assert (phase_contrast(moved)[:2] ** 2 < 0.4).all()


def test_contrast_of_chance_alone_is_about_zero():
    """Without what is taken off, |difference| of means of few rollouts would look like contrast."""
    squares = [phase_contrast(acted([1.0, 0.0, 1.0, 0.0], shift=0.0, seed=s)) for s in range(400)]
    zero = sum(bool(each[0] == 0) for each in squares) / len(squares)
    assert 0.4 < zero < 0.75


@pytest.mark.parametrize("outcome", [0.0, 1.0])
def test_a_batch_of_one_outcome_leaves_the_chances_unchanged(outcome: float):
    objective = sample_chunks_by_phase(3, refresh=1)
    _, state = assign_credit(objective, acted(MIXED), objective.init(), seeded())
    _, after = assign_credit(objective, acted([outcome] * 6), state, seeded())
    kept = {name: value for name, value in after[NAME].items() if name != "batches"}
    assert kept == {name: value for name, value in state[NAME].items() if name != "batches"}
    assert kept["keep_1"] == 1.0
    assert kept["keep_0"] < 0.2


def test_chances_stand_still_between_refreshes_and_then_average_what_was_seen():
    nan = float("nan")
    state = sample_chunks_by_phase(3, refresh=3).init()[NAME]
    seen = []
    for contrast in ([4, 2, nan, nan, nan], [1, 3, nan, nan, nan], [1, 1, 4, nan, nan]):
        values = torch.tensor(contrast, dtype=torch.float64)
        state = learn_contrast(state, values, floor=0.1, refresh=3)
        seen.append([state[f"keep_{phase}"] for phase in range(NUM_PHASES)])
    # The first batch sets them: 4/4, 2/4, and the floor for what was never measured.
    assert seen[0] == seen[1] == [1.0, 0.5, 0.1, 0.1, 0.1]
    # Then means since: (1 + 1) / 2, (3 + 1) / 2 and 4, over 4.
    assert seen[2] == [0.25, 0.5, 1.0, 0.1, 0.1]


def test_the_highest_phase_alone_is_kept():
    objective = chain(chunk_grpo(tokens=32), keep_highest_phase(2))
    rollouts = acted(MIXED)
    credit, _ = assign_credit(objective, rollouts, objective.init(), seeded())
    kept = credit.weight != 0
    assert rollouts.chunks is not None
    assert (rollouts.chunks.phase[kept] == 1).all()
    assert (kept.sum(dim=1) == 2).all()


def test_all_phases_are_kept_until_a_contrast_is_measured():
    """A contrast needs two successes and two failures of a group; pairs never have them."""
    objective = chain(chunk_grpo(tokens=32), keep_highest_phase(100))
    rollouts = acted([1.0, 0.0] * 3, group=[0, 0, 1, 1, 2, 2])
    credit, _ = assign_credit(objective, rollouts, objective.init(), seeded())
    assert torch.equal(credit.weight != 0, rollouts.mask)


def test_the_highest_phase_is_that_of_the_largest_contrast_not_of_the_largest_chance():
    """The chance of a phase is relative to the contrasts of the batch that measured it."""
    objective = keep_highest_phase(100)
    state = objective.init()
    nan = float("nan")
    for contrast in ([5, 1, nan, nan, nan], [nan, 0.1, nan, nan, nan]):
        values = torch.tensor(contrast, dtype=torch.float64)
        own = learn_contrast(state[HIGHEST], values, floor=0.0, refresh=1)
        state = {HIGHEST: own}
    assert own["keep_0"] == own["keep_1"] == 1.0
    rollouts = acted([1.0, 0.0] * 3, group=[0, 0, 1, 1, 2, 2])  # without a contrast
    assert rollouts.chunks is not None
    credit, _ = assign_credit(chain(chunk_grpo(tokens=32), objective), rollouts, state, seeded())
    assert torch.equal(credit.weight != 0, rollouts.mask & (rollouts.chunks.phase == 0))


def test_chunks_are_chosen_among_what_other_links_left():
    """A uniform group weighs nothing, for any draw; its chunks take no part."""
    rollouts = acted([*MIXED, 1.0, 1.0], group=[0] * 6 + [1, 1])
    for weights in ("none", "ht"):
        objective = pcm(tokens=32, budget=2, weights=weights)
        credit, _ = assign_credit(objective, rollouts, objective.init(), seeded())
        assert (credit.weight[6:] == 0).all()
        assert ((credit.weight[:6] != 0).sum(dim=1) == 2).all()


def test_a_step_with_a_chance_of_almost_nothing_weighs_nothing():
    """Its chance's inverse is more than float32 holds; 0 times that is no number."""
    rollouts = acted([1.0, 0.0, 0.0, 0.0, 1e-40, 0.0], group=[0, 0, 0, 1, 1, 1])
    objective = chain(loo := rloo(), sample_steps_by_advantage(1))
    plain, _ = assign_credit(loo, rollouts, {}, seeded())
    assert (plain.advantage[4] != 0).any()
    credit, _ = assign_credit(objective, rollouts, {}, seeded())
    assert credit.weight.isfinite().all()
    assert (credit.weight[3:] == 0).all()


def test_wrong_settings_and_steps_are_refused_by_name():
    with pytest.raises(ValueError, match=r"budget >= 1 and weights in .*, got 0"):
        sample_chunks_by_phase(0)
    with pytest.raises(ValueError, match=r"sample_steps_uniformly needs budget >= 1"):
        sample_steps_uniformly(0)
    with pytest.raises(ValueError, match=r"sample_steps_by_advantage needs budget >= 1, got 0"):
        sample_steps_by_advantage(0)
    with pytest.raises(ValueError, match=r"weights in .*, got 3 and 'inverse'"):
        sample_chunks_by_phase(3, weights="inverse")
    with pytest.raises(ValueError, match=r"floor in \[0, 1\] and refresh >= 1 batch, got 2"):
        sample_chunks_by_phase(3, floor=2.0)
    with pytest.raises(ValueError, match="keep_highest_phase needs refresh"):
        keep_highest_phase(3, refresh=0)
    plain = replace(acted(MIXED), chunks=None)
    objective = pcm(tokens=32, budget=2)
    with pytest.raises(ValueError, match="needs steps that are chunks of actions"):
        assign_credit(objective, plain, objective.init(), seeded())


def test_full_credit_beside_the_selection_follows_later_links():
    """An audit compares with all chunks, each with the weight that it would have had."""
    rollouts = acted(MIXED)
    objective = pcm(tokens=32, budget=2, weights="ht")
    credit, _ = assign_credit(objective, rollouts, objective.init(), seeded())
    plain, _ = assign_credit(chunk_grpo(tokens=32), rollouts, {}, seeded())
    full = credit.full
    assert isinstance(full, Credit)
    assert torch.equal(full.weight, plain.weight)


def test_a_round_between_two_of_another_arm_keeps_their_state():
    before, after = chain(pcm(tokens=1, budget=2)), chain(center_by_moving_average(), rloo())
    assert continued_state(before, {}) == before.init()
    learned = dict.fromkeys(before.init(), "learned")
    between = continued_state(after, learned)
    assert {name: between[name] for name in after.init()} == after.init()
    assert continued_state(before, between) == {**after.init(), **learned}
    both = chain(pcm(tokens=1, budget=2), center_by_moving_average())
    kept = dict.fromkeys(before.init(), "kept")
    assert continued_state(both, kept) == {**both.init(), **kept}
