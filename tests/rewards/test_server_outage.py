"""The stage score while the server of its judge is down, and afterwards."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch

from benchmarks.workspaces import make_workspace
from grpo.params.manifests import describe_data
from grpo.params.parameters import read_params
from grpo.params.yaml import parse_yaml
from grpo.rewards.base import ROLLOUTS_PER_SHARD
from grpo.runtime.artifacts.files import write_json
from grpo.runtime.artifacts.tables import PROMPTS, REWARDS, read_table, write_table
from grpo.sampling.rollouts import SampledBatch, write_rollouts
from grpo.types import Cost
from tests.rewards.servers import Asked, Response, as_json, serving

ROOT = Path(__file__).parents[2]
KEY = "sk-seen-by-the-server-alone"
ROLLOUTS = ROLLOUTS_PER_SHARD + 20
UNSUITABLE = 7  # the rollout that the server refuses
PATHS = [f"artifacts/{each}" for each in ("data/judge.json", "prompts/train.parquet",
                                          "rollouts/sgpo-1", "rewards/sgpo-1.parquet")]  # fmt: skip


class Ended(NamedTuple):
    code: int
    said: str  # stdout and stderr


def workspace_at(target: Path, url: str, *, workers: int) -> Path:
    """Returns a workspace with the rollouts "0", "1", ... and what the stage score reads."""
    params: dict[str, Any] = parse_yaml((ROOT / "recipes/smoke.yaml").read_text())
    params["sampling"] = {"executor": "local" if workers == 1 else "processes", "workers": workers}
    params["reward"] |= {"answer_pattern": None, "timeout_seconds": None}
    params["reward"]["judges"][0] |= {
        "judge": "reward_server",
        "settings": {
            "url": url,
            "key_variable": "JUDGE_KEY",
            "concurrency": 8,
            "timeout_seconds": 10.0,
            "retries": 1,
            "retry_seconds": 0.01,
            "form": "columns",
            "rollouts_per_request": 4,
        },
    }
    make_workspace(target, params)
    judge, prompts, rollouts, _ = (target / each for each in PATHS)
    write_json(judge, describe_data(read_params(target / "params.yaml"), target, "judge"))
    row = {"prompt_id": "p", "family": "f", "prompt": "1+1=", "answer": "2", "entry": "{}"}
    write_table(pd.DataFrame([row]), prompts, PROMPTS)
    table = pd.DataFrame(
        {
            "rollout_id": [f"p/{n}" for n in range(ROLLOUTS)],
            "prompt_id": "p",
            "group": np.int64(0),
            "text": [str(n) for n in range(ROLLOUTS)],
            "steps": np.int64(1),
            "is_finished": True,
        }
    )
    write_rollouts(
        rollouts,
        SampledBatch(table=table, tensors={"tokens": torch.zeros(ROLLOUTS, 1)}, cost=Cost()),
    )
    return target


def score(workspace: Path, **environment: str) -> Ended:
    done = subprocess.run(
        [sys.executable, "-m", "stages.score", *PATHS],
        cwd=workspace,
        env={**os.environ, "PYTHONPATH": str(workspace), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return Ended(done.returncode, done.stdout + done.stderr)


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
        workspace = workspace_at(tmp_path / "work", asked.url, workers=workers)
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
        workspace = workspace_at(tmp_path / "work", asked.url, workers=1)
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
        workspace = workspace_at(tmp_path / "work", asked.url, workers=1)
        first = score(workspace, JUDGE_KEY=KEY)
        is_mended = True
        second = score(workspace, JUDGE_KEY=KEY)
    assert first.code == 2
    assert f"no rollout was judged, {ROLLOUTS} failed of {ROLLOUTS} rollouts" in first.said
    assert second.code == 0, second.said
    rewards = read_table(workspace / PATHS[-1], REWARDS)
    assert set(rewards["status"]) == {"scored"}
