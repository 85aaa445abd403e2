"""Short forms of reasoning-gym's families for small models: prompts, and solutions with their work.

A prompt ends in "=". A solution is the work, the mark of the answer, and the answer. `compact` has
little work or none; `steps` writes down every intermediate result.
"""

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from grpo.rewards.reasoning_gym import legs_of

Entry = dict[str, Any]
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}


class Notation(NamedTuple):
    """A compact form of a family: a prompt ending in "=", and the work before an answer."""

    prompt: Callable[[Entry], str]
    work: Callable[[Entry], str]
    separator: str = " "  # of the parts of the work, if that writes down every result


def _expression(letter: str) -> Callable[[Entry], str]:
    """12 + 3 -> S12+3="""
    return lambda entry: f"{letter}{entry['metadata']['expression'].replace(' ', '')}="


def _numbers(letter: str) -> Callable[[Entry], str]:
    """[48, 18] -> G48,18="""

    def prompt(entry: Entry) -> str:
        return f"{letter}{','.join(f'{n:02d}' for n in entry['metadata']['numbers'])}="

    return prompt


def _partial_results(entry: Entry) -> str:
    """4 + 5 - 2 -> 4+5=9-2=7"""
    terms = entry["metadata"]["expression"].split()
    value, work = int(terms[0]), str(terms[0])
    for sign, term in zip(terms[1::2], terms[2::2]):
        value = OPERATIONS[sign](value, int(term))
        work += f"{sign}{term}={value}"
    return work


def _divisors(entry: Entry) -> str:
    """The divisors in Euclid's algorithm: gcd(48, 18) -> 18,12,06"""
    a, b = entry["metadata"]["numbers"]
    met = []
    while b:
        a, b = b, a % b
        met.append(f"{a:02d}")
    return ",".join(met)


def _cofactor(entry: Entry) -> str:
    """lcm(12, 18): gcd = cofactor * number -> 6=2*18"""
    a, b = entry["metadata"]["numbers"]
    divisor, rest = a, b
    while rest:
        divisor, rest = rest, divisor % rest
    return f"{divisor}={a // divisor}*{b}"


def _bits_prompt(entry: Entry) -> str:
    """20 of at most 511 -> B020="""
    metadata = entry["metadata"]
    width = len(str(metadata["difficulty"]["n"][1]))
    return f"B{metadata['number']:0{width}d}="


def _bits(entry: Entry) -> str:
    """20 of at most 511 -> 000010100"""
    metadata = entry["metadata"]
    width = metadata["difficulty"]["n"][1].bit_length()
    return f"{metadata['number']:0{width}b}"


def _letters(entry: Entry) -> str:
    """The words' matching letters: r in "red car" -> rr"""
    letter = entry["metadata"]["target_letter"]
    words = entry["metadata"]["span"]
    return "".join(c for word in words for c in word.lower() if c == letter)


def _equation(entry: Entry) -> tuple[str, int, int, int]:
    """3*x + 4 = 10 -> ("3*x+4", 3, 4, 10): left side, slope, constant, right side."""
    left, right = entry["metadata"]["equation"].split(" = ")
    left = left.replace(entry["metadata"]["variable"], "x").replace(" ", "")
    at_zero = _evaluate_linear(left, 0)
    return left, _evaluate_linear(left, 1) - at_zero, at_zero, int(right)


def _evaluate_linear(expression: str, value: int) -> int:
    """Returns a sum of products of integers and x at x = value."""
    total = 0
    for term in expression.replace("-", "+-").split("+"):
        if term:
            product = -1 if term.startswith("-") else 1
            for factor in term.lstrip("-").split("*"):
                product *= value if factor == "x" else int(factor)
            total += product
    return total


def _equation_prompt(entry: Entry) -> str:
    left, _, _, right = _equation(entry)
    return f"E{left}={right};"


def _equation_work(entry: Entry) -> str:
    """3*x + 4 = 10 -> 6/3"""
    _, slope, constant, right = _equation(entry)
    return f"{right - constant}/{slope}"


COMPACT: dict[str, Notation] = {
    "chain_sum": Notation(_expression("S"), _partial_results),
    "products": Notation(_expression("P"), _partial_results),
    "gcd": Notation(_numbers("G"), _divisors),
    "lcm": Notation(_numbers("L"), _cofactor),
    "count_bits": Notation(_bits_prompt, _bits),
    "letter_counting": Notation(
        lambda entry: (
            f"C{entry['metadata']['target_letter']}:{' '.join(entry['metadata']['span'])}="
        ),
        _letters,
    ),
    "simple_equations": Notation(_equation_prompt, _equation_work),
}


def _numbers_as_given(letter: str) -> Callable[[Entry], str]:
    """[48, 18] -> G48,18="""
    return lambda entry: f"{letter}{','.join(map(str, entry['metadata']['numbers']))}="


