"""Learning rates follow the schedules of transformers, by the index of the update."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import get_scheduler

from grpo.errors import ParameterError
from grpo.params.parameters import Parameters, read_params
from grpo.params.yaml import dump_yaml
from grpo.training.metrics import update_rows
from grpo.training.schedule import NAMES, schedule_learning_rate
from grpo.wiring.checks import findings
from tests.pipeline.workspaces import two_arms
from tests.training.test_training import sampled_round, update_once

KINDS = [*NAMES]
WARMUP, TOTAL = 3, 10


@given(kind=st.sampled_from(KINDS), warmup=st.integers(0, 5), decay=st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_the_rate_of_each_update_is_that_of_transformers_and_of_the_closed_form(
    kind: str, warmup: int, decay: int
):
    total = warmup + decay
    rate = schedule_learning_rate(kind, 0.3, warmup_updates=warmup, total_updates=total)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    stepped = get_scheduler(
        NAMES[kind], optimizer, num_warmup_steps=warmup, num_training_steps=total
    )
    for update in range(total):
        assert rate(update) == optimizer.param_groups[0]["lr"]  # bitwise
        done = (update - warmup) / decay
        decayed = {"constant": 1, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
        factor = update / warmup if update < warmup else decayed[kind]
        assert rate(update) == pytest.approx(0.3 * factor)
        optimizer.step()
        stepped.step()


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_steps_at_the_rate_of_its_index(kind: str):
    """One step of SGD moves a weight by rate times gradient; metrics have the rate."""
    schedule = schedule_learning_rate(kind, 0.5, warmup_updates=WARMUP, total_updates=TOTAL)  # type: ignore[arg-type]
    moved = []
    for update, chosen in ((4, None), (4, schedule), (1, schedule), (0, schedule)):
        policy, rollouts, trajectory = sampled_round()
        weight = policy.model.lm_head.weight
        before, optimizer = weight.detach().clone(), torch.optim.SGD(policy.model.parameters(), 1.0)
        metrics = update_once(
            policy, rollouts, trajectory, optimizer=optimizer, update=update, schedule=chosen
        )
        assert metrics.learning_rate == (chosen and chosen(update))
        moved.append(before - weight.detach())
    for distance, update in zip(moved[1:], (4, 1, 0)):
        torch.testing.assert_close(distance, schedule(update) * moved[0], atol=1e-6, rtol=1e-4)


def test_only_an_arm_with_a_schedule_records_rates():
    policy, rollouts, trajectory = sampled_round()
    schedule = schedule_learning_rate("linear", 0.1, warmup_updates=0, total_updates=2)
    constant = update_once(policy, rollouts, trajectory)
    decaying = update_once(policy, rollouts, trajectory, schedule=schedule, update=1)
    assert "learning_rate" not in update_rows([constant])[0]
    assert [row["learning_rate"] for row in update_rows([decaying])] == [0.05]


def with_schedule(path: Path, schedule: dict[str, Any]) -> Parameters:
    """Returns the parameters of a chain of two rounds of one update."""
    content = two_arms()
    arm = content["arms"]["uniform"]
    arm["training"] = {**arm["training"], "schedule": schedule, "updates_per_iteration": 1}
    content["rounds"]["uniform-2"] = {"arm": "uniform", "start": "uniform-1", "phase": 1}
    path.write_text(dump_yaml(content))
    return read_params(path)


def test_a_decay_covers_the_updates_of_the_whole_chain_or_is_refused(tmp_path: Path):
    path, decay = tmp_path / "params.yaml", {"kind": "cosine", "warmup_updates": 1}
    findings(with_schedule(path, {**decay, "total_updates": 2}))
    findings(with_schedule(path, {"kind": "constant", "warmup_updates": 9}))
    params = with_schedule(path, {**decay, "total_updates": 2})
    arm = params.arms["uniform"]
    more = arm.training.model_copy(update={"updates_per_iteration": 2})
    arms = {**params.arms, "uniform": arm.model_copy(update={"training": more})}
    with pytest.raises(
        ParameterError,
        match=r"arms.uniform.training.schedule.total_updates must be at least 4, the updates of "
        "the rounds from the base to uniform-2, got 2",
    ):
        findings(params.model_copy(update={"arms": arms}))


def test_parameters_without_a_schedule_are_dumped_without_the_key(tmp_path: Path):
    """The page shows them, and workers read them."""
    schedule = {"kind": "constant", "warmup_updates": 1}
    params = with_schedule(tmp_path / "params.yaml", schedule)
    dumped = {name: arm.model_dump(mode="json") for name, arm in params.arms.items()}
    assert dumped["uniform"]["training"]["schedule"] == schedule
    assert "schedule" not in dumped["sgpo"]["training"]
    assert Parameters.model_validate_json(params.model_dump_json()) == params


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"kind": "polynomial"}, r"schedule.kind must be one of .*, got 'polynomial'"),
        ({"kind": "linear", "warmup_updates": 0}, r"training.schedule.total_updates is missing"),
        ({"kind": "constant", "warmup_updates": -1}, r"schedule.warmup_updates must be at least 0"),
        (
            {"kind": "linear", "warmup_updates": 2, "total_updates": 2},
            r"training.schedule must have more total_updates than warmup_updates, got",
        ),
    ],
)
def test_a_wrong_schedule_is_named_in_one_line(
    tmp_path: Path, schedule: dict[str, Any], message: str
):
    with pytest.raises(ParameterError, match=message):
        with_schedule(tmp_path / "params.yaml", schedule)
