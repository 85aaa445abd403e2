"""Prompts: disjoint as text, deterministic, and solutions that the judge accepts."""

import json
from pathlib import Path

import pytest

from grpo.errors import ArtifactError, ParameterError
from grpo.rewards.base import Task, judge_text
from grpo.rewards.reasoning import score_answer
from grpo.tasks.base import PromptTables
from grpo.tasks.jsonl import read_prompts
from grpo.tasks.notation import COMPACT
from grpo.tasks.reasoning import Solutions, make_prompts

FAMILIES = {
    "chain_sum": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    "products": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    "gcd": {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 40},
    "lcm": {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 40},
    "count_bits": {"min_n": 1, "max_n": 511},
    "letter_counting": {"min_words": 1, "max_words": 2},
    "simple_equations": {"min_terms": 2, "max_terms": 3, "min_value": 1, "max_value": 12},
}


def make(seed: int = 0, worked: float = 1.0, wrong: float = 0.0, **changes) -> PromptTables:
    settings = {
        "families": FAMILIES,
        "notation": "compact",
        "instruction": "",
        "train_prompts": 140,
        "eval_prompts": 70,
        "warmup_prompts": 700,
        "solutions": Solutions("#", worked, wrong),
        "seed": seed,
    }
    return make_prompts(**{**settings, **changes})


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
        assert outcome == (1.0, "scored"), row["prompt"]


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
    tables = read_prompts(train=train, evaluation=evaluation, instruction="?", family="own")
    assert tables.train["prompt"].tolist() == ["1+1?", "a?"]
    assert tables.train["answer"].tolist() == ["2", "b"]
    assert tables.train["family"].tolist() == ["own", "own"]
    assert tables.eval["family"].tolist() == ["sums"]


@pytest.mark.parametrize(
    ("train", "evaluation", "message"),
    [
        ([{"prompt": "a"}], [{"prompt": "b", "answer": "c"}], r"train.jsonl: line 1 must be"),
        (["text"], [{"prompt": "b", "answer": "c"}], r"train.jsonl: line 1 must be"),
        ([{"prompt": "b", "answer": "c"}] * 2, [{"prompt": "b", "answer": "c"}], "stand in"),
    ],
)
def test_wrong_json_lines_are_refused(tmp_path: Path, train: list, evaluation: list, message: str):
    first = _write(tmp_path / "train.jsonl", *train)
    second = _write(tmp_path / "eval.jsonl", *evaluation)
    with pytest.raises(ArtifactError, match=message):
        read_prompts(train=first, evaluation=second, instruction="", family="own")
