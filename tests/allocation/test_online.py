"""Online allocations: their posteriors, what they choose, and the state that they resume from."""

import json

import numpy as np
import pandas as pd
import pytest

from grpo.allocation.online import (
    FAILURES,
    SUCCESSES,
    add_profile,
    allocate_by_signal,
    counts_of,
    fit_to,
    knapsack_sizes,
    mean_steps,
    posterior_of,
    sample_prompts_near_rate,
    size_groups_by_knapsack,
)
from grpo.allocation.selection import VISITS, History, Selection, allocate, learn_round
from grpo.allocation.signal import Price, Rates
from grpo.errors import ParameterError
from grpo.runtime.artifacts.tables import ALLOCATION, PROMPT_WEIGHT, validate

PRICE = Price(
    rates=lambda ids, steps: Rates(0.1 * np.ones(len(ids)), steps, 2 * steps),
    longest=1.0,
    drops_uniform=True,
)


def pool(size: int) -> pd.DataFrame:
    ids = [f"p{each}" for each in range(size)]
    return pd.DataFrame({"prompt_id": ids, "family": "f", "rollouts": 4})


def drawn(
    selection: Selection, candidates: pd.DataFrame, history: History, seed: int
) -> pd.DataFrame:
    _, table = allocate(selection, candidates, history, price=PRICE, seed=seed)
    validate(table, ALLOCATION, "the allocation")
    return table.set_index("prompt_id").loc[candidates["prompt_id"]]


def simulate(
    selection: Selection,
    rates: np.ndarray,
    iterations: int,
    *,
    history: History | None = None,
    first: int = 0,
    families: str | list[str] = "f",
) -> History:
    """Returns the statistics after iterations of a policy that does not learn."""
    candidates, history = pool(len(rates)).assign(family=families), history or {}
    for index in range(first, first + iterations):
        chooser = np.random.default_rng(index)
        table = drawn(selection, candidates, history, index)
        rows = [
            (prompt, float(chooser.random() < rate), 1)
            for prompt, rate, size in zip(table.index, rates, table["rollouts"])
            for _ in range(size)
        ]
        outcomes = pd.DataFrame(rows, columns=["prompt_id", "outcome", "steps"])
        history = learn_round(selection, history, outcomes, [])
    return history


def test_counts_are_those_of_earlier_iterations_discounted():
    selection = allocate_by_signal(budget=10.0, discount=0.5)
    outcomes = pd.DataFrame(
        {"prompt_id": ["a", "a", "a", "b", "b"], "outcome": [1.0, 1, 0, 0, 0], "steps": 2}
    )
    once = learn_round(selection, {}, outcomes, [])
    assert once[SUCCESSES] == {"a": 2.0, "b": 0.0}
    assert once[FAILURES] == {"a": 1.0, "b": 2.0}
    twice = learn_round(selection, once, outcomes[outcomes["prompt_id"] == "a"], [])
    assert twice[SUCCESSES] == {"a": 3.0, "b": 0.0}
    assert twice[FAILURES] == {"a": 1.5, "b": 1.0}  # b is forgotten, too: the policy moved
    assert twice[VISITS] == {"a": 2, "b": 1}


def test_without_a_discount_the_posterior_of_a_still_policy_tends_to_the_rates():
    rates = np.array([0.1, 0.3, 0.5, 0.7, 0.9, 0.5])
    selection = allocate_by_signal(budget=400.0, discount=1.0)
    history = simulate(selection, rates, 60)
    solved, failed = counts_of(history, pool(6)["prompt_id"].tolist())
    mean = posterior_of(pool(6), history).mean_rate()
    error = np.sqrt(rates * (1 - rates) / (solved + failed))
    assert (solved + failed > 100).all()
    assert (np.abs(mean - rates) <= 4 * error + 0.01).all()


