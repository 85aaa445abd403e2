"""Judges behind a server: requests, order, retries, and failures that never become scores."""

import asyncio
import json
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo.errors import GrpoError, ParameterError, RefusedError, ServerError
from grpo.params.manifests import describe_data
from grpo.params.parameters import Parameters, read_params
from grpo.params.yaml import dump_yaml, parse_yaml
from grpo.rewards._servers import IN_A_ROW
from grpo.rewards.reward_server import RewardServerSettings, load
from grpo.runtime.servers import MOST_BYTES, RequestSettings, open_http, waits
from grpo.sampling.judging import JointJudge
from grpo.sampling.outcomes import Outcome
from tests.rewards.servers import Response, as_json, closed_url, inputs_with, serving, tasks_of

ROOT = Path(__file__).parents[2]
KEY = "sk-Very.Secret_Key-1"
SETTINGS: dict[str, Any] = {
    "concurrency": 4,
    "timeout_seconds": 5.0,
    "retries": 2,
    "retry_seconds": 0.01,
    "form": "columns",
    "rollouts_per_request": 1,
}
TEXTS = [f"text {n}" for n in range(20)]


def judge_of(url: str, **changed: Any) -> JointJudge:
    settings = RewardServerSettings(**{**SETTINGS, "url": url, **changed})
    return JointJudge(view=load(inputs_with(settings)), reads_media=False, rollouts_per_call=128)


def judge(url: str, texts: list[str], **changed: Any) -> list[Outcome]:
    judged = judge_of(url, **changed).judge(texts, tasks_of(*texts))
    return [outcome for _, outcome in judged]


def by_length(body: dict[str, list[str]]) -> Response:
    return as_json([len(each) / 100 for each in body["completions"]])


def test_columns_are_lists_of_one_item_per_rollout():
    with serving(by_length) as asked:
        outcomes = judge(asked.url, ["abc", "de"], rollouts_per_request=2)
    assert asked.bodies == [
        {
            "prompts": ["abc", "de"],
            "completions": ["abc", "de"],
            "answers": ["=abc", "=de"],
            "families": ["f", "f"],
            "entries": [{"n": 1}, {"n": 1}],
        }
    ]
    assert outcomes == [Outcome(0.03, "scored"), Outcome(0.02, "scored")]
    assert asked.keys == [None]


def test_openrlhf_has_queries_of_prompt_and_text_and_names_the_rewards():
    with serving(lambda body: as_json({"rewards": [1, 0.5], "extra_logs": {}})) as asked:
        outcomes = judge(asked.url, ["abc", "de"], form="openrlhf", rollouts_per_request=2)
    assert asked.bodies == [
        {"query": ["abcabc", "dede"], "prompts": ["abc", "de"], "labels": ["=abc", "=de"]}
    ]
    assert [each.score for each in outcomes] == [1.0, 0.5]


def test_scores_keep_the_order_of_their_rollouts_whatever_the_order_of_responses():
    """The first request is answered after the fourth has arrived; four are under way at most."""
    first, fourth = threading.Event(), threading.Event()

    def respond(body: dict[str, list[str]]) -> Response:
        (text,) = body["completions"]
        if text == TEXTS[3]:
            assert first.wait(5)
            fourth.set()
        if text == TEXTS[0]:
            first.set()
            assert fourth.wait(5)
        return as_json([int(text.split()[1]) / 100])

    with serving(respond) as asked:
        outcomes = judge(asked.url, TEXTS)
    assert [each.score for each in outcomes] == [n / 100 for n in range(20)]
    assert 2 <= asked.most_at_once <= 4


HTML = b"<html>Bad gateway</html>"


