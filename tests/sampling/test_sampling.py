"""Sampling in batches: the same rollouts however often the work is interrupted."""

import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch

from grpo.errors import ArtifactError
from grpo.sampling.drawing import local_executor, sample_rollouts
from grpo.sampling.rollouts import read_batch, write_rollouts
from tests.modalities.tiny import tiny_policy

PROMPTS = pd.DataFrame(
    {
        "prompt_id": [f"p{index}" for index in range(5)],
        "prompt": ["a=", "bbbbbb=", "cc=", "dddd=", "e="],
        "rollouts": [3, 2, 4, 2, 2],
    }
)


def draw(scratch: Path, *, seed: int = 0):
    executor = local_executor(tiny_policy())
    return sample_rollouts(executor, PROMPTS, rollouts_per_batch=4, seed=seed, scratch=scratch)


def test_every_prompt_gets_its_rollouts_under_its_own_group(tmp_path: Path):
    table = draw(tmp_path).table
    assert table["rollout_id"].is_unique
    sizes = table.groupby("prompt_id").size()
    assert sizes.to_dict() == dict(zip(PROMPTS["prompt_id"], PROMPTS["rollouts"]))
    assert (table.groupby("prompt_id")["group"].nunique() == 1).all()


def test_an_interrupted_run_gives_the_same_rollouts_and_cost(tmp_path: Path):
    whole = draw(tmp_path / "a")
    draw(tmp_path / "b")
    _, *later = sorted((tmp_path / "b").iterdir())
    for batch in later:
        shutil.rmtree(batch)
    resumed = draw(tmp_path / "b")
    pd.testing.assert_frame_equal(resumed.table, whole.table)
    assert resumed.cost == whole.cost
    for name, tensor in whole.tensors.items():
        assert torch.equal(resumed.tensors[name], tensor)
    assert len(later) >= 2


def test_another_seed_gives_other_rollouts(tmp_path: Path):
    first, second = draw(tmp_path / "a"), draw(tmp_path / "b", seed=1)
    assert first.table["text"].tolist() != second.table["text"].tolist()


def test_stored_rollouts_come_back_and_disagreeing_files_are_refused(tmp_path: Path):
    batch = draw(tmp_path / "scratch")
    write_rollouts(tmp_path / "round", batch)
    read = read_batch(tmp_path / "round")
    pd.testing.assert_frame_equal(read.table, batch.table)
    policy = tiny_policy()
    group = torch.tensor(batch.table["group"].to_numpy())
    policy.unpack(read.tensors, group)
    with pytest.raises(ArtifactError):
        policy.unpack(read.tensors, group[:-1])
