"""The stage score on a real server under failures: nothing is lost, and no failure is a zero."""

import itertools
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pandas as pd
import pytest

from grpo.runtime.artifacts.tables import REWARDS, read_table
from tests.infra.reward_servers import ask, reward_server
from tests.rewards.scoring import PATHS, ROLLOUTS, score, workspace_at
from tests.rewards.servers import Response, serving

pytestmark = pytest.mark.long
END = {"failures": 8, "pause_seconds": 300.0, "unanswered": "end_stage"}
LEAVE = {**END, "unanswered": "leave_out"}
BAD = {13: "failed", 14: "failed"}  # rollouts on which the judge itself fails


def rewards_of(workspace: Path) -> tuple[bytes, pd.DataFrame]:
    path = workspace / PATHS[-1]
    return path.read_bytes(), read_table(path, REWARDS)


def clean_run(folder: Path, url: str) -> tuple[bytes, pd.DataFrame]:
    """Returns the rewards of a run without failures; its own address stands in details."""
    ended = score(workspace_at(folder / "clean", url, circuit=END))
    assert ended.code == 0, ended.said
    content, table = rewards_of(folder / "clean")
    assert {row: each for row, each in enumerate(table["status"]) if each != "scored"} == BAD
    return content, table


@pytest.fixture
def judges(tmp_path: Path) -> Path:
    """The folder of a server whose judge does not end it."""
    folder = tmp_path / "judges"
    folder.mkdir()
    (folder / "killed").touch()
    return folder


SLOW = Response(b"slow", 0)
COUNT = Response(b"[0.0]")
FAULTS: dict[str, Response] = {
    "500": Response(b"oops", 500),
    "429": Response(b"busy", 429, (("Retry-After", "0"),)),
    "503": Response(b"", 503),
    "slow": SLOW,
    "garbage": Response(b"<html>"),
    "count": COUNT,
    "truncated": Response(b"[0.0, 0.0"),
}
TRIES_THAT_FAIL = 2  # of the four of a request
ANSWERS_UNTIL_OUTAGE = 10


class Proxy:
    """Stands before a server; some requests fail at first, and all of them during an outage."""

    def __init__(self, url: str, fault: Response) -> None:
        self.url, self.fault = url, fault
        self.tries, self.answers = Counter[str](), 0
        self.may_break_down = fault is not COUNT  # which is no outage: the server answers
        self.is_harmless = False

    def __call__(self, body: Any) -> Response:
        texts = body["completions"]
        self.tries[str(texts)] += 1
        is_first = int(texts[0]) % 3 == 0 and self.tries[str(texts)] <= TRIES_THAT_FAIL
        is_down = self.may_break_down and self.answers >= ANSWERS_UNTIL_OUTAGE
        is_harmed = is_down or (is_first and len(texts) > 1)
        if self.is_harmless or not is_harmed:
            self.answers += 1
            return ask(self.url, body)
        if self.fault is SLOW:
            threading.Event().wait(1.5)  # longer than timeout_seconds
        return self.fault


@pytest.mark.parametrize("fault", FAULTS)
def test_failures_that_pass_leave_the_bytes_of_a_run_without_any(
    fault: str, judges: Path, tmp_path: Path
):
    """A third of the requests fail at first; then all do, which opens the circuit."""
    with reward_server(judges, "--judge", "judges:deadly") as server:
        harm = Proxy(server.url, FAULTS[fault])
        with serving(harm) as proxy:
            limit = 1.0 if fault == "slow" else 30.0
            workspace = workspace_at(
                tmp_path / "work", proxy.url, circuit=END, timeout_seconds=limit, retries=3
            )
            down = score(workspace)
            may_break_down, harm.may_break_down = harm.may_break_down, False
            ended = score(workspace)
            harm.is_harmless = True
            expected, _ = clean_run(tmp_path, proxy.url)
    assert down.code == int(may_break_down), down.said
    assert ended.code == 0, ended.said
    assert "Traceback" not in down.said + ended.said
    assert rewards_of(workspace)[0] == expected


