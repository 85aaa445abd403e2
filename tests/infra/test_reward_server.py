"""The reference server of rewards: every row gets a score or a reason, within bounds."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo.modalities.shared.drawings import Drawing, draw_texts
from grpo.params.yaml import dump_yaml, parse_yaml
from grpo.rewards import ocr
from grpo.rewards.base import Task, View
from grpo.rewards.media_server import MediaServerSettings
from grpo.rewards.media_server import load as load_media
from grpo.runtime.circuit import CircuitSettings
from grpo.sampling.judging import JointJudge
from tests.infra.files import INFRA, ROOT
from tests.infra.reward_servers import Running, ask, columns_of, reward_server
from tests.rewards.servers import inputs_with, tasks_of
from tests.rewards.test_reward_server import judge

TOKEN = "token-of-a-test"
SETTINGS: dict[str, Any] = {
    "concurrency": 2,
    "timeout_seconds": 60.0,
    "retries": 0,
    "retry_seconds": 0.1,
    "rollouts_per_request": 2,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with small bounds; batches end after a second."""
    bounds = ["--rows", "4", "--body-bytes", "4000", "--batch-seconds", "1", "--requests", "2"]
    folder = tmp_path_factory.mktemp("judges")
    with reward_server(
        folder, "--judge", "judges:number", *bounds, REWARD_SERVER_TOKEN=TOKEN
    ) as running:
        yield running


def post(server: Running, body: object, token: str = TOKEN) -> tuple[int, object]:
    found = ask(server.url, body, Authorization=f"Bearer {token}")
    return found.status, json.loads(found.content)


def test_a_row_without_a_score_says_why_and_the_others_keep_theirs(server: Running):
    status, items = post(server, columns_of("1", "raise", "nan", "500"))
    assert status == 200
    assert items == [
        0.001,
        {"status": "failed", "detail": "RuntimeError: cannot judge this"},
        {"status": "failed", "detail": "returned nan; it must be finite"},
        0.5,
    ]
    status, items = post(server, columns_of("none", "print", "seven"))
    assert items == [
        {"status": "failed", "detail": "returned None, not a number"},
        0.25,
        {
            "status": "failed",
            "detail": "ValueError: invalid literal for int() with base 10: 'seven'",
        },
    ]


def test_the_form_of_openrlhf_is_answered_by_its_own(server: Running):
    body = {"query": ["ab12", "ab13"], "prompts": ["ab", "ab"], "labels": ["", ""]}
    assert post(server, body) == (200, {"rewards": [0.012, 0.013]})


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        ([1], 422, "the request must be an object of lists"),
        ({"prompts": ["a"]}, 422, "must be lists of one length"),
        ({**columns_of("1", "2"), "answers": ["1"]}, 422, "must be lists of one length"),
        ({**columns_of("1"), "entries": ["1"]}, 422, "entries must hold dict"),
        (columns_of(*"12345"), 422, "must have 1 to 4 rows, got 5"),
        (columns_of(), 422, "must have 1 to 4 rows, got 0"),
        (columns_of("1" * 5000), 413, "the request has more than 4000 bytes"),
        ({"query": [1], "prompts": ["a"], "labels": [""]}, 422, "must be lists of texts"),
    ],
)
def test_a_request_out_of_bounds_is_refused_as_a_whole(
    server: Running, body: object, status: int, error: str
):
    found, said = post(server, body)
    assert found == status
    assert isinstance(said, dict)
    assert error in said["error"]


