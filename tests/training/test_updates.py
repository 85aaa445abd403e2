"""A round that cannot form the updates it was asked for is refused, or says so."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.errors import ParameterError
from grpo.objective.algorithms import rloo
from grpo.params.parameters import read_params
from grpo.training.batches import explain_fewer, plan_batches
from grpo.types import Rollouts
from grpo.wiring.checks import findings

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "params.yaml", *sorted((ROOT / "recipes").glob("*.yaml"))]


@given(sizes=st.lists(st.integers(2, 9), min_size=1, max_size=8), asked=st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_an_iteration_with_fewer_updates_says_how_many_and_why(sizes: list[int], asked: int):
    group = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    value = torch.rand(len(group), generator=torch.Generator().manual_seed(0))
    rollouts = Rollouts(
        group=group,
        reward=value,
        outcome=value,
        mask=torch.ones(len(group), 1, dtype=torch.bool),
        behavior_logp=torch.zeros(len(group), 1),
    )
    generator = torch.Generator().manual_seed(0)
    batches, _ = plan_batches(rloo(), rollouts, {}, num_batches=asked, generator=generator)
    said = explain_fewer(asked, rollouts, batches)
    assert len(batches) <= min(asked, len(sizes))
    assert (said is None) == (len(batches) == asked)
    if said is not None:
        assert said.startswith(f"made {len(batches)} of {asked} updates")
        assert f"the iteration has {len(sizes)};" in said


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_more_updates_than_prompts_of_a_round_are_refused_before_sampling(path: Path):
    """And no committed parameter file asks for more."""
    params = read_params(path)
    findings(params)
    for name, arm in params.arms.items():
        if not hasattr(params.task, "train_prompts") and "_per_phase" not in str(arm.curriculum):
            continue  # how many prompts a file has is not known before it is read
        training = arm.training.model_copy(update={"updates_per_iteration": 100_000})
        arms = {**params.arms, name: arm.model_copy(update={"training": training})}
        where = rf"arms.{name}.training.updates_per_iteration must be at most (\d+), the prompts"
        with pytest.raises(ParameterError, match=where) as refused:
            findings(params.model_copy(update={"arms": arms}))
        largest = int(str(refused.value).split("at most ")[1].split(",")[0])
        fitting = arm.training.model_copy(update={"updates_per_iteration": largest})
        arms[name] = arm.model_copy(update={"training": fitting})
        findings(params.model_copy(update={"arms": arms}))