def test_a_prompt_without_data_has_a_chance_in_every_iteration_under_thompson():
    """Nine prompts have a known rate of a half, and one pair fits."""
    known = {f"p{each}": 50.0 for each in range(9)}
    history: History = {SUCCESSES: known, FAILURES: dict(known)}
    selection = allocate_by_signal(budget=7.0)
    sizes = [drawn(selection, pool(10), history, seed).loc["p9", "rollouts"] for seed in range(60)]
    assert 0 < np.mean(np.array(sizes) > 0) < 1


def test_a_prompt_that_is_never_mixed_gets_no_rollout():
    counts = {"p0": 0.0, "p1": 1e9, "p2": 5.0}
    failures = {"p0": 1e9, "p1": 0.0, "p2": 5.0}
    selection = allocate_by_signal(budget=100.0, draws="optimism")
    table = drawn(selection, pool(3), {SUCCESSES: counts, FAILURES: failures}, 0)
    assert table.loc["p2", "rollouts"] > 20
    assert table["rollouts"][["p0", "p1"]].max() == 0


def test_an_iteration_without_any_signal_still_has_a_group():
    nothing: History = {SUCCESSES: {"p0": 0.0}, FAILURES: {"p0": 1e300}}
    table = drawn(allocate_by_signal(budget=10.0), pool(1), nothing, 0)
    assert table["rollouts"].tolist() == [2]


def test_optimism_prefers_what_is_uncertain_at_the_same_mean():
    counts = {"p0": 1.0, "p1": 100.0}
    selection = allocate_by_signal(budget=7.0, draws="optimism")
    table = drawn(selection, pool(2), {SUCCESSES: counts, FAILURES: dict(counts)}, 0)
    assert table["rollouts"].tolist() == [2, 0]


def test_the_expected_cost_is_within_the_budget():
    rates = np.linspace(0.1, 0.9, 20)
    history = simulate(allocate_by_signal(budget=60.0), rates, 5)
    for seed in range(20):
        table = drawn(allocate_by_signal(budget=60.0), pool(20), history, seed)
        assert table["cost"].sum() <= 60.0
        assert table["cost"].sum() > 60.0 - 3 * table["cost"].max()


def test_the_mean_of_all_lengths_does_not_depend_on_their_order():
    """A checkpoint stores a history sorted by prompt; a running round has it as sampled."""
    numbers = np.random.default_rng(0).uniform(1, 60, 1000)
    steps = {f"p{index}": float(each) for index, each in enumerate(numbers)}
    stored = dict(sorted(steps.items()))
    assert list(steps) != list(stored)
    of_all = [mean_steps({"steps": each}, ["new"], 9.0)[0] for each in (steps, stored)]
    assert of_all[0] == of_all[1]


def test_costs_are_those_of_a_prompts_own_lengths():
    history: History = {"steps": {"p0": 10.0, "p1": 2.0}}
    assert mean_steps(history, ["p0", "p1", "p2"], 99.0).tolist() == [10.0, 2.0, 6.0]
    assert mean_steps({}, ["p0"], 99.0).tolist() == [99.0]
    short = [
        drawn(allocate_by_signal(budget=60.0), pool(2), history, seed)["rollouts"]
        for seed in range(50)
    ]
    assert np.mean([each["p1"] for each in short]) > 1.5 * np.mean([each["p0"] for each in short])


def test_weights_by_inclusion_keep_the_mean_over_all_prompts():
    """The weighted mean of a quantity of prompts, within 4 standard errors.

    Without weights it would be 6 standard errors off: it is larger where signal is rarer.
    """
    selection = allocate_by_signal(budget=30.0, weights="ht")
    history = simulate(allocate_by_signal(budget=60.0), np.linspace(0.05, 0.95, 12), 8)
    truth = pd.Series(np.abs(np.arange(12.0) - 5.5), index=pool(12)["prompt_id"])
    means, sizes = [], []
    for seed in range(250):
        chosen, table = allocate(selection, pool(12), history, price=PRICE, seed=seed)
        weight = chosen.set_index("prompt_id")[PROMPT_WEIGHT]
        means.append((weight * truth[weight.index]).mean())
        sizes.append(table["cost"].sum())
    assert abs(np.mean(means) - truth.mean()) <= 4 * np.std(means) / len(means) ** 0.5
    assert np.mean(sizes) == pytest.approx(30.0, rel=0.15)


