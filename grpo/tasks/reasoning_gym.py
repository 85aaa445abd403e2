"""Prompts of reasoning-gym: procedural and verifiable; texts of train and eval are disjoint."""

import json
import operator
import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import pandas as pd
from pydantic import Field

from grpo.errors import ParameterError
from grpo.modalities.modality import TextWarmup
from grpo.rewards.reasoning_gym import generate
from grpo.schema import PARAMS, Positive
from grpo.tasks.base import PromptTables, Task, TaskInputs, shares

Entry = dict[str, Any]
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}
FRESH_ENTRIES = 64  # entries per batch
STALE_BATCHES = 40  # consecutive batches without a new prompt that mean an exhausted family


class _Notation(NamedTuple):
    """A compact form of a family: a prompt ending in "=", and the work before an answer."""

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


COMPACT: dict[str, _Notation] = {
    "chain_sum": _Notation(_expression("S"), _partial_results),
    "products": _Notation(_expression("P"), _partial_results),
    "gcd": _Notation(_numbers("G"), _divisors),
    "lcm": _Notation(_numbers("L"), _cofactor),
    "count_bits": _Notation(_bits_prompt, _bits),
    "letter_counting": _Notation(
        lambda entry: (
            f"C{entry['metadata']['target_letter']}:{' '.join(entry['metadata']['span'])}="
        ),
        _letters,
    ),
    "simple_equations": _Notation(_equation_prompt, _equation_work),
}


class ReasoningGymTask(Task):
    """Procedural tasks of reasoning-gym; the texts of train and eval are disjoint."""

    prompt_kinds = ("text",)

    kind: Literal["reasoning_gym"]
    notation: Literal["compact", "question"]  # short forms for small models, or the full question
    train_prompts: Positive
    eval_prompts: Positive
    instruction: str  # appended to every prompt
    families: dict[str, dict[str, Any]] = Field(min_length=1)  # reasoning-gym name -> difficulty

    def make_prompts(self, inputs: TaskInputs) -> PromptTables:
        if inputs.warmup and not isinstance(inputs.warmup, TextWarmup):
            raise ParameterError(
                f"{PARAMS}: policy.base.warmup must state answer_mark, worked_fraction and "
                "wrong_fraction with task.kind reasoning_gym"
            )
        return make_prompts(
            families=self.families,
            notation=self.notation,
            instruction=self.instruction,
            train_prompts=self.train_prompts,
            eval_prompts=self.eval_prompts,
            warmup=inputs.warmup,
            seed=inputs.seed,
        )


class _Item(NamedTuple):
    family: str
    prompt: str
    entry: dict[str, Any]


def make_prompts(
    *,
    families: Mapping[str, Mapping[str, Any]],
    notation: str,
    instruction: str,
    train_prompts: int,
    eval_prompts: int,
    warmup: Any,
    seed: int,
) -> PromptTables:
    """Returns prompts of every family in equal shares.

    The texts of train and eval are unique, and the warm-up contains none of them: memorized answers
    would teach GRPO to guess. A different seed alone is not enough, because small ranges overlap.

    Args:
      notation: "compact" (a few characters; see COMPACT) or "question" (the full text).
      instruction: Appended to every prompt.
      warmup: Parameters `policy.base.warmup` with the number of prompts and the mix of solutions;
        None: no warm-up.

    Raises:
      ParameterError: If a family or its difficulty is unknown, or has too few prompts.
    """
    chooser = random.Random(seed)
    parts: dict[str, list[_Item]] = {"train": [], "eval": [], "warmup": []}
    quotas = {
        part: shares(count, len(families))
        for part, count in [("eval", eval_prompts), ("train", train_prompts)]
    }
    for index, (family, difficulty) in enumerate(sorted(families.items())):
        quota = {part: quotas[part][index] for part in quotas}
        unique = list(_unique_items(family, difficulty, notation, sum(quota.values()), seed))
        chooser.shuffle(unique)
        parts["eval"] += unique[: quota["eval"]]
        parts["train"] += unique[quota["eval"] :]
    if warmup:
        taken = {item.prompt for part in ("train", "eval") for item in parts[part]}
        for index, (family, difficulty) in enumerate(sorted(families.items())):
            count = shares(warmup.prompts, len(families))[index]
            parts["warmup"] += _warmup_items(family, difficulty, notation, count, taken, seed)
    tables = PromptTables(
        _prompt_frame(parts["train"], "train"),
        _prompt_frame(parts["eval"], "eval"),
        _warmup_frame(parts["warmup"], warmup, chooser),
    )
    for table in tables:
        table["prompt"] += instruction
    return tables