@pytest.mark.parametrize(
    ("broken", "tries", "detail"),
    [
        (Response(b"busy", 429), 3, "HTTP 429 busy"),
        (Response(b"oops", 500), 3, "HTTP 500 oops"),
        (Response(b"", 503), 3, "HTTP 503"),
        (Response(HTML), 3, "the response is no JSON: <html>Bad"),
        (Response(b"\xff\xfe"), 3, "the response is no JSON"),
        (Response(b"[" * 10**5), 3, "the response is no JSON"),
        (Response(b"too long", 413), 1, "HTTP 413 too long"),
        (Response(b"no", 400), 1, "HTTP 400 no"),
        (as_json([]), 1, "gave 0 scores for 1 rollouts"),
        (as_json([0.5, 0.5]), 1, "gave 2 scores for 1 rollouts"),
        (as_json({"rewards": [0.5]}), 1, "the response must be a list of scores, is {'rewards'"),
        (as_json([None]), 1, "gave None as a score; it must be a number"),
        (as_json(["0.5"]), 1, "gave '0.5' as a score; it must be a number"),
        (as_json([True]), 1, "gave True as a score"),
        (Response(b"[NaN]"), 1, "returned nan; it must be finite"),
        (Response(b"[1e999]"), 1, "returned inf; it must be finite"),
        (Response(b"[%s]" % (b"9" * 400)), 1, "gave a score that is too large"),
        (as_json([1.5]), 1, "returned 1.5, not in [0, 1]; state in its score_range"),
        (Response(b" " * (MOST_BYTES + 1)), 1, f"the response has more than {MOST_BYTES} bytes"),
        (Response(b"", 401), 1, "HTTP 401"),
        (Response(b"", 302, (("Location", "/elsewhere"),)), 1, "HTTP 302"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, str) else None,
)  # fmt: skip
def test_what_is_no_score_fails_its_rollout_alone(broken: Response, tries: int, detail: str):
    """One of two: the other is judged, so the server is not down."""

    def respond(body: dict[str, list[str]]) -> Response:
        return broken if body["completions"] == ["bad"] else as_json([0.5])

    with serving(respond) as asked:
        good, bad, last = judge(asked.url, ["good", "bad", "last"])
    assert good == last == Outcome(0.5, "scored")
    assert (bad.score, bad.status) == (0.0, "failed")
    assert detail in bad.detail
    assert [each["completions"][0] for each in asked.bodies].count("bad") == tries


def test_a_request_succeeds_if_its_last_retry_does():
    left = dict.fromkeys(TEXTS, 2)

    def respond(body: dict[str, list[str]]) -> Response:
        (text,) = body["completions"]
        left[text] -= 1
        return Response(b"", 503) if left[text] >= 0 else as_json([0.5])

    with serving(respond) as asked:
        assert judge(asked.url, TEXTS) == [Outcome(0.5, "scored")] * 20
    assert len(asked.bodies) == 3 * 20


def test_waits_double_up_to_a_minute():
    settings = RewardServerSettings(
        **{**SETTINGS, "url": "http://h/", "retries": 8, "retry_seconds": 1.0}
    )
    assert waits(settings) == [1, 2, 4, 8, 16, 32, 60, 60]


def test_one_rollout_of_a_request_cannot_make_the_others_fail():
    def respond(body: dict[str, list[str]]) -> Response:
        return Response(b"", 500) if "bad" in body["completions"] else by_length(body)

    with serving(respond) as asked:
        outcomes = judge(asked.url, ["ab", "bad", "abcd"], rollouts_per_request=3, retries=0)
    assert [each.status for each in outcomes] == ["scored", "failed", "scored"]
    assert [each.score for each in outcomes] == [0.02, 0.0, 0.04]
    assert [len(each["completions"]) for each in asked.bodies] == [3, 1, 1, 1]


def test_a_server_that_never_answers_fails_a_rollout_after_its_timeout():
    ended = threading.Event()

    def respond(body: dict[str, list[str]]) -> Response:
        if body["completions"] == ["bad"]:
            ended.wait(10)
        return as_json([0.5])

    with serving(respond) as asked:
        good, bad = judge(asked.url, ["good", "bad"], timeout_seconds=0.5, retries=1)
        ended.set()
    assert good.status == "scored"
    assert bad.status == "failed"
    assert bad.detail.endswith("/judge: no response within 0.5 seconds")
    assert len(asked.bodies) == 3


def failing(content: bytes = b"", status: int = 200) -> Callable[[Any], Response]:
    return lambda body: Response(content, status)


@pytest.mark.parametrize(
    ("status", "error", "requests"),
    [(503, ServerError, 3), (429, ServerError, 3), (500, ServerError, 3),
     (401, RefusedError, 1), (404, RefusedError, 1), (301, RefusedError, 1)],
)  # fmt: skip
@pytest.mark.parametrize("texts", [TEXTS, TEXTS[:1]], ids=["many", "one"])
def test_a_server_that_is_down_is_an_error_and_no_score(
    status: int, error: type[GrpoError], requests: int, texts: list[str]
):
    with serving(failing(b"no", status)) as asked, pytest.raises(error) as raised:
        judge(f"{asked.url}?token=hidden", texts, concurrency=1)
    rows = min(IN_A_ROW, len(texts))
    assert raised.type is error
    assert f"reward.judges[0].settings.url: {asked.url} gave no score for {rows} rollouts" in str(
        raised.value
    )
    assert f"HTTP {status} no" in str(raised.value)
    assert "hidden" not in str(raised.value)
    assert rows * requests <= len(asked.bodies) <= (rows + 1) * requests


def test_nothing_listens():
    url = closed_url()
    with pytest.raises(ServerError, match=f"settings.url: {url} gave no score for 16 .*Connect"):
        judge(url, TEXTS)


def test_fewer_failures_in_a_row_are_failed_rollouts():
    """15 of 20: the server was down for a while."""

    def respond(body: dict[str, list[str]]) -> Response:
        number = int(body["completions"][0].split()[1])
        return Response(b"", 503) if number < IN_A_ROW - 1 else as_json([0.5])

    with serving(respond) as asked:
        outcomes = judge(asked.url, TEXTS, retries=0)
    assert [each.status for each in outcomes] == ["failed"] * 15 + ["scored"] * 5


def test_what_a_server_cannot_judge_in_a_row_does_not_end_the_stage():
    with serving(failing(b"no", 400)) as asked:
        outcomes = judge(asked.url, TEXTS)
    assert {each.status for each in outcomes} == {"failed"}


def test_the_key_reaches_its_server_and_nothing_else(monkeypatch: pytest.MonkeyPatch):
    """Neither details, nor messages, nor a server that the first one redirects to."""
    monkeypatch.setenv("JUDGE_KEY", KEY)

    def echo(body: dict[str, list[str]]) -> Response:
        status = 401 if body["completions"] == ["b"] else 400
        return Response(f"the key {KEY} is wrong".encode(), status)

    with serving(echo) as asked:
        changed = {"key_variable": "JUDGE_KEY", "retries": 0}
        one, two = judge(asked.url, ["a1", "a2"], **changed)
        assert "the key *** is wrong" in one.detail
        assert KEY not in repr((one, two))
        with pytest.raises(ParameterError, match=r"HTTP 401 the key \*\*\* is wrong") as raised:
            judge(asked.url, ["b"], **changed)
        assert KEY not in str(raised.value)
    assert set(asked.keys) == {f"Bearer {KEY}"}
    with serving(by_length) as other:
        redirect = Response(b"", 307, (("Location", other.url),))
        with serving(lambda body: redirect) as first, pytest.raises(ParameterError):
            judge(first.url, ["b"], key_variable="JUDGE_KEY")
    assert len(first.keys) == 1
    assert other.bodies == []


@pytest.mark.parametrize("value", [None, "", "  ", "sk\nHost: elsewhere", "schlüssel"])
def test_a_missing_key_or_one_that_is_no_header_is_refused_unseen(
    value: str | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("JUDGE_KEY", value)
    with pytest.raises(ParameterError, match="environment variable JUDGE_KEY must hold") as raised:
        judge_of("http://127.0.0.1/", key_variable="JUDGE_KEY")
    assert not value or not value.strip() or value not in str(raised.value)


def content_with(settings: object, judge: str = "reward_server") -> dict[str, Any]:
    content: dict[str, Any] = parse_yaml((ROOT / "recipes/smoke.yaml").read_text())
    content["reward"]["judges"][0] |= {"judge": judge, "settings": settings}
    content["reward"] |= {"answer_pattern": None, "timeout_seconds": None}
    return content


def params_with(folder: Path, settings: object, judge: str = "reward_server") -> Parameters:
    path = folder / "params.yaml"
    path.write_text(dump_yaml(content_with(settings, judge)))
    return read_params(path)


RIGHT = {**SETTINGS, "url": "http://127.0.0.1:8000/judge"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"url": "ftp://host/"}, r"settings.url must be an address http://HOST/PATH or https"),
        ({"url": "http:///path"}, r"settings.url must be an address"),
        ({"url": "http://host:port/"}, r"settings.url must be an address"),
        ({"url": "http://user:hunter2@host/"}, r"settings.url must have no user or password"),
        ({"key_variable": "sk-hunter2"}, r"settings.key_variable must be the name of an env"),
        ({"tries": 3}, r"settings.tries is unknown, got 3"),
        ({"concurrency": 0}, r"settings.concurrency must be .* got 0"),
        ({"retries": "2"}, r"settings.retries must be an integer, got '2'"),
        ({"form": "trl"}, r"settings.form must be 'columns' or 'openrlhf', got 'trl'"),
        ({"rollouts_per_request": 129}, r"settings.rollouts_per_request must be at most 128"),
    ],
)
def test_a_wrong_setting_is_one_line_with_its_path(
    changed: dict[str, Any], message: str, tmp_path: Path
):
    with pytest.raises(ParameterError, match=rf"reward.judges\[0\].{message}") as raised:
        params_with(tmp_path, {**RIGHT, **changed})
    assert "hunter2" not in str(raised.value)


