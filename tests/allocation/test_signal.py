"""Group sizes for a budget: against brute force, and the laws of an optimal allocation."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.allocation.posterior import Posterior
from grpo.allocation.signal import (
    LARGEST,
    SIZES,
    Price,
    Rates,
    draw_systematically,
    group_costs,
    group_values,
    include,
    spend,
)

LAWS = settings(max_examples=60, deadline=None, derandomize=True)
CHOICES = [0, *range(2, 9)]
MANY = 4000


def price(keep: int | None = None, *, drops_uniform: bool = True) -> Price:
    return Price(rates=lambda ids, steps: None, longest=1, keep=keep, drops_uniform=drops_uniform)


def certain(rates: np.ndarray) -> Posterior:
    """Returns posteriors that are all but known rates."""
    return Posterior(alpha=1e7 * rates + 1e-9, beta=1e7 * (1 - rates) + 1e-9)


def problem(
    rates: list[float],
    *,
    read: float | list[float] = 0.2,
    sampled: float | list[float] = 1.0,
    trained: float | list[float] = 2.0,
    keep: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns values and expected costs of groups of prompts with known rates."""
    p = np.array(rates)
    each = Rates(*(np.broadcast_to(np.array(x, float), p.shape) for x in (read, sampled, trained)))
    return group_values(p * (1 - p)), group_costs(each, certain(p), price(keep))


def brute_force(values: np.ndarray, costs: np.ndarray, budget: float) -> float:
    """Returns the largest total value of groups of 0 and 2 to 8 within a budget."""
    rows = np.arange(len(values))
    return max(
        float(values[rows, sizes].sum())
        for sizes in map(list, product(CHOICES, repeat=len(values)))
        if costs[rows, sizes].sum() <= budget + 1e-9
    )


@st.composite
def problems(draw: st.DrawFn, most: int = 6) -> tuple[np.ndarray, np.ndarray]:
    count = draw(st.integers(1, most))
    rates = [draw(st.floats(0.02, 0.98)) for _ in range(count)]
    sampled = [draw(st.floats(0.5, 4.0)) for _ in range(count)]
    read = [draw(st.floats(0.0, 3.0)) for _ in range(count)]
    trained = [draw(st.floats(0.0, 6.0)) for _ in range(count)]
    return problem(rates, read=read, sampled=sampled, trained=trained)


def totals(values: np.ndarray, costs: np.ndarray, sizes: np.ndarray) -> tuple[float, float]:
    rows = np.arange(len(values))
    return float(values[rows, sizes].sum()), float(costs[rows, sizes].sum())


@given(given_problem=problems(most=4), budget=st.floats(5.0, 60.0))
@LAWS
def test_it_equals_brute_force_at_its_cost_and_is_one_step_below_it_at_most(
    given_problem: tuple[np.ndarray, np.ndarray], budget: float
):
    values, costs = (each[:, :9] for each in given_problem)  # groups of up to 8
    sizes = spend(values, costs, budget)
    value, cost = totals(values, costs, sizes)
    assert value == pytest.approx(brute_force(values, costs, cost))
    if cost <= budget:
        gain = (values[:, 2:].max(axis=1) - values[np.arange(len(sizes)), sizes]).max()
        assert brute_force(values, costs, budget) <= value + gain + 1e-9


@pytest.mark.parametrize("budget", [12.0, 30.0, 75.0])
def test_it_equals_brute_force_on_six_prompts(budget: float):
    rates = [0.03, 0.1, 0.3, 0.5, 0.8, 0.95]
    values, costs = problem(rates, sampled=[1, 2, 1, 3, 1, 1.5])
    values, costs = values[:, :9], costs[:, :9]
    sizes = spend(values, costs, budget)
    value, cost = totals(values, costs, sizes)
    assert value == pytest.approx(brute_force(values, costs, cost))


@given(rate=st.floats(0.05, 0.95), count=st.integers(1, 12), budget=st.floats(1.0, 200.0))
@LAWS
def test_equal_prompts_get_equal_groups_up_to_one_rollout(rate: float, count: int, budget: float):
    sizes = spend(*problem([rate] * count), budget)
    drawn = sizes[sizes > 0]
    assert drawn.max() - drawn.min() <= 1
    if (sizes == 0).any():  # a group of one teaches nothing, so that the first step is the pair
        assert set(drawn) == {2}


@given(given_problem=problems(), budget=st.floats(1.0, 100.0), keep=st.integers(2, 6))
@LAWS
def test_twice_the_budget_takes_no_rollout_from_a_prompt(
    given_problem: tuple[np.ndarray, np.ndarray], budget: float, keep: int
):
    assert (spend(*given_problem, 2 * budget) >= spend(*given_problem, budget)).all()


