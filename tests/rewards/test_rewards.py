"""Judges: what they accept, and that nothing a policy writes can crash a run."""

import itertools
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.errors import ArtifactError, GrpoError, ParameterError, ServerError
from grpo.params.parameters import Parameters, read_params
from grpo.params.yaml import dump_yaml, parse_yaml
from grpo.rewards import find_judge
from grpo.rewards.base import AnswerJudge, JudgeInputs, Task
from grpo.runtime.artifacts.tables import STATUSES
from grpo.sampling.judging import TextJudge, judge_text
from grpo.sampling.outcomes import Outcome
from grpo.sampling.scoring import RewardRule, rejected_gold_answers, require_judged, score_rollouts
from grpo.tasks.reasoning_gym import create_dataset
from grpo.wiring.rewards import check_gold_answers
from grpo.wiring.tasks import build_prompts
from tests.rewards.rules import rule_with

ROOT = Path(__file__).parents[2]
INPUTS = JudgeInputs(
    where="reward.judges[0]",
    model=None,
    data=ROOT / "data",
    machine=read_params(ROOT / "params.yaml").machine,
)
verify_math, score_answer = (find_judge(each).load(INPUTS) for each in ("math", "reasoning_gym"))
TASK = Task(family="gcd", prompt="gcd(12, 18)", answer="6", entry={"answer": "6", "metadata": {}})


def raises(answer: str, task: Task) -> float:
    raise RuntimeError("a judge's own bug")


def raising(error: BaseException) -> AnswerJudge:
    def judge(answer: str, task: Task) -> float:
        raise error

    return judge


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def misnames(answer: str, task: Task) -> float:
    return answr  # noqa: F821


def exits(answer: str, task: Task) -> float:
    sys.exit("done")


def leaves(answer: str, task: Task) -> float:
    os._exit(3)


def crashes(answer: str, task: Task) -> float:
    os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


async def waits(answer: str, task: Task) -> float:
    return 1.0


def hangs(answer: str, task: Task) -> float:
    time.sleep(5)
    return 1.0


def hangs_on(answer: str, task: Task) -> float:
    """A loop that goes on after every Exception, as judges that try several parsers do."""
    while True:
        with suppress(Exception):
            time.sleep(0.01)


def hangs_for_good(answer: str, task: Task) -> float:
    while True:
        with suppress(BaseException):
            time.sleep(0.01)


def hangs_in_c(answer: str, task: Task) -> float:
    return float(sum(range(10**12)))


MARK = "#([^#]*)"
LIMITS: dict[str, Any] = {"answer_pattern": MARK, "timeout_seconds": 5.0}


