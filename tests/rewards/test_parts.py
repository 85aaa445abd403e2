"""Judges that score parts: what they may return, and the parts of worked solutions."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.errors import ParameterError
from grpo.params.parameters import read_params
from grpo.params.yaml import dump_yaml, parse_yaml
from grpo.rewards._notations import STEPS
from grpo.rewards.base import Judge, Part, Reader, Scored, Task, View
from grpo.rewards.worked_solution import score_solution
from grpo.runtime.artifacts.tables import PARTS, REWARDS, read_table, write_table
from grpo.runtime.executors.base import Local, Work
from grpo.sampling.judging import JointJudge, TextJudge, judge_text
from grpo.sampling.outcomes import Outcome
from grpo.sampling.rollouts import SampledBatch, write_batch
from grpo.sampling.scoring import judge_rollouts, judge_stored, judging_skill
from grpo.types import Cost
from tests.rewards.rules import rule_with
from tests.tasks.test_notations import FAMILIES, make

ROOT = Path(__file__).parents[2]
MARK = "#([^#]*)"
TASK = Task(family="f", prompt="p", answer="", entry={})
GCD = Task(
    family="gcd",
    prompt="G48,18=",
    answer="6",
    entry={"answer": "6", "metadata": {"numbers": [48, 18]}},
)


def score_words(text: str, task: Task) -> Scored:
    """Returns a score per word: 1 for one that has only digits."""
    if text == "exit":
        os._exit(3)
    ends, end = list[Part](), 0
    for word in text.split():
        end = text.index(word, end) + len(word)
        ends.append(Part(end, float(word.isdigit())))
    return Scored(0.5, ends)


def judged(result: object, score_range: tuple[float, float] | None = None) -> Outcome:
    """Returns the outcome of a judge with this result for a text of four characters."""
    returns: Any = lambda text, task: result  # noqa: E731
    return judge_text(
        returns,
        "1 23",
        TASK,
        answer_pattern=None,
        timeout_seconds=5.0,
        score_range=score_range,
        scores_parts=True,
    )


def test_a_judge_of_parts_reads_whole_texts_in_its_process():
    texts = TextJudge(score_words, answer_pattern=None, timeout_seconds=5.0, scores_parts=True)
    first, crashed, last = texts.judge_texts([" 12 b ", "exit", ""], [TASK] * 3)
    assert first == Outcome(0.5, "scored", "", (Part(3, 1.0), Part(5, 0.0)))
    assert (crashed.status, crashed.parts) == ("failed", ())
    assert last == Outcome(0.5, "scored", "", ())


@pytest.mark.parametrize(
    ("result", "detail"),
    [
        (0.5, "returned float 0.5; with scores_parts it must be a Scored"),
        (Scored(2.0, []), "returned 2.0, not in [0, 1]"),
        (Scored(0.5, [Part(4, 1.5)]), "returned 1.5, not in [0, 1]"),
        (Scored(0.5, [Part(4, float("nan"))]), "returned nan; it must be finite"),
        (
            Scored(0.5, [Part(5, 1.0)]),
            "returned a part that ends at 5; ends must rise from 1 to at",
        ),
        (Scored(0.5, [Part(0, 1.0)]), "returned a part that ends at 0"),
        (Scored(0.5, [Part(3, 1.0), Part(3, 1.0)]), "returned a part that ends at 3"),
        (Scored(0.5, [(2.5, 1.0)]), "TypeError"),
    ],
)
def test_what_is_no_score_of_parts_has_failed(result: object, detail: str):
    outcome = judged(result)
    assert (outcome.score, outcome.status, outcome.parts) == (0.0, "failed", ())
    assert outcome.detail.startswith(detail)


def test_the_score_range_maps_the_scores_of_parts_too():
    outcome = judged(Scored(0.0, [Part(1, -3.0), Part(4, 9.0)]), (-3.0, 3.0))
    assert outcome == Outcome(0.5, "scored", "", (Part(1, 0.0), Part(4, 1.0)))


def test_a_judge_that_reads_together_scores_parts_of_each_text():
    def view(texts: Sequence[str], tasks: Sequence[Task]) -> list[View]:
        return [View("", *score_words(text, task)) for text, task in zip(texts, tasks)]

    reader: Reader = view
    judge = JointJudge(view=reader, reads_media=False, scores_parts=True)
    outcomes = [outcome for _, outcome in judge.judge(["1 b", "c"], [TASK] * 2)]
    assert [each.parts for each in outcomes] == [(Part(1, 1.0), Part(3, 0.0)), (Part(1, 0.0),)]


def test_only_texts_have_parts():
    with pytest.raises(ValueError, match="scores_parts needs a judge that reads text, got 'media'"):
        Judge(reads="media", load=lambda inputs: score_words, scores_parts=True)


# Of gcd(48, 18) the work is 48,18 30,18 12,18 12,06 06,06.
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("48,18 30,18#6", [(5, 1), (11, 1), (13, 1)]),  # what is missing is not scored
        ("48,18 31,18 12,18#6", [(5, 1), (11, 0), (17, 0), (19, 0)]),  # wrong from there on
        ("48,18 30,18#5", [(5, 1), (11, 1), (13, 0)]),
        ("#6", [(2, 1)]),
        ("#7#6", [(2, 0), (4, 0)]),  # the last match is the answer, all before it is work
        ("48,18 30", [(5, 1), (8, 0)]),  # cut off within a part
        ("48,18  30,18 ", [(5, 1), (12, 1)]),
        ("48,18 30,18 12,18 12,06 06,06 00,06#6", [(5, 1), (11, 1), (17, 1), (23, 1), (29, 1),
                                                   (35, 0), (37, 0)]),
        ("", []),
    ],
)  # fmt: skip
def test_a_wrong_part_and_all_after_it_score_0(text: str, parts: list[tuple[int, int]]):
    found = score_solution(text, GCD, answer_pattern=MARK)
    assert found.parts == parts
    assert found.score == pytest.approx(sum(score for _, score in parts) / max(len(parts), 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_part_of_a_true_solution_is_right_and_a_change_spoils_the_rest(family: str):
    for row in make(families={family: FAMILIES[family]}).train.to_dict("records"):
        entry = json.loads(row["entry"])
        task = Task(**{name: row[name] for name in ("family", "prompt", "answer")}, entry=entry)
        work = STEPS[family].work(entry)
        text = f"{work}#{row['answer']}"
        score, parts = score_solution(text, task, answer_pattern=MARK)
        assert score == 1.0
        assert len(parts) == len([part for part in work.split(STEPS[family].separator) if part]) + 1
        assert parts[-1].end == len(text)
        for place, (end, _) in enumerate(parts[:-1]):
            changed = f"{text[: end - 1]}@{text[end:]}"
            found = score_solution(changed, task, answer_pattern=MARK)
            assert [each.score for each in found.parts] == [1.0] * place + [0.0] * (
                len(parts) - place
            )


WORDS = st.lists(st.text("ab1 #é", max_size=8), min_size=1, max_size=6)


@given(texts=WORDS)
@settings(max_examples=10, deadline=None)
def test_stored_rollouts_and_those_in_memory_have_the_same_parts(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
):
    """And the file of rewards comes back with the same bytes."""
    directory = tmp_path_factory.mktemp("parts")
    rollouts = pd.DataFrame(
        {
            "rollout_id": [f"p/{row}" for row in range(len(texts))],
            "prompt_id": "p",
            "group": 0,
            "text": texts,
            "steps": [len(text) for text in texts],
            "is_finished": True,
        }
    )
    prompts = pd.DataFrame(
        {"prompt_id": ["p"], "family": "f", "prompt": "p", "answer": "", "entry": "{}"}
    )
    texts_judge = TextJudge(
        score_words, answer_pattern=None, timeout_seconds=5.0, scores_parts=True
    )
    rule = rule_with(texts_judge)
    in_memory = judge_rollouts(rollouts, prompts, rule).rewards
    write_batch(directory / "batch", SampledBatch(table=rollouts, tensors={}, cost=Cost()))
    executor = Local(Work({"judge": judging_skill(rule.judges, prompts)}))
    stored = judge_stored(
        executor, [directory / "batch"], rule.shaping, scratch=directory / "judged"
    ).rewards
    pd.testing.assert_frame_equal(stored, in_memory)
    expected = [[list(part) for part in score_words(text, TASK).parts] for text in texts]
    assert [json.loads(cell) for cell in stored[PARTS]] == expected
    for name, frame in (("a", stored), ("b", in_memory)):
        write_table(frame, directory / name, REWARDS)
    assert (directory / "a").read_bytes() == (directory / "b").read_bytes()
    pd.testing.assert_frame_equal(read_table(directory / "a", REWARDS), stored)


def judge_named(name: str) -> dict[str, Any]:
    settings = {"normalize": "none", "model": None, "score_range": None}
    return {"judge": name, "weight": 1.0, **settings}


def test_the_judge_of_worked_solutions_needs_their_notation(tmp_path: Path):
    params = parse_yaml((ROOT / "recipes/smoke.yaml").read_text())
    params["reward"]["judges"].append(judge_named("worked_solution"))
    path = tmp_path / "params.yaml"
    path.write_text(dump_yaml(params))
    needed = r"reward.judges\[1\].judge worked_solution needs task.notation steps, got 'compact'"
    with pytest.raises(ParameterError, match=needed):
        read_params(path)
    params["task"]["notation"] = "steps"
    path.write_text(dump_yaml(params))
    assert read_params(path).reward.judges[1].judge == "worked_solution"
