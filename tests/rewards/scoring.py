"""A workspace with the stage score, whose judge asks a server."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

from benchmarks.workspaces import make_workspace
from grpo.params.manifests import describe_data
from grpo.params.parameters import read_params
from grpo.params.yaml import parse_yaml
from grpo.rewards.base import ROLLOUTS_PER_SHARD
from grpo.runtime.artifacts.files import write_json
from grpo.runtime.artifacts.tables import PROMPTS, write_table
from grpo.sampling.rollouts import SampledBatch, write_rollouts
from grpo.types import Cost

ROOT = Path(__file__).parents[2]
ROLLOUTS = ROLLOUTS_PER_SHARD + 20
PATHS = [f"artifacts/{each}" for each in ("data/judge.json", "prompts/train.parquet",
                                          "rollouts/sgpo-1", "rewards/sgpo-1.parquet")]  # fmt: skip


class Ended(NamedTuple):
    code: int
    said: str  # stdout and stderr


def workspace_at(target: Path, url: str, *, workers: int = 1, **changed: Any) -> Path:
    """Returns a workspace with the rollouts "0", "1", ... and what the stage score reads.

    Args:
      changed: Settings of the judge.
    """
    params: dict[str, Any] = parse_yaml((ROOT / "recipes/smoke.yaml").read_text())
    params["sampling"] = {"executor": "local" if workers == 1 else "processes", "workers": workers}
    params["reward"] |= {"answer_pattern": None, "timeout_seconds": None}
    params["reward"]["judges"][0] |= {
        "judge": "reward_server",
        "settings": {
            "url": url,
            "concurrency": 8,
            "timeout_seconds": 10.0,
            "retries": 1,
            "retry_seconds": 0.01,
            "form": "columns",
            "rollouts_per_request": 4,
            **changed,
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
    """Runs the stage; the judge needs the environment variable JUDGE_KEY if it has a key."""
    done = subprocess.run(
        [sys.executable, "-m", "stages.score", *PATHS],
        cwd=workspace,
        env={**os.environ, "PYTHONPATH": str(workspace), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return Ended(done.returncode, done.stdout + done.stderr)