@pytest.mark.parametrize(
    ("judge", "text", "status", "score", "detail"),
    [
        (score_answer, "work 12,6#6", "scored", 1.0, ""),
        (score_answer, "#7 #6", "scored", 1.0, ""),  # the last match counts
        (score_answer, "no mark", "unparsable", 0.0, ""),
        (lambda answer, task: float(answer), "#x", "unparsable", 0.0, "ValueError: could not conv"),
        (lambda answer, task: True, "#6", "scored", 1.0, ""),
        (lambda answer, task: np.float32(0.5), "#6", "scored", 0.5, ""),
        (lambda answer, task: torch.tensor(0.5), "#6", "scored", 0.5, ""),
        (raises, "#6", "failed", 0.0, "RuntimeError: a judge's own bug"),
        (misnames, "#6", "failed", 0.0, "NameError: name 'answr' is not defined"),
        (exits, "#6", "failed", 0.0, "SystemExit: done"),
        (leaves, "#6", "failed", 0.0, "ended its process, exit code 3"),
        (crashes, "#6", "failed", 0.0, "ended its process, exit code -9"),
        (waits, "#6", "failed", 0.0, "returned a coroutine"),
        (lambda answer, task: None, "#6", "failed", 0.0, "returned NoneType None"),
        (lambda answer, task: "0.5", "#6", "failed", 0.0, "returned str '0.5'"),
        (lambda answer, task: [1.0], "#6", "failed", 0.0, "returned list [1.0]"),
        (lambda answer, task: np.ones(2), "#6", "failed", 0.0, "TypeError"),
        (lambda answer, task: 1 + 1e-12, "#6", "failed", 0.0, "returned 1.000000000001, not in"),
        (lambda answer, task: torch.ones(2), "#6", "failed", 0.0, "ValueError: only one element"),
        (lambda answer, task: Decimal("sNaN"), "#6", "failed", 0.0, "ValueError: cannot convert"),
        (raising(KeyboardInterrupt("no")), "#6", "failed", 0.0, "KeyboardInterrupt: no"),
        (raising(GeneratorExit()), "#6", "failed", 0.0, "GeneratorExit"),
        (raising(BaseException("own")), "#6", "failed", 0.0, "BaseException: own"),
        (raising(Mute()), "#6", "failed", 0.0, "Mute"),
        (raising(ValueError("\ud800")), "#6", "unparsable", 0.0, "ValueError: ?"),
        (raising(TimeoutError("http")), "#6", "timed_out", 0.0, "TimeoutError: http"),
        (lambda answer, task: math.nan, "#6", "failed", 0.0, "returned nan; it must be finite"),
        (lambda answer, task: 2.0, "#6", "failed", 0.0, "returned 2.0, not in [0, 1]; state in"),
        (lambda answer, task: -1, "#6", "failed", 0.0, "returned -1.0, not in [0, 1]"),
        (hangs, "#6", "timed_out", 0.0, ""),
        (hangs_on, "#6", "timed_out", 0.0, ""),
        (hangs_for_good, "#6", "timed_out", 0.0, ""),
        (hangs_in_c, "#6", "timed_out", 0.0, ""),
    ],
)
def test_whatever_a_judge_does_becomes_an_outcome_and_the_next_text_is_judged(
    judge, text: str, status: str, score: float, detail: str
):
    def asked(answer: str, task: Task) -> object:
        return 0.25 if answer == "next" else judge(answer, task)

    texts = TextJudge(asked, answer_pattern=MARK, timeout_seconds=0.2)
    before, outcome, after = texts.judge_texts(["#next", text, "again #next"], [TASK] * 3)
    assert before == after == Outcome(0.25, "scored")
    assert outcome[:2] == (score, status)
    assert outcome.detail.startswith(detail)
    assert bool(outcome.detail) == bool(detail)
    assert [*texts.judge_texts(["#next"], [TASK])] == [before]


def test_a_pattern_that_backtracks_ends_at_the_limit():
    texts = TextJudge(score_answer, answer_pattern="((?:a+)+)#", timeout_seconds=0.2)
    began = time.monotonic()
    slow, fast = texts.judge_texts(["a" * 60, "aaa#"], [TASK, TASK])
    assert slow.status == "timed_out"
    assert time.monotonic() - began < 10
    assert fast.status == "scored"


@given(
    raw=st.floats(allow_nan=False, allow_infinity=False),
    ends=st.tuples(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6)).filter(lambda e: e[0] < e[1]),
)
def test_any_finite_number_is_a_score_if_its_range_is_stated(raw: float, ends: tuple[float, float]):
    outcome = judge_text(
        lambda answer, task: raw,
        "6",
        TASK,
        answer_pattern=None,
        timeout_seconds=5.0,
        score_range=ends,
    )
    assert outcome.status == "scored"
    if raw <= ends[0]:
        assert outcome.score == 0
    elif raw >= ends[1]:
        assert outcome.score == 1
    else:
        assert outcome.score == (raw - ends[0]) / (ends[1] - ends[0])


@given(st.lists(st.sampled_from(["1", "2", "hang", "exit", "none"]), max_size=8))
@settings(max_examples=5, deadline=None)
def test_texts_keep_their_order_whatever_becomes_of_those_between(answers: list[str]):
    """Two tasks by turns; what was not asked again must not be answered twice."""
    other = replace(TASK, answer="10")

    def judge(answer: str, task: Task) -> float:
        {"hang": lambda: time.sleep(5), "exit": lambda: os._exit(1)}.get(answer, str)()
        return float(answer) / float(task.answer)

    tasks = [TASK if row % 2 else other for row in range(len(answers))]
    judge_them = TextJudge(judge, answer_pattern=MARK, timeout_seconds=0.05)
    outcomes = [*judge_them.judge_texts([f"#{each}" for each in answers], tasks)]
    statuses = {"hang": "timed_out", "exit": "failed", "none": "unparsable"}
    assert [each.status for each in outcomes] == [statuses.get(a, "scored") for a in answers]
    for answer, task, outcome in zip(answers, tasks, outcomes):
        if outcome.status == "scored":
            assert outcome.score == float(answer) / float(task.answer)


