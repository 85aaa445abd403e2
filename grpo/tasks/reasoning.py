"""Prompts of reasoning-gym: procedural, verifiable, disjoint as text between train and eval."""

import json
import random
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pandas as pd

from grpo.errors import ParameterError
from grpo.rewards.reasoning import generate
from grpo.tasks.base import PromptTables, shares
from grpo.tasks.notation import COMPACT, Notation

FRESH_ENTRIES = 64  # drawn at once
STALE_BATCHES = 40  # this many batches without a new prompt: the family is exhausted


class Item(NamedTuple):
    family: str
    prompt: str
    entry: dict[str, Any]


class Solutions(NamedTuple):
    """How warm-up solutions are written: a base of partial skill knows good and bad habits."""

    answer_mark: str  # stands before the answer
    worked_fraction: float  # show their work, always right; the others answer at once
    wrong_fraction: float  # of those that answer at once: another prompt's answer


def make_prompts(
    *,
    families: Mapping[str, Mapping[str, Any]],
    notation: str,
    instruction: str,
    train_prompts: int,
    eval_prompts: int,
    warmup_prompts: int,
    solutions: Solutions,
    seed: int,
) -> PromptTables:
    """Returns prompts of every family in equal shares.

    Prompts are unique as text over train and eval, and none of them is in the warm-up, whose
    memorized answers would teach GRPO to guess; another seed alone would not do, since small
    ranges overlap.

    Args:
      notation: "compact" (a few characters, `grpo.tasks.notation`) or "question" (the full text).
      instruction: Appended to every prompt.

    Raises:
      ParameterError: If a family or its difficulty is unknown, or has too few prompts.
    """
    chooser = random.Random(seed)
    parts: dict[str, list[Item]] = {"train": [], "eval": [], "warmup": []}
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
    if warmup_prompts:
        taken = {item.prompt for part in ("train", "eval") for item in parts[part]}
        for index, (family, difficulty) in enumerate(sorted(families.items())):
            count = shares(warmup_prompts, len(families))[index]
            parts["warmup"] += _warmup_items(family, difficulty, notation, count, taken, seed)
    tables = PromptTables(
        _prompt_frame(parts["train"], "train"),
        _prompt_frame(parts["eval"], "eval"),
        _warmup_frame(parts["warmup"], solutions, chooser),
    )
    for table in tables:
        table["prompt"] += instruction
    return tables


def create_dataset(family: str, difficulty: Mapping[str, Any], *, size: int, seed: int) -> Any:
    """Returns a reasoning-gym data set.

    Raises:
      ParameterError: If the family or a setting of its difficulty is unknown or out of range.
    """
    where = f"params.yaml: task.families.{family}"
    try:
        return generate(family, size=size, seed=seed, **difficulty)
    except (ValueError, TypeError, AssertionError) as error:
        reason = " ".join(str(error).split()) or "its settings are out of range"
        raise ParameterError(f"{where} must be a reasoning-gym family: {reason}") from None


def _unique_items(
    family: str, difficulty: Mapping[str, Any], notation: str, count: int, seed: int
) -> Iterator[Item]:
    """Yields `count` items with different prompts."""
    seen: set[str] = set()
    stale = 0
    for batch in _batches(family, difficulty, notation, seed):
        fresh = {item.prompt: item for item in batch if item.prompt not in seen}
        stale = 0 if fresh else stale + 1
        if stale == STALE_BATCHES:
            raise ParameterError(
                f"params.yaml: task.families.{family} has {len(seen)} different prompts, "
                f"task.train_prompts and task.eval_prompts ask for {count}; widen its ranges"
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
) -> list[Item]:
    """Returns `count` items, repetitions allowed, none of their prompts taken."""
    items: list[Item] = []
    stale = 0
    for batch in _batches(family, difficulty, notation, seed + 1):
        fresh = [item for item in batch if item.prompt not in taken]
        stale = 0 if fresh else stale + 1
        if stale == STALE_BATCHES:
            raise ParameterError(
                f"params.yaml: task.families.{family} has no prompt left for the warm-up; "
                "widen its ranges or lower task.train_prompts"
            )
        items += fresh
        if len(items) >= count:
            return items[:count]
    raise AssertionError("batches never end")


def _batches(
    family: str, difficulty: Mapping[str, Any], notation: str, seed: int
) -> Iterator[list[Item]]:
    """Yields endless batches of items."""
    form = _notation(family, notation)
    index = 0
    while True:
        batch_seed = zlib.crc32(f"{family}/{seed}/{index}".encode())
        entries = create_dataset(family, difficulty, size=FRESH_ENTRIES, seed=batch_seed)
        yield [
            Item(family, form.prompt(entry) if form else entry["question"], entry)
            for entry in (entries[position] for position in range(FRESH_ENTRIES))
        ]
        index += 1


def _notation(family: str, notation: str) -> Notation | None:
    """Returns the family's compact form, or None for the full question."""
    if notation == "question":
        return None
    if family not in COMPACT:
        raise ParameterError(
            f"params.yaml: task.families.{family} has no compact notation, only "
            f"{sorted(COMPACT)}; set task.notation to question"
        )
    return COMPACT[family]


def _prompt_frame(items: list[Item], part: str) -> pd.DataFrame:
    """Returns the prompts under the schema PROMPTS."""
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


def _warmup_frame(items: list[Item], solutions: Solutions, chooser: random.Random) -> pd.DataFrame:
    """Returns solutions under the schema WARMUP."""
    answers: dict[str, list[str]] = {}
    for item in items:
        answers.setdefault(item.family, []).append(str(item.entry["answer"]))
    rows = [
        {
            "prompt_id": f"warmup-{item.family}-{index:06d}",
            "family": item.family,
            "prompt": item.prompt,
            "solution": _solution(item, answers[item.family], solutions, chooser),
        }
        for index, item in enumerate(items)
    ]
    return pd.DataFrame(rows, columns=["prompt_id", "family", "prompt", "solution"])


def _solution(
    item: Item, family_answers: list[str], solutions: Solutions, chooser: random.Random
) -> str:
    """Returns one written solution."""
    answer = str(item.entry["answer"])
    if item.family in COMPACT and chooser.random() < solutions.worked_fraction:
        return f"{COMPACT[item.family].work(item.entry)}{solutions.answer_mark}{answer}"
    if chooser.random() < solutions.wrong_fraction:
        answer = chooser.choice(family_answers)
    return f"{solutions.answer_mark}{answer}"
