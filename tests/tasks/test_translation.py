"""The task of translation and its judge: what is asked is disjoint, and references are accepted."""

import json
import unicodedata
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import num2words2
import pandas as pd
import pytest
import words2num2

from grpo.errors import ParameterError
from grpo.modalities.modality import PairWarmup, TextWarmup
from grpo.rewards import find_judge
from grpo.rewards.base import JudgeInputs
from grpo.rewards.base import Task as Asked
from grpo.schema import Machine
from grpo.tasks.base import PromptTables, TaskInputs
from grpo.tasks.translation import Kind, TranslationTask

LANGUAGES = {
    name: {"pairs": pairs, "noise": noise}
    for name, pairs, noise in [
        ("es", 1.0, 0.0), ("fi", 1.0, 0.3), ("sw", 1.0, 1.0), ("hu", 0.4, 0.0), ("ja", 0.4, 0.0),
        ("ka", 0.0, 0.0),
    ]
}  # fmt: skip
NUMBERS, DATES = {"numbers": 1.0}, {"dates": 1.0}
UNSEEN = {"fi": {"pairs": 0.0, "noise": 0.0}}
SCRIPTS = {
    "ARABIC": "ar", "CJK": "zh", "CYRILLIC": "ru", "DEVANAGARI": "hi", "GEORGIAN": "ka",
    "GREEK": "el", "LATIN": "fi",
}  # fmt: skip
TWELVE = ("ar", "el", "es", "fi", "hi", "hu", "ja", "ka", "ru", "sw", "tr", "zh")
KINDS = get_args(Kind)
WARMUP = PairWarmup(prompts=2000, updates=1, rows_per_update=1, learning_rate=0.1)
MACHINE = Machine(device="cpu", dtype="float32", threads=1, compile=False)
read_back: Any = find_judge("back_parsing").load(
    JudgeInputs(where="reward.judges[0]", model=None, data=Path(), machine=MACHINE)
)


def task_of(**changes: Any) -> TranslationTask:
    settings = {"train_prompts": 600, "eval_prompts": 300, "below": 1000, "languages": LANGUAGES}
    settings |= {"kinds": {"numbers": 0.5, "dates": 0.5}}
    return TranslationTask(kind="translation", **{**settings, **changes})


def clean(*names: str) -> dict[str, dict[str, float]]:
    return {each: {"pairs": 1.0, "noise": 0.0} for each in names}


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


def sources(prompts: "pd.Series[str]") -> set[str]:
    """Returns the sources without their tags."""
    return set(prompts.str.replace(r"^>>\w+<< ", "", regex=True))


@pytest.mark.parametrize("kind", KINDS)
def test_no_content_is_in_two_parts_and_languages_have_equal_shares(kind: str):
    parts = tables(kinds={kind: 1.0}, train_prompts=600, eval_prompts=300, below=300)
    texts = [sources(each["prompt"]) for each in (parts.train, parts.eval, parts.warmup)]
    assert len(set.union(*texts)) == sum(map(len, texts))
    assert set(parts.train["family"].value_counts()) == {100}
    assert set(parts.eval["family"].value_counts()) == {50}
    assert not parts.train["prompt"].duplicated().any()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_written_in_twelve_languages_of_seven_scripts(kind: str):
    """No text is the code of a unit, currency or name, or one of another language."""
    train, *_ = tables(None, kinds={kind: 1.0}, languages=clean(*TWELVE), train_prompts=240)
    for _, row in train.iterrows():
        facts = json.loads(row["entry"])
        assert row["answer"]
        for name in ("unit", "currency", "code"):
            assert str(facts.get(name, "\0")) not in row["answer"].split()
    for script, language in SCRIPTS.items():
        letters = "".join(train[train["family"] == language]["answer"])
        found = {unicodedata.name(each).split()[0] for each in letters if each.isalpha()}
        assert script in found


def test_plural_forms_follow_the_number():
    """Russian has three: of 1, of 2 to 4, and of 5 and more."""
    prompts = [
        each
        for each in tables(
            None,
            kinds={"units": 1.0},
            languages=clean("ru"),
            below=100,
            train_prompts=1200,
            eval_prompts=1,
        ).train.itertuples()
        if json.loads(str(each.entry))["unit"] == "duration-day"
    ]
    forms = {1: "день", 2: "дня", 3: "дня", 4: "дня"}
    assert len(prompts) > 80
    for each in prompts:
        number = json.loads(str(each.entry))["number"]
        form = "дней" if 11 <= number % 100 <= 14 else forms.get(number % 10, "дней")
        assert each.answer == f"{number} {form}"


def test_kinds_have_their_shares_in_every_part():
    parts = tables(kinds={"numbers": 0.5, "dates": 0.3, "units": 0.2, "money": 0.0})
    for part, count in ((parts.train, 600), (parts.eval, 300), (parts.warmup, 2000)):
        found = part["prompt_id"].str.split("-").str[2].value_counts()
        assert found.to_dict() == {
            "numbers": count * 0.5,
            "dates": count * 0.3,
            "units": count * 0.2,
        }


def test_the_warmup_has_languages_by_their_shares():
    """Of 2000 draws, 4.5 standard errors."""
    _, _, warmup = tables()
    share = warmup["family"].value_counts(normalize=True)
    total = sum(each["pairs"] for each in LANGUAGES.values())
    for language, corpus in LANGUAGES.items():
        expected = corpus["pairs"] / total
        error = (expected * (1 - expected) / 2000) ** 0.5
        assert abs(share.get(language, 0.0) - expected) <= 4.5 * error