def test_equal_texts_of_a_task_are_judged_once():
    calls = itertools.count()
    other = replace(TASK, answer="10")
    judge = TextJudge(lambda answer, task: next(calls) / 10, **LIMITS)
    tasks = [TASK, TASK, TASK, other, TASK]
    outcomes = judge.judge_texts(["#1", "#2", "#1", "#1", "#2"], tasks)
    assert [each.score for each in outcomes] == [0.0, 0.1, 0.0, 0.2, 0.1]
    assert [each.score for each in judge.judge_texts(["#1"], [TASK])] == [0.3]


def test_texts_that_nobody_waits_for_answer_no_other():
    judge = TextJudge(lambda answer, task: float(answer) / 10, **LIMITS)
    first = judge.judge_texts(["#1", "#2", "#3"], [TASK] * 3)
    next(first)
    first.close()
    assert [each.score for each in judge.judge_texts(["#9"], [TASK])] == [0.9]


def test_no_process_outlives_its_judge():
    texts = TextJudge(lambda answer, task: os.getpid() % 1000 / 1000, **LIMITS)
    assert len([*texts.judge_texts(["#6"], [TASK])]) == 1
    (child,) = texts.process._children
    process = psutil.Process(child.process.pid)
    del texts
    assert not process.is_running()


STARTED = """
import numpy as np
import psutil
from grpo.sampling.judging import TextJudge

def of_child(judge):
    return psutil.Process(judge.process._children[0].process.pid).memory_full_info().uss

settings = {"answer_pattern": "^(.)", "timeout_seconds": 5.0}
early, late = (TextJudge(lambda answer, task: 1.0, **settings) for _ in range(2))
early.process.start()
loaded = np.ones(100 * 2**20, np.uint8)
late.process.start()
loaded += 1  # this process gets new pages, and a fork keeps those from before
print(of_child(late) - of_child(early))
"""


def test_a_judge_that_is_started_early_keeps_no_copy_of_what_is_loaded_later():
    """In a process of its own, whose freed memory is not used again."""
    done = subprocess.run(
        [sys.executable, "-c", STARTED], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) > 90 * 2**20


def rewards_of(*statuses: str) -> pd.DataFrame:
    rows = [
        {
            "rollout_id": f"p/{row}",
            "prompt_id": "p",
            "outcome": 0.0,
            "reward": 0.0,
            "status": status,
            "detail": "NameError: name 'answr' is not defined" if status == "failed" else "",
        }
        for row, status in enumerate(statuses)
    ]
    return pd.DataFrame(rows)


@given(st.lists(st.sampled_from(STATUSES), min_size=1, max_size=6))
def test_what_was_not_judged_is_said_and_a_judge_that_never_works_ends_the_stage(
    statuses: list[str],
):
    broken = {"failed", "timed_out", "unanswered"}
    if set(statuses) <= broken:
        with pytest.raises(GrpoError, match="no rollout was judged") as raised:
            require_judged(rewards_of(*statuses))
        assert raised.type is (ServerError if "unanswered" in statuses else GrpoError)
        return
    found = require_judged(rewards_of(*statuses))
    assert (found is None) == ("scored" in statuses and broken.isdisjoint(statuses))
    first = next((each for each in statuses if each in broken), None)
    assert first != "failed" or "answr" in (found or "")
    assert "scored" in statuses or "no rollout was judged" in (found or "")


def test_the_first_failure_is_told_with_its_rollout():
    found = require_judged(rewards_of("scored", "failed", "failed"))
    assert found == (
        "2 failed, 1 scored of 3 rollouts; the first is p/1 failed: NameError: name 'answr' is not "
        "defined"
    )


def test_a_judge_is_tried_on_the_tasks_own_answers():
    answers = ["1/2", "", "0.5", "(B)", "\\frac{3}{4}", "Paris"]
    prompts = pd.DataFrame({"answer": answers}).assign(
        prompt_id=[f"p{n}" for n in range(6)], family="f", prompt="?", entry="{}"
    )
    judge = TextJudge(verify_math, **LIMITS)
    refused = rejected_gold_answers(judge, prompts, threshold=0.99)
    assert refused["prompt_id"].tolist() == ["p1", "p3", "p5"]


