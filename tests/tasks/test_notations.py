"""Laws of worked solutions with many steps: every step is true, and the last gives the answer."""

import itertools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo.errors import ParameterError
from grpo.modalities.modality import TextWarmup
from grpo.rewards._notations import STEPS
from grpo.rewards.base import Task
from grpo.rewards.reasoning_gym import score_answer
from grpo.tasks.base import PromptTables, TaskInputs
from grpo.tasks.reasoning_gym import ReasoningGymTask

FAMILIES = {
    "chain_sum": {"min_terms": 3, "max_terms": 6, "min_digits": 1, "max_digits": 2},
    "products": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2},
    "gcd": {"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": 99},
    "lcm": {"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": 60},
    "count_bits": {"min_n": 1, "max_n": 4095},
    "letter_counting": {"min_words": 1, "max_words": 7},
    "count_primes": {"min_n": 1, "max_n": 70},
    "leg_counting": {"min_animals": 1, "max_animals": 4},
    "prime_factorization": {"min_value": 2, "max_value": 300},
}
NUMBER = re.compile(r"\d+")


def make(worked: Any = 1.0, families: Any = FAMILIES) -> PromptTables:
    task = ReasoningGymTask(
        kind="reasoning_gym",
        notation="steps",
        train_prompts=20 * len(families),
        eval_prompts=len(families),
        instruction="",
        families=families,
    )
    warmup = TextWarmup(
        prompts=40 * len(families),
        updates=1,
        rows_per_update=1,
        learning_rate=1e-3,
        answer_mark="#",
        worked_fraction=worked,
        wrong_fraction=0.0,
    )
    return task.make_prompts(TaskInputs(warmup=warmup, seed=0, data=Path(), takes_messages=False))


def solved(family: str) -> Iterator[tuple[str, str, str]]:
    """Yields prompts of a family, the work of their solutions, and their answers."""
    for row in make(families={family: FAMILIES[family]}).train.to_dict("records"):
        yield row["prompt"], STEPS[family].work(json.loads(row["entry"])), row["answer"]


def evaluate(expression: str) -> int:
    """Returns the value of a sum of products."""
    terms = re.findall(r"-?[\d*]+", expression)
    total = 0
    for term in terms:
        value = -1 if term.startswith("-") else 1
        for factor in term.lstrip("-").split("*"):
            value *= int(factor)
        total += value
    return total


def test_the_families_are_those_of_the_notation():
    assert FAMILIES.keys() == STEPS.keys()


def test_the_judge_accepts_the_answer_of_every_solution():
    tables = make()
    for row in tables.train.to_dict("records"):
        named = {name: row[name] for name in ("family", "prompt", "answer")}
        task = Task(**named, entry=json.loads(row["entry"]))
        assert score_answer(row["answer"], task) == 1.0
    assert tables.warmup["solution"].str.contains(".#.", regex=True).mean() > 0.95


@pytest.mark.parametrize("family", ["chain_sum", "products", "leg_counting"])
def test_every_equation_is_true(family: str):
    for prompt, work, _ in solved(family):
        for line in work.split(" ") if family != "chain_sum" else [prompt[1:] + work]:
            values = {evaluate(side) for side in line.split("=")}
            assert len(values) == 1, (prompt, work)


def test_sums_and_products_end_in_the_answer():
    for family in ("chain_sum", "products"):
        assert all(
            NUMBER.findall(work)[-1] == answer.lstrip("-") for _, work, answer in solved(family)
        )


def test_the_smaller_number_is_subtracted_until_both_are_the_greatest_common_divisor():
    for prompt, work, answer in solved("gcd"):
        pairs = [tuple(map(int, each.split(","))) for each in work.split(" ")]
        assert list(pairs[0]) == [int(each) for each in NUMBER.findall(prompt)]
        for before, after in itertools.pairwise(pairs):
            assert after[0] + after[1] == max(before)
            assert min(before) in after
        assert pairs[-1] == (int(answer), int(answer))