def test_settings_are_of_the_judges_that_have_some(tmp_path: Path):
    for settings in (None, {key: each for key, each in RIGHT.items() if key != "url"}):
        with pytest.raises(ParameterError, match=r"judges\[0\].settings(.url)? is missing"):
            params_with(tmp_path, settings)
    with pytest.raises(ParameterError, match=r"judges\[0\].settings must be a mapping, got 3"):
        params_with(tmp_path, 3)
    with pytest.raises(ParameterError, match=r"settings must be removed: the judge reward_model"):
        params_with(tmp_path, RIGHT, judge="reward_model")


def test_settings_survive_the_way_to_a_worker_and_change_the_manifest(tmp_path: Path):
    """Stages that cannot depend on the key depend on the manifest of the judge."""
    params = params_with(tmp_path, RIGHT)
    assert Parameters.model_validate_json(params.model_dump_json()) == params
    assert isinstance(params.reward.judges[0].settings, RewardServerSettings)
    before = describe_data(params, tmp_path, "judge")
    assert [*before] == ["reward.judges[0].settings"]
    assert json.dumps(before) == json.dumps(describe_data(params, tmp_path, "judge"))
    other = params_with(tmp_path, {**RIGHT, "form": "openrlhf"})
    assert describe_data(other, tmp_path, "judge") != before
    assert describe_data(other, tmp_path, "base") == {}


def test_trusted_certificates_are_read_once(monkeypatch: pytest.MonkeyPatch):
    url = "https://127.0.0.1:1"
    settings = RequestSettings(
        url=url, concurrency=1, timeout_seconds=1.0, retries=0, retry_seconds=1.0
    )
    asyncio.run(open_http(settings).aclose())
    monkeypatch.setattr(
        ssl.SSLContext, "load_verify_locations", lambda *_, **__: pytest.fail("read again")
    )
    asyncio.run(open_http(settings).aclose())