@pytest.mark.parametrize("family", ["gcd", "lcm", "chain_sum", "products", "count_bits"])
def test_the_judge_accepts_its_own_answers_and_no_other(family: str):
    dataset = create_dataset(family, {}, size=20, seed=1)
    for entry in dataset:
        task = Task(family=family, prompt="", answer=entry["answer"], entry=entry)
        assert score_answer(entry["answer"], task) == 1.0
        assert score_answer(str(int(entry["answer"]) + 1), task) < 0.99
        assert score_answer("", task) < 0.99


def test_mathematical_equality_is_judged_by_math_verify():
    task = Task(family="math", prompt="", answer="\\frac{1}{2}", entry={})
    assert verify_math("$0.5$", task) == 1.0
    assert verify_math("$\\frac{2}{4}$", task) == 1.0
    assert verify_math("$0.6$", task) == 0.0


def rule_of(*, unfinished_penalty: float) -> RewardRule:
    judge = TextJudge(score_answer, answer_pattern="#([^#]*)", timeout_seconds=1.0)
    return rule_with(judge, threshold=0.99, unfinished_penalty=unfinished_penalty)


def _tables() -> tuple[pd.DataFrame, pd.DataFrame]:
    prompts = pd.DataFrame(
        {
            "prompt_id": ["p"],
            "family": "gcd",
            "prompt": "?",
            "answer": "6",
            "entry": '{"answer": "6"}',
        }
    )
    rollouts = pd.DataFrame(
        {
            "rollout_id": ["p/0", "p/1", "p/2"],
            "prompt_id": "p",
            "text": ["#6", "#5", "6"],
            "steps": 3,
            "is_finished": [False, True, True],
        }
    )
    return rollouts, prompts


def test_the_threshold_makes_outcomes_and_shaping_touches_only_the_reward():
    rule = rule_of(unfinished_penalty=0.25)
    rewards = score_rollouts(*_tables(), rule)
    assert rewards["outcome"].tolist() == [1.0, 0.0, 0.0]
    assert rewards["reward"].tolist() == [0.75, 0.0, 0.0]
    assert rewards["status"].tolist() == ["scored", "scored", "unparsable"]
    assert np.isfinite(rewards["reward"]).all()


def test_a_rollout_of_an_unknown_prompt_is_refused():
    rollouts, prompts = _tables()
    rule = rule_of(unfinished_penalty=0.0)
    with pytest.raises(ArtifactError, match="'p/0' must have a known prompt"):
        score_rollouts(rollouts, prompts.assign(prompt_id="q"), rule)


def params_with_math(tmp_path: Path) -> Parameters:
    content = parse_yaml((ROOT / "recipes" / "smoke.yaml").read_text())
    content["reward"] |= {"answer_pattern": MARK, "timeout_seconds": 5.0}
    content["reward"]["judges"][0]["judge"] = "math"
    file = tmp_path / "params.yaml"
    file.write_text(dump_yaml(content))
    return read_params(file)


@pytest.mark.parametrize("answer", ["Paris", ""])
@pytest.mark.parametrize(("refused", "ends"), [(0, False), (2, False), (3, True), (20, True)])
def test_a_task_whose_answers_the_judge_refuses_ends_before_training(
    tmp_path: Path, refused: int, ends: bool, answer: str
):
    """Two of twenty are a tenth: a warning; three are more."""
    params = params_with_math(tmp_path)
    answers = [answer] * refused + ["7"] * (20 - refused)
    prompts = pd.DataFrame({"answer": answers}).assign(
        prompt_id=[f"p{n}" for n in range(20)], family="f", prompt="?", entry="{}"
    )
    if ends:
        message = (
            rf"reward.judges\[0\].judge math rejects .* {refused} of 20 .*\w; use another judge"
        )
        with pytest.raises(ParameterError, match=message):
            check_gold_answers(params, prompts)
    elif refused:
        assert f"{answer!r}" in (check_gold_answers(params, prompts) or "")
    else:
        assert check_gold_answers(params, prompts) is None


@pytest.mark.parametrize("recipe", ["recipes/smoke.yaml", "recipes/glyphs.yaml"])
def test_the_tasks_of_recipes_have_answers_that_their_judges_accept(recipe: str):
    params = read_params(ROOT / recipe)
    tables = build_prompts(params, ROOT / "data")
    assert check_gold_answers(params, tables.train, tables.eval) is None
