"""The judge that asks a language model: its requests, and what is no score."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo.errors import ParameterError, ServerError
from grpo.rewards.base import Task
from grpo.rewards.llm import LlmSettings, fill_template, load
from grpo.sampling.judging import JointJudge
from grpo.sampling.outcomes import Outcome
from tests.rewards.servers import Response, as_json, closed_url, inputs_with, serving, tasks_of
from tests.rewards.test_reward_server import params_with

SETTINGS: dict[str, Any] = {
    "concurrency": 4,
    "timeout_seconds": 5.0,
    "retries": 1,
    "retry_seconds": 0.01,
    "name": "judge-7b",
    "template": 'Rate {completion} of {prompt}, which is {answer}. {"score": 1}',
    "score_pattern": "score: ([^ ]+)",
}


def judge(
    url: str,
    texts: list[str],
    prompts: list[str],
    **changed: Any,
) -> list[Outcome]:
    settings = LlmSettings(**{**SETTINGS, "url": url, **changed})
    view = load(inputs_with(settings))
    joint = JointJudge(view=view, reads_media=False, score_range=(0, 10), rollouts_per_call=128)
    return [outcome for _, outcome in joint.judge(texts, tasks_of(*prompts))]


def saying(text: object) -> Response:
    return as_json({"choices": [{"message": {"role": "assistant", "content": text}}]})


def test_a_message_is_the_filled_template_and_the_last_match_the_score():
    with serving(lambda body: saying("first score: 1 , then score: 7 of 10")) as asked:
        outcomes = judge(asked.url, ["ab"], ["1+1"], max_tokens=64)
    assert outcomes == [Outcome(0.7, "scored")]
    message = 'Rate ab of 1+1, which is =1+1. {"score": 1}'
    assert asked.bodies == [
        {
            "model": "judge-7b",
            "messages": [{"role": "user", "content": message}],
            "temperature": 0.0,
            "max_tokens": 64,
        }
    ]


@given(prompt=st.text(), answer=st.text(), text=st.text())
def test_what_a_text_has_in_braces_is_not_replaced(prompt: str, answer: str, text: str):
    """A rollout that writes {answer} does not see the answer."""
    task = Task(family="f", prompt=f"{prompt}{{answer}}", answer=f"{answer}{{prompt}}", entry={})
    filled = fill_template("{prompt}|{completion}|{answer}|{other}", f"{text}{{answer}}", task)
    assert filled == f"{prompt}{{answer}}|{text}{{answer}}|{answer}{{prompt}}|{{other}}"


def test_equal_messages_are_sent_once_and_each_rollout_gets_its_score():
    def respond(body: dict[str, Any]) -> Response:
        found = re.search(r"Rate (\d)", body["messages"][0]["content"])
        assert found
        return saying(f"score: {found[1]}")

    with serving(respond) as asked:
        outcomes = judge(asked.url, [*"31413"], ["p"] * 4 + ["q"])
    assert [each.score for each in outcomes] == [0.3, 0.1, 0.4, 0.1, 0.3]
    assert len(asked.bodies) == 4
    assert "max_tokens" not in asked.bodies[0]


@pytest.mark.parametrize(
    ("response", "detail"),
    [
        (saying("I cannot say"), "score_pattern matches nowhere in the answer 'I cannot say'"),
        (saying("score: high"), "gave 'high' as a score; it must be a number"),
        (saying("score: nan"), "returned nan; it must be finite"),
        (saying(None), "the response has no text of a message"),
        (as_json({"choices": []}), "the response has no text of a message"),
        (as_json({"error": "overloaded"}), "the response has no text of a message: {'error'"),
        (as_json(["score: 1"]), "the response has no text of a message"),
        (Response(b"the prompt is too long", 400), "HTTP 400 the prompt is too long"),
    ],
)  # fmt: skip
def test_an_answer_without_a_score_fails_its_rollout(response: Response, detail: str):
    with serving(lambda body: response) as asked:
        (outcome,) = judge(asked.url, ["ab"], ["p"])
    assert (outcome.score, outcome.status) == (0.0, "failed")
    assert detail in outcome.detail
    assert len(asked.bodies) == 1


def test_a_server_that_is_down_is_an_error():
    url = closed_url()
    with pytest.raises(ServerError, match=f"settings.url: {url} gave no score for 2 rollouts"):
        judge(url, ["a", "b", "a"], ["p", "p", "p"])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"template": "{prompt}"}, "settings.template must have {completion}, the place of the"),
        ({"score_pattern": "score"}, "settings.score_pattern must have exactly one group, the sc"),
        ({"score_pattern": "("}, "settings.score_pattern must be a regular expression"),
        ({"name": ""}, "settings.name must have at least 1 character"),
        ({"model": "judge-7b"}, "settings.model is unknown"),
    ],
)
def test_a_wrong_setting_is_one_line_with_its_path(
    changed: dict[str, Any], message: str, tmp_path: Path
):
    settings = {**SETTINGS, "url": "http://127.0.0.1/v1/chat/completions", **changed}
    with pytest.raises(ParameterError, match=re.escape(f"reward.judges[0].{message}")):
        params_with(tmp_path, settings, judge="llm")
