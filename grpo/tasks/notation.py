"""Compact forms of reasoning-gym entries for small models: a short prompt and a worked solution."""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

Entry = dict[str, Any]
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}


class Notation(NamedTuple):
    """`prompt` ends in "="; `work` is what a solution shows before its answer."""

    prompt: Callable[[Entry], str]
    work: Callable[[Entry], str]


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
    """gcd(48, 18): the divisors Euclid's algorithm meets -> 18,12,06"""
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
