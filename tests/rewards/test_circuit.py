"""The circuit of a judge's server: opens after failures in a row, and a probe closes it."""

import threading
import time
from typing import Any

import pytest

from grpo.errors import RefusedError, ServerError
from grpo.runtime.circuit import Circuit, CircuitSettings
from tests.rewards.servers import Response, as_json, closed_url, serving
from tests.rewards.test_reward_server import TEXTS, judge, judge_of, tasks_of


def settings(**changed: Any) -> CircuitSettings:
    given = {"failures": 3, "pause_seconds": 10.0, "unanswered": "leave_out"}
    return CircuitSettings.model_validate(given | changed)


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_it_opens_at_the_last_of_its_failures_in_a_row_and_not_before():
    circuit = Circuit(settings(), Clock())
    for answered in (False, False, True, False, False):  # never three in a row
        assert circuit.admit() == "request"
        circuit.report(answered=answered)
    assert circuit.admit() == "request"
    assert circuit.report(answered=False).opened
    assert circuit.admit() == "no"


@pytest.mark.parametrize(("answered", "then"), [(True, "request"), (False, "no")])
def test_one_probe_after_the_pause_decides(answered: bool, then: str):
    clock = Clock()
    circuit = Circuit(settings(failures=1), clock)
    circuit.report(answered=False)
    clock.seconds = 9.9
    assert circuit.admit() == "no"
    clock.seconds = 10.0
    assert [circuit.admit() for _ in range(3)] == ["probe", "no", "no"]
    circuit.report(answered=answered)
    assert circuit.admit() == then
    clock.seconds = 20.0  # a failed probe opens it for another pause
    assert circuit.admit() == ("request" if answered else "probe")


def test_without_settings_it_never_opens():
    circuit = Circuit(None)
    for _ in range(100):
        assert not circuit.report(answered=False).opened
        assert circuit.admit() == "request"


def test_rollouts_of_an_open_circuit_are_unanswered_without_a_request():
    """The server never answers: without a circuit, 20 requests would wait for 0.3 seconds each."""
    ended = threading.Event()

    def respond(body: Any) -> Response:
        ended.wait(10)
        return as_json([0.5])

    with serving(respond) as asked:
        outcomes = judge(
            asked.url, TEXTS, circuit=settings(), timeout_seconds=0.3, retries=0, concurrency=1
        )
        ended.set()
    assert len(asked.bodies) == 3
    assert {(each.score, each.status) for each in outcomes} == {(0.0, "unanswered")}
    assert [("no response within" in each.detail) for each in outcomes] == [True] * 3 + [False] * 17
    assert outcomes[3].detail.endswith(
        "not asked, the circuit is open after 3 failures in a row; probed every 10 seconds"
    )


def test_a_probe_closes_the_circuit_and_later_rollouts_are_scored():
    """The circuit is that of the judge, not of a call."""
    is_down = True

    def respond(body: Any) -> Response:
        return Response(b"", 503) if is_down else as_json([0.5])

    changed = {"retries": 0, "concurrency": 1}
    with serving(respond) as asked:
        asking = judge_of(asked.url, circuit=settings(pause_seconds=0.01), **changed)
        down = [each.status for _, each in asking.judge(TEXTS, tasks_of(*TEXTS))]
        is_down = False
        threading.Event().wait(0.02)  # the pause
        up = [each.status for _, each in asking.judge(TEXTS, tasks_of(*TEXTS))]
    assert down == ["unanswered"] * 20
    assert up == ["scored"] * 20


@pytest.mark.parametrize("status", [503, 500])
def test_a_stage_that_ends_when_rollouts_are_unanswered(status: int):
    with (
        serving(lambda body: Response(b"", status)) as asked,
        pytest.raises(ServerError, match="gave no score for 20 rollouts, HTTP 50"),
    ):
        judge(asked.url, TEXTS, circuit=settings(unanswered="end_stage"), concurrency=1)
    assert len(asked.bodies) == 3 * 3


def test_one_unreachable_rollout_ends_such_a_stage_and_one_unjudgeable_does_not():
    """What has no connection is the server's fault; a 500 about one rollout is the rollout's."""

    def respond(status: int, body: Any) -> Response:
        return Response(b"", status) if body["completions"] == [TEXTS[5]] else as_json([0.5])

    changed = {"circuit": settings(unanswered="end_stage"), "retries": 0}
    with serving(lambda body: respond(500, body)) as asked:
        outcomes = judge(asked.url, TEXTS, **changed)
    assert [each.status for each in outcomes].count("failed") == 1
    with serving(lambda body: respond(503, body)) as asked, pytest.raises(ServerError):
        judge(asked.url, TEXTS, **changed)


def test_nothing_listens_and_a_refusal_is_no_outage():
    outcomes = judge(closed_url(), TEXTS, circuit=settings(), retries=0)
    assert {each.status for each in outcomes} == {"unanswered"}
    with serving(lambda body: Response(b"", 401)) as asked, pytest.raises(RefusedError):
        judge(asked.url, TEXTS, circuit=settings())


@pytest.mark.parametrize(("said", "least"), [("0", 0.0), ("1", 1.0), ("soon", 0.0)])
def test_retry_after_is_obeyed_if_it_is_longer(said: str, least: float):
    left = [1]

    def respond(body: Any) -> Response:
        return Response(b"", 429, (("Retry-After", said),)) if left and left.pop() else as_json([1])

    started = time.monotonic()
    with serving(respond) as asked:
        assert [each.status for each in judge(asked.url, ["a"])] == ["scored"]
    assert least <= time.monotonic() - started < least + 5
    assert len(asked.bodies) == 2


def test_a_server_may_say_of_a_row_why_it_has_no_score():
    items = [0.5, {"status": "unparsable", "detail": "no number"}, {"status": "scored"}]
    with serving(lambda body: as_json(items)) as asked:
        outcomes = judge(asked.url, TEXTS[:3], rollouts_per_request=3)
    assert [(each.score, each.status) for each in outcomes] == [
        (0.5, "scored"),
        (0.0, "unparsable"),
        (0.0, "failed"),
    ]
    assert outcomes[1].detail == f"{asked.url}: no number"