@pytest.mark.parametrize(
    "selection",
    [
        allocate_by_signal(budget=40.0),
        allocate_by_signal(budget=40.0, draws="optimism", weights="ht"),
        sample_prompts_near_rate(prompts=4),
        size_groups_by_knapsack(prompts=4, rollouts=4),
    ],
    ids=lambda each: each.links[0].name,
)
def test_a_state_that_was_stored_resumes_to_the_same_bits(selection: Selection):
    rates = np.linspace(0.1, 0.9, 8)
    whole = simulate(selection, rates, 7)
    stored = json.loads(json.dumps(simulate(selection, rates, 3)))
    assert simulate(selection, rates, 4, history=stored, first=3) == whole


def test_the_profile_is_the_first_data_and_is_not_counted_twice():
    plan = pd.DataFrame(
        {"prompt_id": ["a", "b"], "outcome_rate": [0.25, 1.0], "profile_rollouts": [8, 7]}
    )
    seeded = add_profile({}, plan)
    assert seeded[SUCCESSES] == {"a": 2.0, "b": 7.0}
    assert seeded[FAILURES] == {"a": 6.0, "b": 0.0}
    assert add_profile(seeded, plan) is seeded


def test_the_prior_is_that_of_all_prompts():
    counts = {f"p{each}": 0.0 for each in range(30)}
    hard: History = {SUCCESSES: counts, FAILURES: dict.fromkeys(counts, 8.0)}
    unseen = posterior_of(pool(1), {})
    assert (unseen.alpha, unseen.beta) == (1.0, 1.0)
    assert fit_to(hard, [*counts, "unknown"], fewest=31) is None
    prior = fit_to(hard, [*counts, "unknown"], fewest=30)
    assert prior
    assert prior.alpha / sum(prior) < 0.05


def test_a_family_with_enough_data_has_its_own_prior():
    """Of 40 prompts each, `easy` is solved and `hard` is not; 19 of `rare` are, too few to know."""
    families = [*["easy"] * 41, *["hard"] * 41, *["rare"] * 20]
    prompts = pool(102).assign(family=families)
    ids = prompts["prompt_id"].tolist()
    unknown = [40, 81, 101]
    solved = {each: 4.0 * (family != "hard") for each, family in zip(ids, families)}
    failed = {each: 4.0 - solved[each] for each in ids}
    for row in unknown:
        del solved[ids[row]], failed[ids[row]]
    means = posterior_of(prompts, {SUCCESSES: solved, FAILURES: failed}).mean_rate()[unknown]
    assert means[0] > 0.95
    assert means[1] < 0.05
    assert means[2] == pytest.approx(59 / 99, abs=0.05)  # that of all prompts


def test_priors_by_family_find_more_mixed_groups():
    """600 prompts are always or never solved, 200 half the time; one iteration samples 1 of 8."""
    rates = np.repeat([0.0, 1.0, 0.5], [300, 300, 200])
    families = [*["never"] * 300, *["always"] * 300, *["mid"] * 200]
    selection = allocate_by_signal(budget=640.0, discount=1.0)

    def share_of_mid(names: str | list[str]) -> float:
        shares = []
        for seed in range(2):
            history = simulate(selection, rates, 3, first=100 * seed, families=names)
            prompts = pool(800).assign(family=names)
            sizes = drawn(selection, prompts, history, seed)["rollouts"].to_numpy()
            shares.append(sizes[600:].sum() / sizes.sum())
        return float(np.mean(shares))

    assert share_of_mid(families) > share_of_mid("f") + 0.2


def test_the_nearest_draws_to_the_rate_are_chosen():
    sharp = 1e6
    rates = {"p0": 0.1, "p1": 0.45, "p2": 0.8, "p3": 0.6}
    history: History = {
        SUCCESSES: {each: sharp * rate for each, rate in rates.items()},
        FAILURES: {each: sharp * (1 - rate) for each, rate in rates.items()},
    }
    table = drawn(sample_prompts_near_rate(prompts=2), pool(4), history, 0)
    assert table["rollouts"].tolist() == [0, 4, 0, 4]
    table = drawn(sample_prompts_near_rate(prompts=1, rate=0.9), pool(4), history, 0)
    assert table["rollouts"].tolist() == [0, 0, 4, 0]


