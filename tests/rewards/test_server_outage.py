"""The stage score while the server of its judge is down, and afterwards."""

from pathlib import Path

import pandas as pd
import pytest

from grpo.rewards.base import ROLLOUTS_PER_SHARD
from grpo.runtime.artifacts.tables import REWARDS, read_table
from tests.rewards.scoring import PATHS, ROLLOUTS, score, workspace_at
from tests.rewards.servers import Asked, Response, as_json, serving

KEY = "sk-seen-by-the-server-alone"
UNSUITABLE = 7  # the rollout that the server refuses


def with_key(workspace: Path) -> list[Path]:
    """Returns the files that hold the key; tables are compressed."""
    found = {each: each.read_bytes() for each in workspace.rglob("*") if each.is_file()}
    return [
        path
        for path, content in found.items()
        if KEY.encode() in content
        or (content.startswith(b"PAR1") and KEY in pd.read_parquet(path).to_csv())
    ]


def completions(asked: Asked) -> set[str]:
    return {text for body in asked.bodies for text in body["completions"]}


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_an_outage_ends_the_stage_and_a_rerun_judges_what_is_left(tmp_path: Path, workers: int):
    is_down = True

    def respond(body: dict[str, list[str]]) -> Response:
        numbers = [int(each) for each in body["completions"]]
        if is_down and max(numbers) >= ROLLOUTS_PER_SHARD:
            return Response(f"busy, {KEY}".encode(), 503)
        if UNSUITABLE in numbers:
            return Response(f"no, {KEY}".encode(), 400)
        return as_json([number / 1000 for number in numbers])

    with serving(respond) as asked:
        workspace = workspace_at(
            tmp_path / "work", asked.url, workers=workers, key_variable="JUDGE_KEY"
        )
        down = score(workspace, JUDGE_KEY=KEY)
        first = completions(asked)
        kept = with_key(workspace)
        asked.bodies.clear()
        is_down = False
        up = score(workspace, JUDGE_KEY=KEY)
    assert down.code == 1, down.said
    (line,) = [each for each in down.said.splitlines() if "reward.judges" in each]
    assert line == (
        f"params.yaml: reward.judges[0].settings.url: {asked.url} gave no score for 16 rollouts in "
        "a row, HTTP 503 busy, ***; start the server or correct the settings, and rerun: what was "
        "judged before is kept"
    )
    assert "Traceback" not in down.said
    assert up.code == 0, up.said
    everyone = {str(n) for n in range(ROLLOUTS)}
    if workers == 1:  # with several, the other shard's worker may be stopped before it ends
        assert len(first) > ROLLOUTS_PER_SHARD
        assert completions(asked) == {str(n) for n in range(ROLLOUTS_PER_SHARD, ROLLOUTS)}
    assert first | completions(asked) == everyone
    rewards = read_table(workspace / PATHS[-1], REWARDS)
    failed = rewards[rewards["status"] != "scored"]
    assert failed["status"].tolist() == ["failed"]
    assert failed["detail"].tolist() == [f"{asked.url}: HTTP 400 no, ***"]
    assert rewards["rollout_id"].tolist() == [f"p/{n}" for n in range(ROLLOUTS)]
    assert set(asked.keys) == {f"Bearer {KEY}"}
    assert KEY not in down.said + up.said
    assert kept == with_key(workspace) == []


@pytest.mark.long
def test_a_wrong_key_ends_the_stage_for_good_and_the_right_one_judges(tmp_path: Path):
    """Also if the variable is missing: no server is asked then."""
    with serving(lambda body: Response(b"who are you?", 401)) as asked:
        workspace = workspace_at(tmp_path / "work", asked.url, key_variable="JUDGE_KEY")
        missing, wrong = score(workspace), score(workspace, JUDGE_KEY=KEY)
    assert missing.code == wrong.code == 2
    assert "JUDGE_KEY must hold the server's key" in missing.said
    assert "HTTP 401 who are you?" in wrong.said
    assert KEY not in wrong.said
    assert not (workspace / PATHS[-1]).exists()


@pytest.mark.long
def test_a_stage_without_any_score_judges_everything_again(tmp_path: Path):
    """What the server could not judge is not kept if it is all there is."""
    is_mended = False

    def respond(body: dict[str, list[str]]) -> Response:
        return as_json([0.5] * len(body["completions"]) if is_mended else [])

    with serving(respond) as asked:
        workspace = workspace_at(tmp_path / "work", asked.url, key_variable="JUDGE_KEY")
        first = score(workspace, JUDGE_KEY=KEY)
        is_mended = True
        second = score(workspace, JUDGE_KEY=KEY)
    assert first.code == 2
    assert f"no rollout was judged, {ROLLOUTS} failed of {ROLLOUTS} rollouts" in first.said
    assert second.code == 0, second.said
    rewards = read_table(workspace / PATHS[-1], REWARDS)
    assert set(rewards["status"]) == {"scored"}
