"""A pipeline whose policies were made and evaluated, one of them the champion."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from dvc.repo import Repo
from safetensors.numpy import save_file

from grpo.params.yaml import dump_yaml
from grpo.registry.gate import Bounds
from grpo.registry.store import PROMOTED, Registry
from grpo.runtime.artifacts.tables import EVALUATION, write_table
from tests import tiny_pipeline

MODEL = "solver"
ROLLOUTS = 4
SUMS, WORDS = 48, 12  # prompts of two families
# Successes of ROLLOUTS on every sum and on every word.
SUCCESSES = {
    "base": (1, 2),
    "good-1": (2, 2),
    "same-1": (2, 2),
    "worse-1": (1, 2),
    "narrow-1": (4, 0),
    "best-1": (3, 3),
    "unsafe-1": (4, 4),
}
JUDGE = "artifacts/plugins/judge.json"
EACH_DEPS = [
    "artifacts/policies/base",
    "artifacts/policies/${key}",
    "artifacts/prompts/eval.parquet",
    JUDGE,
]
PIPELINE = {
    "check": {"cmd": "true", "outs": [JUDGE]},
    "prepare": {"cmd": "true", "outs": ["artifacts/prompts/eval.parquet"]},
    "base": {
        "cmd": "true",
        "deps": ["artifacts/prompts/eval.parquet"],
        "outs": ["artifacts/policies/base"],
    },
    "evaluate-base": {
        "cmd": "true",
        "deps": [EACH_DEPS[0], *EACH_DEPS[2:]],
        "params": ["seed", "evaluation"],
        "outs": ["artifacts/evaluations/base.parquet"],
    },
    "train": {
        "foreach": "${rounds}",
        "do": {
            "cmd": "true",
            "deps": ["artifacts/policies/base"],
            "params": ["rounds.${key}"],
            "outs": ["artifacts/policies/${key}"],
        },
    },
    "evaluate": {
        "foreach": "${rounds}",
        "do": {
            "cmd": "true",
            "deps": EACH_DEPS,
            "params": ["seed", "evaluation"],
            "outs": ["artifacts/evaluations/${key}.parquet"],
        },
    },
}


def write_policy(root: Path, name: str, value: float) -> None:
    directory = root / "artifacts/policies" / name
    directory.mkdir(parents=True, exist_ok=True)
    save_file({"weight": np.full(8, value)}, str(directory / "model.safetensors"))
    (directory / "tokenizer").mkdir(exist_ok=True)
    (directory / "tokenizer" / "words.txt").write_text(name)


def write_results(root: Path, name: str, on_sums: int, on_words: int) -> None:
    count = SUMS + WORDS
    table = pd.DataFrame(
        {
            "prompt_id": [f"eval-{number:03d}" for number in range(count)],
            "family": ["sums"] * SUMS + ["words"] * WORDS,
            "greedy": np.zeros(count),
            "rollouts": np.full(count, ROLLOUTS),
            "successes": [on_sums] * SUMS + [on_words] * WORDS,
        }
    )
    path = root / f"artifacts/evaluations/{name}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_table(table, path, EVALUATION)


def record(root: Path, *stages: str) -> None:
    """Writes to dvc.lock that stages have made what lies there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)  # DVC spells targets relative to it
        with Repo(".") as repo:
            for stage in stages or [None]:
                repo.commit(stage, force=True)


def set_remote(root: Path, **settings: str) -> None:
    """Gives DVC's default remote other settings; git ignores where they are written."""
    (root / ".dvc/config.local").write_text(remote_of(settings))


def remote_of(settings: dict[str, str]) -> str:
    """Returns the section of the default remote in DVC's configuration."""
    lines = [f"    {name} = {value}" for name, value in settings.items()]
    return "\n".join(["['remote \"store\"']", *lines, ""])


def promote(root: Path, policy: str, bounds: Sequence[float] = (0.0, 0.1)) -> tuple[str, str]:
    """Returns what became of it, and why."""
    margin, family = bounds
    decision = Registry(MODEL, root).promote(policy, Bounds(margin=margin, family=family))
    return decision.outcome, decision.reason


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tiny_pipeline.build(tmp_path_factory.mktemp("registry") / "pipeline")
    names = [name for name in SUCCESSES if name != "base"]
    params = {"seed": 1, "evaluation": {"rollouts": ROLLOUTS}}
    (root / "params.yaml").write_text(
        dump_yaml({**params, "rounds": {name: {"rate": 0.1} for name in names}})
    )
    (root / "dvc.yaml").write_text(dump_yaml({"stages": PIPELINE}))
    for path in (root / "artifacts/prompts/eval.parquet", root / JUDGE):
        path.parent.mkdir(parents=True)
        path.write_text(path.stem)
    for value, (name, successes) in enumerate(SUCCESSES.items()):
        write_policy(root, name, value)
        write_results(root, name, *successes)
    (root / "artifacts/policies/unsafe-1/optimizer.pt").write_bytes(b"\x80\x04.")
    record(root)
    with (root / ".dvc/config").open("a") as config:
        config.write("    remote = store\n" + remote_of({"url": str(root.parent / "remote")}))
    tiny_pipeline.commit(root, "results")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        assert promote(root, "good-1")[0] == PROMOTED
    return root


@pytest.fixture
def workspace(pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy whose champion is good-1; the working directory."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.copytree(pristine, tmp_path / "pipeline", symlinks=True)
    monkeypatch.chdir(tmp_path / "pipeline")
    return tmp_path / "pipeline"
