"""Prompts: disjoint as text, deterministic, and solutions that the judge accepts."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from grpo.errors import ArtifactError, ParameterError
from grpo.rewards.base import Task
from grpo.rewards.reasoning_gym import score_answer
from grpo.runtime.chats import read_chat
from grpo.sampling.judging import judge_text
from grpo.sampling.outcomes import Outcome
from grpo.tasks.base import PromptTables
from grpo.tasks.jsonl import read_prompts
from grpo.tasks.reasoning_gym import COMPACT, make_prompts

FAMILIES = {
    "chain_sum": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    "products": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    "gcd": {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 40},
    "lcm": {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 40},
    "count_bits": {"min_n": 1, "max_n": 511},
    "letter_counting": {"min_words": 1, "max_words": 2},
    "simple_equations": {"min_terms": 2, "max_terms": 3, "min_value": 1, "max_value": 12},
}


def make(
    seed: int = 0, worked: float = 1.0, wrong: float = 0.0, warmup_prompts: int = 700, **changes
) -> PromptTables:
    warmup = SimpleNamespace(
        prompts=warmup_prompts, answer_mark="#", worked_fraction=worked, wrong_fraction=wrong
    )
    stated = {
        "families": FAMILIES,
        "notation": "compact",
        "instruction": "",
        "train_prompts": 140,
        "eval_prompts": 70,
        "warmup": warmup if warmup_prompts else None,
        "seed": seed,
    }
    return make_prompts(**{**stated, **changes})


def test_prompts_of_train_eval_and_warmup_are_disjoint_as_text():
    tables = make()
    train, evaluation, warmup = (set(table["prompt"]) for table in tables)
    assert (len(train), len(evaluation)) == (140, 70)
    assert not train & evaluation
    assert not warmup & (train | evaluation)
    assert (tables.train.groupby("family").size() == 20).all()


def test_the_same_seed_gives_the_same_prompts_and_another_seed_others():
    first, again, other = make(), make(), make(seed=1)
    for left, right in zip(first, again):
        assert left.equals(right)
    assert not first.train.equals(other.train)


@pytest.mark.parametrize("worked", [0.0, 1.0])
def test_the_judge_accepts_every_solution_of_the_warmup(worked: float):
    """Worked or not, a solution ends in the right answer unless it is made wrong on purpose."""
    tables = make(worked=worked)
    answers = dict(zip(tables.train["prompt"], tables.train["entry"]))
    assert answers
    for row in make(worked=worked, warmup_prompts=140).warmup.to_dict("records"):
        assert "#" in row["solution"]
    for row in tables.train.to_dict("records"):
        task = Task(
            family=row["family"],
            prompt=row["prompt"],
            answer=row["answer"],
            entry=json.loads(row["entry"]),
        )
        work = COMPACT[row["family"]].work(task.entry) if worked else ""
        text = f"{work}#{row['answer']}"
        outcome = judge_text(score_answer, text, task, answer_pattern="#(.*)", timeout_seconds=5.0)
        assert outcome == Outcome(1.0, "scored"), row["prompt"]


def test_work_ends_in_the_answer_where_it_computes_one():
    """4+5=9-2=7 ends in the answer 7; bits hold as many ones as they count."""
    for row in make().train.to_dict("records"):
        work = COMPACT[row["family"]].work(json.loads(row["entry"]))
        if row["family"] in {"chain_sum", "products"}:
            assert work.rpartition("=")[2] == row["answer"]
        if row["family"] == "count_bits":
            assert str(work.count("1")) == row["answer"]
        if row["family"] == "letter_counting":
            assert str(len(work)) == row["answer"]
        if row["family"] == "simple_equations":
            numerator, denominator = map(int, work.split("/"))
            assert numerator == denominator * int(row["answer"])


def test_wrong_solutions_are_wrong_as_often_as_asked():
    """Of 700 hasty answers, half are drawn from other prompts; some of those are right by luck."""
    tables = make(worked=0.0, wrong=1.0, families={"chain_sum": FAMILIES["chain_sum"]})
    wrong = 0
    for row in tables.warmup.to_dict("records"):
        value = _evaluate(row["prompt"][1:-1])
        wrong += value != int(row["solution"].lstrip("#"))
    assert 0.85 < wrong / len(tables.warmup) < 1


def _evaluate(expression: str) -> int:
    return sum(int(term) for term in expression.replace("-", "+-").split("+") if term)


def test_full_questions_are_those_of_reasoning_gym():
    tables = make(notation="question", warmup_prompts=0, families={"gcd": FAMILIES["gcd"]})
    assert tables.train["prompt"].str.startswith("Find the Greatest Common Divisor").all()
    assert len(tables.warmup) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"families": {"poetry": {}}, "notation": "question"},
            "task.families.poetry must be a reasoning-gym family",
        ),
        ({"families": {"gcd": {"min_value": "x"}}}, "task.families.gcd must be"),
        ({"families": {"gcd": {"max_value": 99.5}}}, "task.families.gcd must be"),  # when drawn
        ({"families": {"gcd": {"max_value": 5, "max_numbers": 2}}}, "different prompts"),
        ({"families": {"sudoku": {}}}, "no compact notation"),
    ],
)
def test_families_that_cannot_be_are_refused(changes: dict, message: str):
    with pytest.raises(ParameterError, match=message):
        make(**changes)


def _write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def test_own_prompts_are_read_from_json_lines(tmp_path: Path):
    train = _write(
        tmp_path / "train.jsonl", {"prompt": "1+1", "answer": 2}, {"prompt": "a", "answer": "b"}
    )
    evaluation = _write(tmp_path / "eval.jsonl", {"prompt": "2+2", "answer": "4", "family": "sums"})
    tables = read(train, evaluation, instruction="?")
    assert tables.train["prompt"].tolist() == ["1+1?", "a?"]
    assert tables.train["answer"].tolist() == ["2", "b"]
    assert tables.train["family"].tolist() == ["own", "own"]
    assert tables.eval["family"].tolist() == ["sums"]


@pytest.mark.parametrize(
    ("train", "evaluation", "message"),
    [
        ([{"prompt": "a"}], [{"prompt": "b", "answer": "c"}], r"train.jsonl: line 1 must have"),
        (["text"], [{"prompt": "b", "answer": "c"}], r"train.jsonl: line 1 must be"),
        (
            [{"prompt": "b", "answer": "c"}] * 2,
            [{"prompt": "b", "answer": "c"}],
            r"line 2: .* duplicates .*line 1 ",
        ),
    ],
)
def test_wrong_json_lines_are_refused(tmp_path: Path, train: list, evaluation: list, message: str):
    first = _write(tmp_path / "train.jsonl", *train)
    second = _write(tmp_path / "eval.jsonl", *evaluation)
    with pytest.raises(ArtifactError, match=message):
        read(first, second)


def read(train: Path, evaluation: Path, **changes) -> PromptTables:
    stated = {"instruction": "", "family": "own", "columns": {}, "takes_messages": False}
    return read_prompts(train=train, evaluation=evaluation, **{**stated, **changes})


def read_text(tmp_path: Path, train: str | bytes, **changes) -> PromptTables:
    """Returns the prompts of a train file beside an eval file of one other prompt."""
    suffix = changes.pop("suffix", "jsonl")
    file = tmp_path / f"train.{suffix}"
    file.write_bytes(train if isinstance(train, bytes) else train.encode())
    return read(file, _write(tmp_path / "eval.jsonl", {"prompt": "0+0", "answer": "0"}), **changes)


@settings(
    deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=4,
))  # fmt: skip
@example(None)
@example(True)
@example([1])
@example(float("nan"))
def test_an_answer_is_the_text_in_the_file_or_refused(tmp_path: Path, answer: object):
    spelled = json.dumps(answer)
    line = f'{{"prompt": "a", "answer": {spelled}}}'
    is_number = isinstance(answer, int | float) and not isinstance(answer, bool)
    if (isinstance(answer, str) and "\0" not in answer) or (is_number and math.isfinite(answer)):
        expected = answer if isinstance(answer, str) else spelled
        assert read_text(tmp_path, line).train["answer"].tolist() == [expected]
    else:
        with pytest.raises(ArtifactError, match=r"train\.jsonl: line 1: answer must") as raised:
            read_text(tmp_path, line)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("spelling", ["1.50", "007e1", "1e5", "-0", "9" * 5000, "1E-2"])
def test_a_number_keeps_its_own_spelling(tmp_path: Path, spelling: str):
    line = f'{{"prompt": 1.50, "answer": {spelling}}}'
    if spelling.startswith("00"):
        with pytest.raises(ArtifactError, match=r"line 1 must be JSON"):
            read_text(tmp_path, line)
    else:
        table = read_text(tmp_path, line).train
        assert (table["prompt"][0], table["answer"][0]) == ("1.50", spelling)


A = '{"prompt": "a", "answer": "b"}'
CHAT = '{"prompt": [{"role": "user", "content": "a"}], "answer": "b"}'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": null, "answer": "b"}', "line 1: prompt must be a text or a number, got null"),
        ('{"prompt": "a", "answer": "b", "family": null}', "line 1: family must be .* got null"),
        ('{"prompt": " ", "answer": "b"}', "line 1: prompt must not be empty"),
        ('{"prompt": "a", "answer": "b", "family": ""}', "line 1: family must not be empty"),
        ('{"prompt": "a", "answer": NaN}', "line 1: answer must be a text or a number, got NaN"),
        (f'{A[:-1]}, "of": {{"n": {"9" * 5000}}}}}', "line 1: of must have numbers of at most"),
        ('{"prompt": "a", "answer": "b", "answer": "c"}', "line 1 must have each name once"),
        ('{"prompt": "\\ud800", "answer": "b"}', "line 1: prompt must be Unicode, got a lone"),
        ("[" * 100_000, "the array must be JSON, got too many nested levels"),
        ('{"prompt": ' + "[" * 100_000, "line 1 must be JSON, got too many nested levels"),
        (b"\xff\xfe", "must be a JSON-lines file in UTF-8"),
        ("", "must have at least one prompt, got none"),
        ("\n\n", "must have at least one prompt, got none"),
        ("[]", "must have at least one prompt, got none"),
        (f"{A}\n\n{A}", r"line 3: the prompt 'a' duplicates .*train.jsonl: line 1 \("),
        (f"[{A},{A}]", r"item 2: the prompt 'a' duplicates .*train.jsonl: item 1 \("),
        (f"{A}\n[1", "line 2 must be JSON"),
        (CHAT, "line 1: prompt is a list of messages, which needs policy.prompt_format chat"),
        ('{"question": "a", "solution": "b"}', r"line 1 must have 'prompt', got .*; "
         r"set task.columns to {prompt: question}"),
        ('{"prompt": "a", "solution": "b"}', r".*; set task.columns to {answer: solution}"),
    ],
)  # fmt: skip
def test_a_file_of_prompts_is_read_as_it_is_or_refused_in_one_line(
    tmp_path: Path, content: str | bytes, message: str
):
    with pytest.raises(ArtifactError, match=rf"train\.jsonl: {message}") as raised:
        read_text(tmp_path, content)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize(
    "prompt",
    [
        "What is 3?",
        "What is 3? ",
        "what IS 3?",
        "What is\t3?",
        "What is \uff13?",
        "What\u200b is 3?",
        "\ufeffWhat is 3?",
    ],
)
@pytest.mark.parametrize("written", ["café", "cafe\u0301"])
def test_a_prompt_of_both_files_is_found_whatever_its_case_and_composition(
    tmp_path: Path, prompt: str, written: str
):
    train = _write(tmp_path / "train.jsonl", {"prompt": "What is 3? café", "answer": "3"})
    leak = _write(tmp_path / "eval.jsonl", {"prompt": f"{prompt} {written}", "answer": "3"})
    with pytest.raises(
        ArtifactError, match=r"eval.jsonl: line 1: .* duplicates .*train.jsonl: line 1"
    ):
        read(train, leak)


def test_loose_forms_may_stand_in_one_file(tmp_path: Path):
    assert len(read_text(tmp_path, f"{A}\n{A.replace('a', 'A', 1)}").train) == 2


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([1.5, 2.5], "column 'answer': they are floats; store numbers as text, because floats"),
        ([1, None], "row 2: answer is missing, the others are floats; store numbers as text"),
    ],
)
def test_floats_of_a_table_are_refused_for_their_spelling(
    tmp_path: Path, answers: list[float | None], message: str
):
    table = tmp_path / "train.parquet"
    frame = pd.DataFrame({"prompt": ["a", "b"], "answer": answers, "weight": [0.5, 1.0]})
    frame.to_parquet(table)
    evaluation = _write(tmp_path / "eval.jsonl", {"prompt": "0+0", "answer": "0"})
    with pytest.raises(ArtifactError, match=rf"train\.parquet: {message}"):
        read(table, evaluation)
    frame.assign(answer=[str(each) for each in answers]).to_parquet(table)
    assert len(read(table, evaluation).train) == 2


def test_other_columns_are_entries_for_judges(tmp_path: Path):
    more = (
        '"level": 3, "share": 1.50, "odd": NaN, "tags": ["x", null], "of": {"n": 1e3}, "ok": true, '
        '"large": -1e999'
    )
    entry = {
        "level": 3, "share": 1.5, "odd": None, "tags": ["x", None], "of": {"n": 1000.0}, "ok": True,
        "large": None,
    }  # fmt: skip
    (found,) = read_text(tmp_path, f"{A[:-1]}, {more}}}").train["entry"]
    assert json.loads(found) == entry
    table = tmp_path / "train.parquet"
    rows = [{"prompt": "a", "answer": "b", "level": 3, "share": 1.5, "raw": b"x"}]
    pd.DataFrame(rows).to_parquet(table)
    evaluation = _write(tmp_path / "eval.jsonl", {"prompt": "0+0", "answer": "0"})
    (found,) = read(table, evaluation).train["entry"]
    assert json.loads(found) == {"level": 3, "share": 1.5}  # JSON has no bytes


def test_chats_arrays_parquet_and_other_columns_are_read(tmp_path: Path):
    plain = read_text(tmp_path, A)
    assert read_text(tmp_path, CHAT, takes_messages=True).train.equals(plain.train)
    assert read_text(tmp_path, f"\ufeff\r\n[{A}]\r\n", suffix="json").train.equals(plain.train)
    others = '{"question": "a", "solution": "b"}'
    columns = {"prompt": "question", "answer": "solution"}
    file, other = tmp_path / "train.jsonl", tmp_path / "other.jsonl"
    file.write_text(others)
    other.write_text(others.replace('"a"', '"c"'))
    renamed = read(file, other, columns=columns).train
    assert renamed.assign(entry="{}").equals(plain.train)
    assert renamed["entry"].tolist() == ['{"solution": "b"}']  # for functions that name it
    table = tmp_path / "train.parquet"
    pd.DataFrame([{"prompt": "a", "answer": "b"}]).to_parquet(table)
    evaluation = _write(tmp_path / "eval.jsonl", {"prompt": "0+0", "answer": "0"})
    assert read(table, evaluation).train.equals(plain.train)
    late = pa.array([2**40], pa.timestamp("s"))  # beyond the years that Python has
    parquet.write_table(pa.table({"prompt": ["a"], "answer": ["b"], "at": late}), table)
    with pytest.raises(ArtifactError, match=r"train\.parquet: holds a value that Python lacks"):
        read(table, evaluation)
    table.write_text("no table")
    with pytest.raises(ArtifactError, match=r"train\.parquet: must be a parquet file"):
        read(table, evaluation)


def test_a_chat_keeps_its_messages_and_the_instruction_follows_the_last(tmp_path: Path):
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "And 2+2?"},
    ]
    line = json.dumps({"prompt": chat, "answer": "4"})
    prompts = read_text(tmp_path, line, takes_messages=True, instruction=" Go.").train
    chat[-1]["content"] += " Go."
    assert read_chat(prompts["prompt"][0]) == chat


@pytest.mark.parametrize(
    "chat",
    [
        [{"role": "system", "content": "x"}],
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
        [{"role": "tool", "content": "x"}, {"role": "user", "content": "y"}],
        [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        [{"role": "user", "content": "x", "name": "y"}],
        [{"role": "system", "content": " "}, {"role": "user", "content": "x"}],
        [],
    ],
)
def test_a_chat_that_no_policy_could_answer_is_refused(tmp_path: Path, chat: list[Any]):
    line = json.dumps({"prompt": chat, "answer": "b"})
    with pytest.raises(ArtifactError, match=r"line 1: prompt must "):
        read_text(tmp_path, line, takes_messages=True)


def test_a_chat_as_a_text_is_refused(tmp_path: Path):
    said = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
    line = json.dumps({"prompt": json.dumps(said), "answer": "b"})
    for takes_messages in (False, True):
        with pytest.raises(ArtifactError, match=r"line 1: prompt is a text with a list"):
            read_text(tmp_path, line, takes_messages=takes_messages)
