"""Prompts of reasoning-gym: procedural and verifiable; texts of train and eval are disjoint."""

import json
import random
import zlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

import pandas as pd
from pydantic import Field

from grpo.errors import ParameterError, refused_by_library
from grpo.modalities.modality import TextWarmup
from grpo.rewards._notations import COMPACT, NOTATIONS, Notation
from grpo.rewards.reasoning_gym import generate
from grpo.schema import PARAMS, Positive
from grpo.tasks.base import PromptTables, Task, TaskInputs, shares

FRESH_ENTRIES = 64  # entries per batch
STALE_BATCHES = 40  # consecutive batches without a new prompt that mean an exhausted family


class ReasoningGymTask(Task):
    """Procedural tasks of reasoning-gym; the texts of train and eval are disjoint."""

    prompt_kinds = ("text",)

    kind: Literal["reasoning_gym"]
    # Short prompts for small models, whose worked solutions are short or have many steps; or the
    # full question.
    notation: Literal["compact", "steps", "question"]
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
        if inputs.warmup:
            _require_families(inputs.warmup.worked_fraction, set(self.families))
        return make_prompts(
            families=self.families,
            notation=self.notation,
            instruction=self.instruction,
            train_prompts=self.train_prompts,
            eval_prompts=self.eval_prompts,
            warmup=inputs.warmup,
            seed=inputs.seed,
        )


def _require_families(worked: float | dict[str, float], families: set[str]) -> None:
    """Raises ParameterError if fractions by family are not those of the task's families."""
    if isinstance(worked, dict) and worked.keys() != families:
        odd = sorted(worked.keys() ^ families)
        raise ParameterError(
            f"{PARAMS}: policy.base.warmup.worked_fraction must be one number or name the families "
            f"of task.families, and {odd[0]!r} is in only one of them"
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
      notation: "compact" or "steps" (short prompts, see NOTATIONS) or "question" (the full text).
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
        _warmup_frame(parts["warmup"], NOTATIONS.get(notation, COMPACT), warmup, chooser),
    )
    for table in tables:
        table["prompt"] += instruction
    return tables


def create_dataset(family: str, difficulty: Mapping[str, Any], *, size: int, seed: int) -> Any:
    """Returns a reasoning-gym data set.

    Raises:
      ParameterError: If the family or a setting of its difficulty is unknown or out of range.
    """
    with _explained(family):
        return generate(family, size=size, seed=seed, **difficulty)


def _explained(family: str) -> AbstractContextManager[None]:
    """Converts whatever reasoning-gym raises about the settings of a family."""
    where = f"{PARAMS}: task.families.{family}"
    return refused_by_library(
        lambda why: ParameterError(
            f"{where} must be a reasoning-gym family with settings in its ranges, got {why}"
        )
    )


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
        dataset = create_dataset(family, difficulty, size=FRESH_ENTRIES, seed=batch_seed)
        with _explained(family):  # some settings are only used here
            entries = [dataset[position] for position in range(FRESH_ENTRIES)]
        yield [
            _Item(family, form.prompt(entry) if form else entry["question"], entry)
            for entry in entries
        ]
        index += 1


def _notation(family: str, notation: str) -> Notation | None:
    """Returns the family's short form, or None for the full question."""
    if notation == "question":
        return None
    known = NOTATIONS[notation]
    if family not in known:
        raise ParameterError(
            f"{PARAMS}: task.families.{family} has no {notation} notation, only "
            f"{sorted(known)}; set task.notation to question"
        )
    return known[family]


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


def _warmup_frame(
    items: list[_Item], forms: Mapping[str, Notation], warmup: Any, chooser: random.Random
) -> pd.DataFrame:
    """Returns a table of schema WARMUP."""
    answers: dict[str, list[str]] = {}
    for item in items:
        answers.setdefault(item.family, []).append(str(item.entry["answer"]))
    rows = [
        {
            "prompt_id": f"warmup-{item.family}-{index:06d}",
            "family": item.family,
            "prompt": item.prompt,
            "solution": _solution(
                item, forms.get(item.family), answers[item.family], warmup, chooser
            ),
        }
        for index, item in enumerate(items)
    ]
    return pd.DataFrame(rows, columns=["prompt_id", "family", "prompt", "solution"])


def _solution(
    item: _Item,
    form: Notation | None,
    family_answers: list[str],
    warmup: Any,
    chooser: random.Random,
) -> str:
    """Returns the solution of one prompt."""
    answer = str(item.entry["answer"])
    worked = warmup.worked_fraction
    share = worked[item.family] if isinstance(worked, dict) else worked
    if form and chooser.random() < share:
        return f"{form.work(item.entry)}{warmup.answer_mark}{answer}"
    if chooser.random() < warmup.wrong_fraction:
        answer = chooser.choice(family_answers)
    return f"{warmup.answer_mark}{answer}"