def test_euclid_ends_at_remainder_0_of_the_greatest_common_divisor():
    for prompt, work, _ in solved("lcm"):
        *steps, cofactor = work.split(" ")
        assert all(len({evaluate(side) for side in each.split("=")}) == 1 for each in steps)
        last = steps[-1].split("*")[1]
        assert last == f"{math.gcd(*map(int, NUMBER.findall(prompt)))}+0"
        assert cofactor.split("=")[0].split("/")[1] == last.removesuffix("+0")


def test_legs_are_those_of_the_animals_and_add_up_to_the_answer():
    for prompt, work, answer in solved("leg_counting"):
        counts = [each.split(" ")[0] for each in prompt[1:-1].split(",")]
        starts, products = zip(*(each.split("=")[0].split("+") for each in work.split(" ")))
        assert [each.split("*")[0] for each in products] == counts
        totals = ["0", *(each.split("=")[-1] for each in work.split(" "))]
        assert list(starts) == totals[:-1]
        assert totals[-1] == answer


def test_the_least_common_multiple_is_the_cofactor_times_the_other_number():
    for _, work, answer in solved("lcm"):
        cofactor, number = map(int, work.split("=")[-1].split("*"))
        assert cofactor * number == int(answer)


def test_a_number_is_halved_to_1_and_its_odd_halves_are_counted():
    for prompt, work, answer in solved("count_bits"):
        pairs = [tuple(map(int, each.split(":"))) for each in work.split(" ")]
        halves = [half for half, _ in pairs]
        assert halves[0] == int(prompt[1:-1])
        assert all(later == half // 2 for half, later in itertools.pairwise(halves))
        assert (halves[-1], str(pairs[-1][1])) == (1, answer)


def test_letters_are_counted_word_by_word():
    for prompt, work, answer in solved("letter_counting"):
        letter, words = prompt[1], prompt[3:-1].split(" ")
        counts = [sum(word.count(letter) for word in words[: n + 1]) for n in range(len(words))]
        assert work.split(" ") == [f"{word}{count}" for word, count in zip(words, counts)]
        assert str(counts[-1]) == answer


def test_primes_are_listed_in_order_and_counted():
    for prompt, work, answer in solved("count_primes"):
        low, high = map(int, NUMBER.findall(prompt))
        primes = [n for n in range(max(low, 2), high + 1) if all(n % d for d in range(2, n))]
        assert work == " ".join(f"{prime}:{n + 1}" for n, prime in enumerate(primes))
        assert str(len(primes)) == answer


def test_a_number_is_divided_by_its_prime_factors_down_to_1():
    for prompt, work, answer in solved("prime_factorization"):
        rest, *quotients = work.split("=")
        value = int(prompt[1:-1])
        for part in (rest, *quotients[:-1]):
            number, divisor = map(int, part.split("/"))
            assert number == value
            assert number % divisor == 0
            value = number // divisor
        assert (value, quotients[-1]) == (1, "1")
        assert NUMBER.findall(answer) == re.findall(r"/(\d+)", work)


def test_a_share_of_worked_solutions_may_be_that_of_a_family():
    """Answers without work are right, too."""
    families = {each: FAMILIES[each] for each in ("count_bits", "gcd")}
    table = make(worked={"count_bits": 1.0, "gcd": 0.0}, families=families).warmup
    has_work = ~table["solution"].str.startswith("#")
    assert has_work.groupby(table["family"]).mean().to_dict() == {"count_bits": 1.0, "gcd": 0.0}


@pytest.mark.parametrize(
    ("worked", "odd"),
    [({"gcd": 0.5}, "count_bits"), ({"count_bits": 1, "gcd": 1, "lcm": 1}, "lcm")],
)
def test_shares_of_other_families_are_refused(worked: dict[str, float], odd: str):
    families = {each: FAMILIES[each] for each in ("count_bits", "gcd")}
    with pytest.raises(ParameterError, match=f"worked_fraction must .*'{odd}' is in only one"):
        make(worked=worked, families=families)
