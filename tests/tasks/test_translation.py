"""The task of translation and its judge: what is asked is disjoint, and references are accepted."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from grpo.errors import ParameterError
from grpo.modalities.modality import PairWarmup, TextWarmup
from grpo.rewards import find_judge
from grpo.rewards.base import JudgeInputs
from grpo.rewards.base import Task as Asked
from grpo.schema import Machine
from grpo.tasks.base import PromptTables, TaskInputs
from grpo.tasks.translation import TranslationTask

LANGUAGES = {"es": 1.0, "fi": 1.0, "sw": 1.0, "hu": 0.4, "tr": 0.4, "ka": 0.0}
WARMUP = PairWarmup(prompts=2000, updates=1, rows_per_update=1, learning_rate=0.1)
MACHINE = Machine(device="cpu", dtype="float32", threads=1, compile=False)
read_back: Any = find_judge("back_parsing").load(
    JudgeInputs(where="reward.judges[0]", model=None, data=Path(), machine=MACHINE)
)


def task_of(**changes: Any) -> TranslationTask:
    settings = {"train_prompts": 600, "eval_prompts": 300, "below": 1000, "languages": LANGUAGES}
    return TranslationTask(kind="translation", **{**settings, **changes})


def tables(warmup: Any = WARMUP, *, seed: int = 0, **changes: Any) -> PromptTables:
    inputs = TaskInputs(seed=seed, data=Path(), warmup=warmup, takes_messages=False)
    return task_of(**changes).make_prompts(inputs)


def asked(row: "pd.Series[Any]") -> Asked:
    return Asked(
        family=row["family"],
        prompt=row["prompt"],
        answer=row["answer"],
        entry=json.loads(row["entry"]),
    )


def numbers(prompts: "pd.Series[str]") -> set[str]:
    """Returns the sources without their tags."""
    return set(prompts.str.replace(r"^>>\w+<< ", "", regex=True))


def test_no_number_is_in_two_parts_and_languages_have_equal_shares():
    train, evaluation, warmup = tables()
    parts = [numbers(each["prompt"]) for each in (train, evaluation, warmup)]
    assert len(set.union(*parts)) == sum(map(len, parts))
    assert set(train["family"].value_counts()) == {100}
    assert set(evaluation["family"].value_counts()) == {50}
    assert not train["prompt"].duplicated().any()


def test_the_warmup_has_languages_by_their_weights():
    """Of 2000 draws, 4.5 standard errors."""
    _, _, warmup = tables()
    share = warmup["family"].value_counts(normalize=True)
    total = sum(LANGUAGES.values())
    for language, weight in LANGUAGES.items():
        expected = weight / total
        error = (expected * (1 - expected) / 2000) ** 0.5
        assert abs(share.get(language, 0.0) - expected) <= 4.5 * error


def test_the_same_seed_asks_the_same_and_another_other_numbers():
    first, again, other = tables(), tables(), tables(seed=1)
    for one, two in zip(first, again):
        pd.testing.assert_frame_equal(one, two)
    assert set(first.train["prompt"]) != set(other.train["prompt"])


def test_every_reference_is_read_back_as_its_number():
    train, evaluation, _ = tables()
    for _, row in pd.concat([train, evaluation]).iterrows():
        assert read_back(row["answer"], asked(row)) == 1.0, row["answer"]


def test_copies_other_languages_and_other_numbers_earn_nothing():
    """The hacks of a reward without references: the source, digits, another language."""
    _, evaluation, _ = tables(below=1000)
    rows = [row for _, row in evaluation.iterrows()]
    for row, other in zip(rows, rows[1:] + rows[:1]):
        task = asked(row)
        source = row["prompt"].split("<< ")[1]
        for answer in (source, str(task.entry["number"]), f"{row['answer']} {row['answer']}", ""):
            with_nothing(answer, task)
        if other["answer"] != row["answer"]:
            with_nothing(other["answer"], task)


def with_nothing(answer: str, task: Asked) -> None:
    with suppress(ValueError):  # unparsable
        assert read_back(answer, task) == 0.0, (answer, task)


@pytest.mark.parametrize(
    ("changes", "warmup", "said"),
    [
        ({"languages": {"xx": 1.0}}, WARMUP, r"task\.languages\.xx must be a language"),
        ({"below": 60}, WARMUP, r"task\.below must leave 100 numbers"),
        ({"below": 150}, WARMUP, r"0 numbers are left"),
        ({"languages": {"fi": 0.0}, "below": 2000}, WARMUP, r"must be above 0"),
        (
            {},
            TextWarmup(
                **WARMUP.model_dump(), answer_mark="#", worked_fraction=0.0, wrong_fraction=0.0
            ),
            r"answer_mark is unknown with task\.kind translation",
        ),
    ],
)
def test_what_cannot_be_asked_is_one_line(changes: dict[str, Any], warmup: Any, said: str):
    with pytest.raises(ParameterError, match=said):
        tables(warmup, **changes)