@given(given_problem=problems(), budget=st.floats(1.0, 100.0))
@LAWS
def test_the_budget_is_kept_within_the_next_step(
    given_problem: tuple[np.ndarray, np.ndarray], budget: float
):
    values, costs = given_problem
    sizes = spend(values, costs, budget)
    _, cost = totals(values, costs, sizes)
    assert cost <= budget + 1e-9 or (sizes > 0).sum() == 1
    if (sizes < LARGEST).all():
        more = [costs[row, size + 1 :].min() - costs[row, size] for row, size in enumerate(sizes)]
        firsts = [costs[row, 2:].max() for row, size in enumerate(sizes) if size == 0]
        assert budget - cost < max([*more, *firsts]) + costs[:, 2:].max()


def test_a_prompt_without_signal_gets_no_rollout():
    sizes = spend(*problem([0.0, 0.5, 1.0]), 1000.0)
    assert sizes[0] == sizes[2] == 0
    assert sizes[1] > 2


def test_the_first_group_is_taken_even_if_it_exceeds_the_budget():
    assert spend(*problem([0.1, 0.5, 0.9]), 1e-9).tolist() == [0, 2, 0]


def test_a_costly_prompt_is_read_for_more_than_a_pair():
    """Reading costs 20 rollouts: a larger group spreads it over more of them."""
    values, costs = problem([0.5], read=20.0, sampled=1.0, trained=0.0)
    size = int(spend(values, costs, 1.0)[0])
    assert size == (values[0, 2:] / costs[0, 2:]).argmax() + 2 == 6


def test_sizes_follow_neyman():
    """G ~ sqrt(v / c): a rollout that costs four times as much halves a large group."""
    values, costs = problem([0.5, 0.5], read=0.0, sampled=[1.0, 4.0], trained=0.0)
    cheap, costly = spend(values, costs, 160.0).tolist()
    assert cheap == pytest.approx(2 * costly, abs=2)


@given(rate=st.floats(0.0, 1.0), keep=st.integers(2, 8))
@LAWS
def test_the_cost_of_training_is_that_of_kept_rollouts_of_mixed_groups(rate: float, keep: int):
    _, costs = problem([rate], read=0.0, sampled=1.0, trained=1.0, keep=keep)
    mixed = 1 - rate**SIZES - (1 - rate) ** SIZES
    expected = SIZES + np.minimum(SIZES, keep) * np.where(SIZES > 0, mixed, 0)
    assert costs[0] == pytest.approx(expected, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("budget", [3.0, 10.0, 60.0, 1e6])
def test_inclusion_keeps_the_budget_on_average(budget: float):
    rates = np.linspace(0.01, 0.99, 25)
    _, costs = problem(rates.tolist(), sampled=np.linspace(1, 3, 25).tolist())
    chance, sizes = include(rates * (1 - rates), costs, budget)
    assert (chance > 0).all()
    assert chance.max() <= 1
    expected = float(chance @ costs[np.arange(25), sizes])
    assert chance.sum() >= 1 - 1e-9
    if chance.sum() > 1 + 1e-9 and sizes.max() < LARGEST:
        assert 0.8 * budget <= expected <= budget + 1e-6
    wanted = np.sqrt(rates * (1 - rates) / costs[:, 2])
    assert (chance.min() / chance.max()) > 0.05 * wanted.mean() / wanted.max()


def test_the_weighted_mean_over_draws_is_the_mean_over_all_prompts():
    """Horvitz and Thompson, within 4 standard errors."""
    chooser = np.random.default_rng(0)
    rates = np.linspace(0.02, 0.98, 30)
    _, costs = problem(rates.tolist())
    chance, _ = include(rates * (1 - rates), costs, 25.0)
    truth = chooser.normal(size=30) + 1.0
    means = []
    for _ in range(MANY):
        order = chooser.permutation(30)
        taken = draw_systematically(chance[order], chooser)
        weight = taken.sum() / (30 * chance[order])
        means.append((weight * truth[order])[taken].sum() / taken.sum())
    error = np.std(means) / MANY**0.5
    assert abs(np.mean(means) - truth.mean()) <= 4 * error


def test_a_systematic_draw_has_the_expected_size():
    chooser = np.random.default_rng(1)
    chance = np.array([0.3, 1.0, 0.25, 0.9, 0.05])
    draws = np.array([draw_systematically(chance, chooser) for _ in range(MANY)])
    assert set(draws.sum(axis=1)) <= {2, 3}
    error = np.sqrt(chance * (1 - chance) / MANY)
    assert (np.abs(draws.mean(axis=0) - chance) <= 4 * error + 1e-12).all()