def test_only_the_bearer_of_the_token_is_judged_and_everyone_sees_the_health(server: Running):
    assert post(server, columns_of("1"), token="another")[0] == 401
    assert ask(server.url, columns_of("1")).status == 401
    health = ask(server.url.replace("/score", "/health"))
    assert (health.status, json.loads(health.content)) == (200, {"status": "ready"})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--judge", "judges"], "--judge must be PACKAGE.MODULE:FUNCTION, got 'judges'"),
        (["--judge", "json:nothing"], "json has none called 'nothing'"),
        (["--judge", "no_such.module:f"], "No module named 'no_such'"),
        (["--judge", "json:dumps", "--host", "0.0.0.0"], "REWARD_SERVER_TOKEN must be set"),
    ],
)
def test_a_judge_that_cannot_be_served_is_one_line(arguments: list[str], said: str):
    done = subprocess.run(
        [sys.executable, INFRA / "reward_server.py", *arguments, "--port", "0"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert said in line


def test_it_imports_nothing_but_the_standard_library():
    """It runs in the environment of a judge, which may not have this project's packages."""
    code = (
        f"import runpy, sys; runpy.run_path({str(INFRA / 'reward_server.py')!r}, run_name='x');"
        "print({each.partition('.')[0] for each in sys.modules} - {*sys.stdlib_module_names})"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    )
    assert {*done.stdout.strip("{}\n").replace("'", "").split(", ")} <= {"__main__"}


@pytest.mark.long
@pytest.mark.parametrize("order", ["crash", "hang"])
def test_a_judge_that_crashes_or_hangs_is_replaced_and_fails_its_row_alone(
    server: Running, order: str, monkeypatch: pytest.MonkeyPatch
):
    """Batch and row end with HTTP 500, meanwhile others wait or get 503; all but one are scored."""
    monkeypatch.setenv("JUDGE_KEY", TOKEN)
    outcomes = judge(
        server.url,
        ["1", order, "3", "4"],
        key_variable="JUDGE_KEY",
        rollouts_per_request=4,
        concurrency=1,
        retries=2,
        retry_seconds=0.1,
        circuit=CircuitSettings(failures=9, pause_seconds=1.0, unanswered="end_stage"),
    )
    assert [each.status for each in outcomes] == ["scored", "failed", "scored", "scored"]
    reason = {"crash": "process ended, exit code 3", "hang": "took longer than 1 seconds"}
    assert reason[order] in outcomes[1].detail


@pytest.mark.long
def test_requests_beyond_the_bound_get_429_and_are_judged_when_they_come_again(tmp_path: Path):
    folder = tmp_path / "judges"
    options = ["--judge", "judges:slow", "--requests", "1"]
    with reward_server(folder, *options) as server:
        found: list[int] = []
        first = threading.Thread(
            target=lambda: found.append(ask(server.url, columns_of("1")).status)
        )
        first.start()
        while not (folder / "judging").exists():
            pass
        refused = ask(server.url, columns_of("2"))
        (folder / "go").touch()
        first.join()
        assert (refused.status, dict(refused.headers)["Retry-After"]) == (429, "1")
        assert found == [200]
        outcomes = judge(server.url, [str(n) for n in range(20)], retries=50)
    assert [each.score for each in outcomes] == [n / 1000 for n in range(20)]


def test_the_judge_cannot_read_the_token(server: Running):
    """It is code of others, as any judge."""
    (status, items) = post(server, columns_of("token"))
    assert (status, items) == (200, [0.0])


@pytest.mark.long
def test_images_and_clips_reach_the_judge_as_they_are(tmp_path: Path):
    """Of one channel or three, of several frames; the scores keep the order of the rows."""
    with reward_server(tmp_path / "judges", "--judge", "judges:brightness") as server:
        view = load_media(inputs_with(MediaServerSettings(url=server.url, **SETTINGS)))
        for shape in [(1, 4, 5), (3, 4, 5), (3, 6, 4, 5)]:
            media = np.zeros((5, *shape), np.uint8)
            media[..., 0, 0] = np.array([0, 51, 102, 153, 255]).reshape(-1, *[1] * (len(shape) - 2))
            judged = JointJudge(view=view, reads_media=True, rollouts_per_call=128).judge(
                media, tasks_of(*"abcde")
            )
            assert [outcome.score for _, outcome in judged] == [0, 0.2, 0.4, 0.6, 1]
        (first, *_) = view(media, tasks_of(*"abcde"))
        assert first == View("0.0", 0.0)


@pytest.mark.long
def test_the_judge_of_a_parameter_file_gives_its_own_outcomes(tmp_path: Path):
    """A judge of answers, with its pattern and statuses; what cannot be parsed stays judged."""
    content = parse_yaml((ROOT / "recipes/smoke.yaml").read_text())
    path = tmp_path / "params.yaml"
    content["reward"] |= {"answer_pattern": "#([^#]*)"}
    content["reward"]["judges"][0] |= {"judge": "exact"}
    path.write_text(dump_yaml(content))
    with reward_server(tmp_path / "judges", "--parameters", str(path)) as server:
        outcomes = judge(server.url, ["#=#=7", "no answer", "#8"], rollouts_per_request=3)
    assert [(each.score, each.status) for each in outcomes] == [
        (0.0, "scored"),
        (0.0, "unparsable"),
        (0.0, "scored"),
    ]


@pytest.mark.long
def test_a_judge_of_images_gives_the_outcomes_behind_a_server_that_it_gives_here(tmp_path: Path):
    """OCR of drawn texts, images and clips: the server gets every pixel."""
    content = parse_yaml((ROOT / "recipes/glyphs.yaml").read_text())
    path = tmp_path / "params.yaml"
    path.write_text(dump_yaml(content))
    images = draw_texts(["234", "235", "999"], Drawing(16, 32, 11, 8))
    tasks = [Task(family="f", prompt="draw 234", answer="234", entry={}) for _ in images]
    with reward_server(tmp_path / "judges", "--parameters", str(path)) as server:
        view = load_media(inputs_with(MediaServerSettings(url=server.url, **SETTINGS)))
        for media in (images, np.stack([images, images[::-1]], axis=2)):
            behind, here = (
                JointJudge(view=each, reads_media=True, rollouts_per_call=128).judge(media, tasks)
                for each in (view, ocr.view_texts)
            )
            scores = [outcome.score for _, outcome in here]
            assert [outcome.score for _, outcome in behind] == scores
            assert len({*scores}) > 1


@pytest.mark.long
def test_a_function_that_returns_too_few_scores_is_asked_about_each_row(tmp_path: Path):
    with reward_server(tmp_path / "judges", "--judge", "judges.short") as server:
        assert json.loads(ask(server.url, columns_of("1", "2", "3")).content) == [0.5, 0.5, 0.5]