def harming(url: str, harmed: set[int], fault: Response) -> Callable[[Any], Response]:
    """Returns a proxy before the server at `url`, which harms some requests by their number."""
    numbers = itertools.count()
    return lambda body: fault if next(numbers) in harmed else ask(url, body)


@pytest.mark.parametrize("settings", [END, LEAVE], ids=["end_stage", "leave_out"])
def test_a_server_that_is_killed_in_the_middle_of_a_batch(settings: dict[str, Any], tmp_path: Path):
    """The stage ends, and a rerun with a new server asks for the rest; or rows are unanswered.

    Connections are reset, then refused.
    """
    folder = tmp_path / "judges"
    with reward_server(folder, "--judge", "judges:deadly") as server:
        port = urlsplit(server.url).port
        workspace = workspace_at(tmp_path / "work", server.url, circuit=settings)
        down = score(workspace)
        assert server.process.wait() == -signal.SIGKILL
    is_written = (workspace / PATHS[-1]).exists()
    before = rewards_of(workspace)[1] if is_written else None
    with reward_server(folder, "--judge", "judges:deadly", port=port or 0) as again:
        assert again.url == server.url
        up = score(workspace)
        expected, table = clean_run(tmp_path, again.url)
    assert up.code == 0, up.said
    assert rewards_of(workspace)[0] == expected
    if before is None:
        assert settings is END
        assert down.code == 1, down.said
        (line,) = [each for each in down.said.splitlines() if "reward.judges" in each]
        assert "gave no score for" in line
        return
    assert settings is LEAVE
    assert down.code == 0, down.said
    is_same = before["status"] == table["status"]
    assert is_same.sum() > 40
    assert set(before["status"][~is_same]) == {"unanswered"}
    pd.testing.assert_frame_equal(before[is_same], table[is_same])
    assert (before["detail"][~is_same].str.len() > 0).all()
    assert (
        before["detail"].str.contains("not asked, the circuit is open").sum() >= 20
    )  # the last shard


def test_scores_that_are_no_numbers_are_no_zeros(judges: Path, tmp_path: Path):
    """NaN in JSON, which a server of others may send: its rollouts have a status, not a score."""
    harmed = {3, 9}
    with reward_server(judges, "--judge", "judges:deadly") as server:
        nan = Response(b"[NaN, NaN, NaN, NaN]")
        with serving(harming(server.url, harmed, nan)) as proxy:
            workspace = workspace_at(tmp_path / "work", proxy.url, circuit=END)
            ended = score(workspace)
            harmed.clear()
            _, expected = clean_run(tmp_path, proxy.url)
    assert ended.code == 0, ended.said
    _, found = rewards_of(workspace)
    is_harmed = found["detail"].str.endswith("returned nan; it must be finite")
    assert is_harmed.sum() >= 8
    assert (found["status"][is_harmed] == "failed").all()
    is_other = ~is_harmed & ~found.index.isin(BAD)
    pd.testing.assert_frame_equal(found[is_other], expected[is_other])


def test_a_stage_of_which_nothing_was_answered_may_be_run_again(judges: Path, tmp_path: Path):
    """Also if unanswered rollouts are left out: there is nothing to go on with."""
    harmed = {*range(1000)}
    with (
        reward_server(judges, "--judge", "judges:deadly") as server,
        serving(harming(server.url, harmed, FAULTS["503"])) as proxy,
    ):
        workspace = workspace_at(tmp_path / "work", proxy.url, circuit=LEAVE)
        down = score(workspace)
        assert not (workspace / PATHS[-1]).exists()
        harmed.clear()
        up = score(workspace)
        expected, _ = clean_run(tmp_path, proxy.url)
    assert down.code == 1, down.said
    assert f"no rollout was judged, {ROLLOUTS} unanswered of {ROLLOUTS} rollouts" in down.said
    assert up.code == 0, up.said
    assert rewards_of(workspace)[0] == expected