def _shrinking_sums(entry: Entry) -> str:
    """4 + 5 - 2 + 7 -> 9-2+7=7+7=14, the rest of the sum after each step"""
    first, *rest = entry["metadata"]["expression"].split()
    value, work = int(first), list[str]()
    while rest:
        value = OPERATIONS[rest[0]](value, int(rest[1]))
        rest = rest[2:]
        work.append(f"{value}{''.join(rest)}")
    return "=".join(work)


def _long_products(entry: Entry) -> str:
    """37 * 48 -> 37*8=296 37*40=1480 296+1480=1776"""
    value, *factors = map(int, entry["metadata"]["expression"].split(" * "))
    work = list[str]()
    for factor in factors:
        total = 0
        for place, digit in enumerate(reversed(str(factor))):
            part = int(digit) * 10**place
            work.append(f"{value}*{part}={value * part}")
            if place:
                work.append(f"{total}+{value * part}={total + value * part}")
            total += value * part
        value = total
    return " ".join(work)


def _euclid(entry: Entry) -> str:
    """gcd(48, 18) -> 48=2*18+12 18=1*12+6 12=2*6+0"""
    a, b = entry["metadata"]["numbers"]
    work = list[str]()
    while b:
        work.append(f"{a}={a // b}*{b}+{a % b}")
        a, b = b, a % b
    return " ".join(work)


def _subtractions(entry: Entry) -> str:
    """gcd(48, 18) -> 48,18 30,18 12,18 12,06 06,06"""
    a, b = entry["metadata"]["numbers"]
    pairs = [(a, b)]
    while a != b:
        a, b = (a - b, b) if a > b else (a, b - a)
        pairs.append((a, b))
    return " ".join(f"{a:02d},{b:02d}" for a, b in pairs)


def _euclid_and_cofactor(entry: Entry) -> str:
    """lcm(48, 18) -> Euclid's algorithm, then 48/6=8*18"""
    a, b = entry["metadata"]["numbers"]
    divisor = math.gcd(a, b)
    return f"{_euclid(entry)} {a}/{divisor}={a // divisor}*{b}"


def _halving(entry: Entry) -> str:
    """20 -> 20:0 10:0 5:1 2:1 1:2, each half with the number of odd ones so far"""
    number, odd, work = entry["metadata"]["number"], 0, list[str]()
    while number:
        odd += number % 2
        work.append(f"{number}:{odd}")
        number //= 2
    return " ".join(work)


def _letters_prompt(entry: Entry) -> str:
    """r in "Red car" -> Cr:red car="""
    span = " ".join(entry["metadata"]["span"]).lower()
    return f"C{entry['metadata']['target_letter']}:{span}="


def _letters_so_far(entry: Entry) -> str:
    """r in "Red car" -> red1 car2"""
    letter, count, work = entry["metadata"]["target_letter"], 0, list[str]()
    for word in entry["metadata"]["span"]:
        count += word.lower().count(letter)
        work.append(f"{word.lower()}{count}")
    return " ".join(work)


def _legs_prompt(entry: Entry) -> str:
    """3 dogs and 2 bees -> A2 bee,3 dog="""
    animals = sorted(entry["metadata"]["animals"].items())
    return f"A{','.join(f'{count} {animal}' for animal, count in animals)}="


def _legs_so_far(entry: Entry) -> str:
    """3 dogs and 2 bees -> 0+2*6=0+12=12 12+3*4=12+12=24"""
    total, work = 0, list[str]()
    for animal, count in sorted(entry["metadata"]["animals"].items()):
        legs = count * legs_of(animal)
        work.append(f"{total}+{count}*{legs_of(animal)}={total}+{legs}={total + legs}")
        total += legs
    return " ".join(work)


def _primes(entry: Entry) -> str:
    """10 to 20 -> 11:1 13:2 17:3 19:4, each prime with the number of primes so far"""
    primes = entry["metadata"]["primes"]
    return " ".join(f"{prime}:{count}" for count, prime in enumerate(primes, start=1))


def _factors(entry: Entry) -> str:
    """60 -> 60/2=30/2=15/3=5/5=1"""
    work = str(rest := entry["metadata"]["number"])
    for factor in entry["metadata"]["factors"]:
        rest //= factor
        work += f"/{factor}={rest}"
    return work


STEPS: dict[str, Notation] = {
    "chain_sum": Notation(_expression("S"), _shrinking_sums, "="),
    "products": Notation(_expression("P"), _long_products),
    "gcd": Notation(_numbers("G"), _subtractions),
    "lcm": Notation(_numbers_as_given("L"), _euclid_and_cofactor),
    "count_bits": Notation(lambda entry: f"B{entry['metadata']['number']}=", _halving),
    "letter_counting": Notation(_letters_prompt, _letters_so_far),
    "leg_counting": Notation(_legs_prompt, _legs_so_far),
    "count_primes": Notation(
        lambda entry: f"N{entry['metadata']['start']},{entry['metadata']['end']}=", _primes
    ),
    "prime_factorization": Notation(
        lambda entry: f"F{entry['metadata']['number']}=", _factors, "="
    ),
}
NOTATIONS = {"compact": COMPACT, "steps": STEPS}