def test_noise_is_copies_other_languages_and_other_contents_in_equal_shares():
    """Of 3000 noisy pairs of numbers, 4.5 standard errors; few languages share a spelling."""
    languages = {**clean("es", "hu"), "fi": {"pairs": 1.0, "noise": 1.0}}
    warmup = PairWarmup(prompts=9000, updates=1, rows_per_update=1, learning_rate=0.1)
    pairs = tables(warmup, kinds={"numbers": 1.0}, languages=languages, below=2000).warmup
    counts = dict.fromkeys(("copy", "language", "content"), 0)
    for each in pairs.itertuples():
        source = str(each.prompt).split("<< ")[1]
        number = words2num2.words2num(source, lang="en")
        if each.family != "fi":
            assert each.solution == num2words2.num2words(number, lang=each.family)
        elif each.solution == source:
            counts["copy"] += 1
        elif each.solution in [num2words2.num2words(number, lang=name) for name in ("es", "hu")]:
            counts["language"] += 1
        else:
            assert words2num2.words2num(each.solution, lang="fi") != number
            counts["content"] += 1
    total = sum(counts.values())
    for each in counts.values():
        assert abs(each / total - 1 / 3) <= 4.5 * (2 / 9 / total) ** 0.5


def test_the_same_seed_asks_the_same_and_another_other_texts():
    first, again, other = tables(), tables(), tables(seed=1)
    for one, two in zip(first, again):
        pd.testing.assert_frame_equal(one, two)
    assert set(first.train["prompt"]) != set(other.train["prompt"])


def test_every_reference_is_read_back_as_its_number_or_date():
    """But some Japanese dates on a Monday, whose first character is that of "month"."""
    train, evaluation, _ = tables()
    for _, row in pd.concat([train, evaluation]).iterrows():
        if "月曜日" in row["answer"]:
            continue
        assert read_back(row["answer"], asked(row)) == 1.0, row["answer"]


def test_copies_other_languages_and_other_numbers_earn_nothing():
    """The hacks of a reward without references: the source, digits, another language."""
    _, evaluation, _ = tables(below=1000)
    rows = [row for _, row in evaluation.iterrows()]
    for row, other in zip(rows, rows[1:] + rows[:1]):
        task = asked(row)
        source = row["prompt"].split("<< ")[1]
        digits = str(task.entry.get("number", task.entry.get("date")))
        for answer in (source, digits, f"{row['answer']} {row['answer']}", ""):
            with_nothing(answer, task)
        if other["answer"] != row["answer"]:
            with_nothing(other["answer"], task)


NUMBER_3 = {"kind": "numbers", "number": 3}
DATE = {"kind": "dates", "date": "1996-09-16"}


@pytest.mark.parametrize(
    ("language", "entry", "right", "wrong"),
    [
        ("de", NUMBER_3, "drei", ["drei Komma fünf", "3"]),
        ("en", NUMBER_3, "three", ["three point five"]),
        ("fi", NUMBER_3, "kolme", ["kolme pilkku viisi"]),
        ("de", DATE, "16. September 1996", ["1996-09-16T", "1996-09-16 UTC", "16 9 1996 Z"]),
        ("fi", DATE, "16. syyskuuta 1996", ["1996-09-16T00:00", "1996-09-16 1:00 am"]),
        ("ja", DATE, "1996年9月16日", ["1996-09-16T", "16 9 1996 Z"]),
        ("ka", DATE, "16 სექტემბერი, 1996", ["1996-09-16 UTC"]),
    ],
)
def test_fractions_and_dates_of_no_language_earn_nothing(
    language: str, entry: dict[str, Any], right: str, wrong: list[str]
):
    entry = {**entry, "language": language}
    task = Asked(family=language, prompt=f">>{language}<< x", answer=right, entry=entry)
    assert read_back(right, task) == 1.0
    for each in wrong:
        with_nothing(each, task)


@pytest.mark.parametrize("language", ["swe", "est"])
def test_a_code_that_num2words2_takes_for_another_language_is_refused(language: str):
    with pytest.raises(ParameterError, match=rf"task\.languages\.{language} must be a language"):
        tables(None, kinds={"numbers": 1.0}, languages=clean(language))


def with_nothing(answer: str, task: Asked) -> None:
    with suppress(ValueError):  # unparsable
        assert read_back(answer, task) == 0.0, (answer, task)


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"numbers", "dates"}))
def test_a_kind_that_cannot_be_read_back_is_refused_in_one_line(kind: str):
    train, *_ = tables(None, kinds={kind: 1.0})
    with pytest.raises(ParameterError, match=f"numbers and dates only, got {kind}; remove it"):
        read_back(train["answer"][0], asked(train.iloc[0]))


def test_a_language_whose_dates_are_not_read_is_refused_in_one_line():
    train, *_ = tables(None, kinds=DATES, languages=clean("tt"))
    with pytest.raises(ParameterError, match="languages whose dates dateparser reads, got tt"):
        read_back(train["answer"][0], asked(train.iloc[0]))


@pytest.mark.parametrize(
    ("changes", "warmup", "said"),
    [
        ({"languages": clean("xx")}, WARMUP, r"languages\.xx must be a language that num2words2"),
        ({"languages": clean("xx"), "kinds": DATES}, WARMUP, r"a language that babel knows"),
        ({"below": 60, "kinds": NUMBERS}, WARMUP, r"kinds\.numbers must leave 100 contents"),
        ({"below": 150, "kinds": NUMBERS}, WARMUP, r"0 contents are left"),
        ({"below": 10**6, "kinds": {"units": 1.0}}, WARMUP, r"at most 2000000 contents, has 1300"),
        ({"languages": UNSEEN, "below": 2000}, WARMUP, r"must be above 0"),
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