def test_its_counts_are_discounted_when_a_prompt_is_sampled_again():
    """alpha' = l alpha + (1 - l) alpha_0 + s, with alpha_0 = 1."""
    selection = sample_prompts_near_rate(prompts=1, discount=0.5)
    pair = pd.DataFrame({"prompt_id": ["a", "a"], "outcome": [1.0, 0.0], "steps": 1})
    history = learn_round(selection, {}, pair, [])
    history = learn_round(selection, history, pair.assign(prompt_id="b"), [])
    assert history[SUCCESSES] == {"a": 1.0, "b": 1.0}
    history = learn_round(selection, history, pair, [])
    alpha = 1 + history[SUCCESSES]["a"]
    assert alpha == 0.5 * 2 + 0.5 * 1 + 1


def knapsack_value(rate: np.ndarray, sizes: np.ndarray) -> float:
    mixed = 1 - rate**sizes - (1 - rate) ** sizes
    return float((mixed * rate * (1 - rate) ** 2).sum())


def test_a_knapsack_is_that_of_dynamic_programming():
    """All rates are between 0 and 1, and needs exceed the budget, so that there is no fallback."""
    rate = np.array([0.05, 0.125, 0.25, 0.9])
    sizes = knapsack_sizes(rate, 8)
    assert sizes.sum() == 32
    best = {0: 0.0}  # the largest value by number of rollouts
    for each in rate:
        longer: dict[int, float] = {}
        for used, value in best.items():
            for size in range(2, 33 - used):
                found = value + knapsack_value(np.array([each]), np.array([size]))
                longer[used + size] = max(found, longer.get(used + size, 0.0))
        best = longer
    assert knapsack_value(rate, sizes) == pytest.approx(best[32])


def test_a_knapsack_divides_all_rollouts():
    chooser = np.random.default_rng(0)
    for _ in range(50):
        rate = chooser.choice([0, 0.1, 0.5, 0.9, 1, np.nan], size=9)
        sizes = knapsack_sizes(rate, 6)
        assert sizes.min() >= 2
        assert sizes.sum() == 54 or not ((rate < 1) | np.isnan(rate)).any()


def test_a_knapsack_gives_what_fallback_prompts_cannot_take_to_mixed_ones():
    """One prompt of rate 0 takes 128 rollouts at most."""
    sizes = knapsack_sizes(np.array([0.0] + [0.5] * 15), 32)
    assert sizes.sum() == 16 * 32
    assert sizes[0] == 128


def test_a_prompt_without_data_gets_the_mean_and_a_solved_one_a_pair():
    sizes = knapsack_sizes(np.array([np.nan, 1.0, 0.1, 0.0]), 8)
    assert sizes[:2].tolist() == [8, 2]
    assert sizes.sum() == 32


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: allocate_by_signal(budget=0.0), r"budget must be above 0, got 0.0"),
        (lambda: allocate_by_signal(budget=1.0, discount=0.0), r"discount must be in \(0, 1\]"),
        (lambda: allocate_by_signal(budget=1.0, draws="mean"), "draws must be one of"),
        (lambda: allocate_by_signal(budget=1.0, weights="is"), "weights must be one of"),
        (
            lambda: allocate_by_signal(budget=1.0, seconds_per_judgement=0.1),
            "needs seconds_per_sampled_step and seconds_per_trained_step above 0",
        ),
        (lambda: size_groups_by_knapsack(prompts=1, rollouts=1), r"rollouts must be in \[2, 128\]"),
        (lambda: sample_prompts_near_rate(prompts=1, rate=2.0), r"rate must be in \[0, 1\]"),
    ],
)
def test_wrong_settings_are_refused(make: object, message: str):
    with pytest.raises(ParameterError, match=message):
        make()