def create_dataset(family: str, difficulty: Mapping[str, Any], *, size: int, seed: int) -> Any:
    """Returns a reasoning-gym data set.

    Raises:
      ParameterError: If the family or a setting of its difficulty is unknown or out of range.
    """
    where = f"{PARAMS}: task.families.{family}"
    try:
        return generate(family, size=size, seed=seed, **difficulty)
    except (ValueError, TypeError, AssertionError) as error:
        reason = " ".join(str(error).split()) or "its settings are out of range"
        raise ParameterError(f"{where} must be a reasoning-gym family: {reason}") from None


def _unique_items(
    family: str, difficulty: Mapping[str, Any], notation: str, count: int, seed: int
) -> Iterator[_Item]:
    """Yields `count` items with different prompts."""
    seen: set[str] = set()
    stale = 0
    for batch in _batches(family, difficulty, notation, seed):
        fresh = {item.prompt: item for item in batch if item.prompt not in seen}
        stale = 0 if fresh else stale + 1
        if stale == STALE_BATCHES:
            raise ParameterError(
                f"{PARAMS}: task.families.{family} must have {count} different prompts for "
                f"task.train_prompts and task.eval_prompts, got {len(seen)}; widen its ranges"
            )
        for prompt, item in fresh.items():
            if len(seen) == count:
                return
            seen.add(prompt)
            yield item


def _warmup_items(
    family: str,
    difficulty: Mapping[str, Any],
    notation: str,
    count: int,
    taken: set[str],
    seed: int,
) -> list[_Item]:
    """Returns `count` items, possibly repeated, with prompts outside of `taken`."""
    items: list[_Item] = []
    stale = 0
    for batch in _batches(family, difficulty, notation, seed + 1):
        fresh = [item for item in batch if item.prompt not in taken]
        stale = 0 if fresh else stale + 1
        if stale == STALE_BATCHES:
            raise ParameterError(
                f"{PARAMS}: task.families.{family} has no prompt left for the warm-up; "
                "widen its ranges or lower task.train_prompts"
            )
        items += fresh
        if len(items) >= count:
            return items[:count]
    raise AssertionError("batches never end")


def _batches(
    family: str, difficulty: Mapping[str, Any], notation: str, seed: int
) -> Iterator[list[_Item]]:
    """Yields endless batches of items."""
    form = _notation(family, notation)
    index = 0
    while True:
        batch_seed = zlib.crc32(f"{family}/{seed}/{index}".encode())
        entries = create_dataset(family, difficulty, size=FRESH_ENTRIES, seed=batch_seed)
        yield [
            _Item(family, form.prompt(entry) if form else entry["question"], entry)
            for entry in (entries[position] for position in range(FRESH_ENTRIES))
        ]
        index += 1


def _notation(family: str, notation: str) -> _Notation | None:
    """Returns the family's compact form, or None for the full question."""
    if notation == "question":
        return None
    if family not in COMPACT:
        raise ParameterError(
            f"{PARAMS}: task.families.{family} has no compact notation, only "
            f"{sorted(COMPACT)}; set task.notation to question"
        )
    return COMPACT[family]


def _prompt_frame(items: list[_Item], part: str) -> pd.DataFrame:
    """Returns a table of schema PROMPTS."""
    rows = [
        {
            "prompt_id": f"{part}-{item.family}-{index:05d}",
            "family": item.family,
            "prompt": item.prompt,
            "answer": str(item.entry["answer"]),
            "entry": json.dumps(item.entry, sort_keys=True, default=str),
        }
        for index, item in enumerate(items)
    ]
    return pd.DataFrame(rows)


def _warmup_frame(items: list[_Item], warmup: Any, chooser: random.Random) -> pd.DataFrame:
    """Returns a table of schema WARMUP."""
    answers: dict[str, list[str]] = {}
    for item in items:
        answers.setdefault(item.family, []).append(str(item.entry["answer"]))
    rows = [
        {
            "prompt_id": f"warmup-{item.family}-{index:06d}",
            "family": item.family,
            "prompt": item.prompt,
            "solution": _solution(item, answers[item.family], warmup, chooser),
        }
        for index, item in enumerate(items)
    ]
    return pd.DataFrame(rows, columns=["prompt_id", "family", "prompt", "solution"])


def _solution(item: _Item, family_answers: list[str], warmup: Any, chooser: random.Random) -> str:
    """Returns the solution of one prompt."""
    answer = str(item.entry["answer"])
    if item.family in COMPACT and chooser.random() < warmup.worked_fraction:
        return f"{COMPACT[item.family].work(item.entry)}{warmup.answer_mark}{answer}"
    if chooser.random() < warmup.wrong_fraction:
        answer = chooser.choice(family_answers)
    return f"{warmup.answer_mark}{answer}"
