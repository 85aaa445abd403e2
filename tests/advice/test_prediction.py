"""Predictions against brute force: rates from the posterior, outcomes from the rates, counted."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from profiles import synthetic_facts

from grpo.advice.facts import Facts
from grpo.advice.prediction import Amounts, Treatment, packed_flops, predict, sampling_scale
from grpo.allocation.selection import (
    Selection,
    compose,
    resample_uniform_groups,
    reuse_profile_rollouts,
    revise_first_answers,
    skip_uniform_prompts,
    visit_prompts,
)

TRIALS = 60
PLAIN = Treatment(
    drops_uniform=True,
    keep=None,
    scores_proximal=True,
    scores_reference=False,
    scores_reference_on_all=False,
    selection=compose(),
    iterations=1,
    updates_per_iteration=4,
    passes=1,
    rollouts_per_batch=64,
    tokens_per_microbatch=512,
)
COUNTS = ("groups", "uniform_groups", "rollouts", "sampled_steps", "trained_steps", "signal")


def test_rollouts_that_were_not_judged_cost_what_the_others_do():
    facts = synthetic_facts()
    fewer = replace(facts, profile=facts.profile.assign(rollouts=facts.profile["rollouts"] - 2))
    assert sampling_scale(fewer) == sampling_scale(facts)


def plan_of(facts: Facts) -> pd.DataFrame:
    """Returns groups of 2, 4 and 8 for all prompts but the first ten."""
    ids = facts.profile["prompt_id"][10:]
    return pd.DataFrame({"prompt_id": ids, "rollouts": np.resize([2, 4, 8], len(ids))})


def simulate(
    plan: pd.DataFrame, treatment: Treatment, facts: Facts, chooser: np.random.Generator
) -> dict[str, float]:
    """Returns the counts of one round that is drawn group by group."""
    rows = facts.rows_of(plan["prompt_id"])
    selection = treatment.selection
    order = chooser.permutation(len(plan))
    if selection.budget and selection.keeps_uniform:
        order = order[: selection.budget.prompts]
    total = dict.fromkeys([*COUNTS, "update_flops"], 0.0)
    groups = []
    for batch in batches_of(order, selection):
        if selection.revision:
            count = round(selection.revision.share * len(batch))
            for index in chooser.choice(batch, count, replace=False):
                total["sampled_steps"] += chooser.choice(facts.steps_of(int(rows[index])))
        for index in batch:
            row, size = rows[index], int(plan["rollouts"].iloc[index])
            successes = draw_successes(facts, row, size, selection, chooser)
            steps = np.resize(chooser.permutation(facts.steps_of(int(row))), size)
            total["rollouts"] += size
            if not selection.reuses_profile:
                total["sampled_steps"] += steps.sum()
            groups.append((row, size, successes, steps))
        mixed = [each for each in groups if 0 < each[2] < each[1]]
        if not selection.keeps_uniform and len(mixed) >= selection.budget.prompts:
            break
    if not selection.keeps_uniform:
        groups = mixed[: selection.budget.prompts]
    trained = []
    for row, size, successes, steps in groups:
        uniform = successes in (0, size)
        total["groups"] += 1
        total["uniform_groups"] += uniform
        rate = successes / size
        total["signal"] += size * rate * (1 - rate)
        if not (uniform and treatment.drops_uniform):
            kept = steps[: treatment.keep]
            total["trained_steps"] += kept.sum()
            tokens = facts.profile["prompt_tokens"].iloc[row]
            trained.append(np.array([[row, tokens, each] for each in kept]))
    total["update_flops"] = update_flops(trained, treatment, facts, chooser)
    return total


def batches_of(order: np.ndarray, selection: Selection) -> list[np.ndarray]:
    if selection.keeps_uniform:
        return [order]
    size = selection.budget.prompts_per_batch
    return [order[i * size : (i + 1) * size] for i in range(selection.budget.max_batches)]


def draw_successes(
    facts: Facts, row: int, size: int, selection: Selection, chooser: np.random.Generator
) -> int:
    if selection.reuses_profile:
        solved = int(facts.profile["successes"].iloc[row])
        return int(chooser.hypergeometric(solved, 8 - solved, size))
    rate = chooser.beta(facts.posterior.alpha[row], facts.posterior.beta[row])
    return int(chooser.binomial(size, rate))


def update_flops(
    trained: list[np.ndarray], treatment: Treatment, facts: Facts, chooser: np.random.Generator
) -> float:
    """Returns the FLOPs of log-probs of all parts and of training each part, packed."""
    if not trained:
        return 0.0
    tokens = treatment.tokens_per_microbatch
    part = chooser.integers(treatment.updates_per_iteration, size=len(trained))
    flops = packed_flops(facts.cost_model, np.concatenate(trained), tokens, is_training=False)
    for each in range(treatment.updates_per_iteration):
        own = [rows for rows, number in zip(trained, part) if number == each]
        if own:
            flops += packed_flops(facts.cost_model, np.concatenate(own), tokens, is_training=True)
    return flops


@pytest.mark.parametrize(
    ("treatment", "error"),
    [
        (PLAIN, 0.0),
        (replace(PLAIN, drops_uniform=False), 0.0),
        (replace(PLAIN, keep=2), 0.0),
        (replace(PLAIN, selection=skip_uniform_prompts(60)), 0.0),
        (replace(PLAIN, selection=reuse_profile_rollouts()), 0.0),
        (replace(PLAIN, selection=revise_first_answers("math", share=0.25)), 0.0),
        # The number of batches is that of the expected share of mixed groups.
        (replace(PLAIN, selection=resample_uniform_groups(40, 24)), 0.08),
    ],
    ids=["plain", "no-drop", "keep", "skip", "reuse", "revise", "resample"],
)
def test_expected_counts_are_the_mean_of_simulated_rounds(treatment: Treatment, error: float):
    """Within 4 standard errors, plus `error`."""
    facts = synthetic_facts(120)
    plan, chooser = plan_of(facts), np.random.default_rng(1)
    predicted = predict(plan, treatment, facts, starts_from_base=True)
    trials = pd.DataFrame([simulate(plan, treatment, facts, chooser) for _ in range(TRIALS)])
    for name in COUNTS:
        expected = getattr(predicted, name)
        allowed = 4 * trials[name].std() / TRIALS**0.5 + error * expected
        if name == "signal" and treatment.selection.reuses_profile:
            continue  # the posterior's, of prompts rather than of these very rollouts
        assert abs(trials[name].mean() - expected) <= allowed + 1e-9, name
    assert predicted.update_flops == pytest.approx(trials["update_flops"].mean(), rel=0.1)


def test_reused_rollouts_cost_no_sampling_and_only_a_round_from_the_base_has_them():
    facts = synthetic_facts(60)
    plan, treatment = plan_of(facts), replace(PLAIN, selection=reuse_profile_rollouts())
    first = predict(plan, treatment, facts, starts_from_base=True)
    later = predict(plan, treatment, facts, starts_from_base=False)
    assert (first.sampled_steps, first.sampling_flops) == (0, 0)
    assert later == predict(plan, PLAIN, facts, starts_from_base=False)


def test_a_reference_policy_costs_passes_over_what_it_scores():
    facts = synthetic_facts(60)
    plan = plan_of(facts)

    def update(**changes: int) -> float:
        treatment = replace(PLAIN, drops_uniform=False, **changes)
        return predict(plan, treatment, facts, starts_from_base=False).update_flops

    alone = update(scores_proximal=False)
    scoring = update() - alone
    assert update(scores_reference=True) == pytest.approx(alone + 2 * scoring)
    assert update(passes=3) == pytest.approx(3 * alone + scoring)
    # Nothing is left out here, so what is sampled is what is trained on.
    assert update(scores_reference_on_all=True) == pytest.approx(alone + 2 * scoring)


def test_iterations_that_share_the_prompts_take_what_one_takes():
    facts = synthetic_facts(120)
    plan = plan_of(facts)

    def of(iterations: int, updates: int, *, scores_proximal: bool) -> Amounts:
        treatment = replace(
            PLAIN,
            iterations=iterations,
            updates_per_iteration=updates,
            scores_proximal=scores_proximal,
        )
        return predict(plan, treatment, facts, starts_from_base=True)

    whole = of(1, 12, scores_proximal=True)
    for iterations in (2, 3, 6):
        found = of(iterations, 12 // iterations, scores_proximal=True)
        for name in COUNTS:
            assert getattr(found, name) == pytest.approx(getattr(whole, name)), name
        # Smaller batches of the proximal policy's pass and of sampling pad otherwise.
        assert found.update_flops == pytest.approx(whole.update_flops, rel=0.2)
        assert found.sampling_flops == pytest.approx(whole.sampling_flops, rel=0.2)
    on_policy, stale = of(12, 1, scores_proximal=False), of(1, 12, scores_proximal=False)
    assert on_policy.update_flops == stale.update_flops < whole.update_flops


def test_every_iteration_spends_the_budget():
    facts = synthetic_facts(120)
    plan = plan_of(facts)
    for selection in (visit_prompts(20), skip_uniform_prompts(20), resample_uniform_groups(10, 12)):
        one = replace(PLAIN, selection=selection)
        several = replace(one, iterations=3)
        expected = predict(plan, one, facts, starts_from_base=True).scaled(3.0)
        found = predict(plan, several, facts, starts_from_base=True)
        for name, amount in vars(expected).items():
            assert getattr(found, name) == pytest.approx(amount), name


def test_only_the_first_iteration_reuses_the_profile():
    facts = synthetic_facts(60)
    plan = plan_of(facts)
    treatment = replace(PLAIN, iterations=3, selection=reuse_profile_rollouts())
    found = predict(plan, treatment, facts, starts_from_base=True)
    fresh = predict(plan, treatment, facts, starts_from_base=False)
    for name in ("sampled_steps", "sampling_flops"):
        assert getattr(found, name) == pytest.approx(2 / 3 * getattr(fresh, name))
    assert found.rollouts == pytest.approx(fresh.rollouts)


def test_amounts_add_up():
    facts = synthetic_facts(60)
    plan = plan_of(facts)
    one = predict(plan, PLAIN, facts, starts_from_base=False)
    assert Amounts.of([one, one]) == one.scaled(2.0)
    assert one.mixed_groups + one.uniform_groups == pytest.approx(len(plan))
