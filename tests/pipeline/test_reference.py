"""The reference of KL penalties: the base policy, or the policy that each round starts from."""

from collections.abc import Iterator
from contextlib import chdir
from itertools import pairwise
from typing import Any

import pytest

from grpo.params.parameters import read_params
from grpo.runtime.artifacts.files import read_json, remove
from grpo.training.frozen import compute_log_probs
from grpo.wiring import rounds
from grpo.wiring.iterations import load_iteration, load_trainer
from grpo.wiring.rounds import first_state
from tests.files import contents
from tests.pipeline.chains import (
    draw_round,
    inputs_of,
    outputs_of,
    prepare_chain,
    train_round,
    write_chain,
)

PENALIZED: list[Any] = [
    {"grpo": {"low": 0.2, "high": 0.28, "beta": 0.0}},
    {"penalize_kl": {"beta": 0.5, "estimator": "k2", "over": "steps"}},
]
TRAINING = {
    "iterations_per_round": 3,
    "updates_per_iteration": 2,
    "updates_per_checkpoint": 1,
    "learning_rate": 0.01,
}


class Interrupted(Exception):
    """Simulates a kill within a process."""


@pytest.fixture(
    scope="module", params=[pytest.param("base", marks=pytest.mark.long), "round_start"]
)
def chained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[list[str], bool]]:
    """Yields the policies of a chain from the base, and whether the reference is refreshed."""
    with chdir(tmp_path_factory.mktemp(request.param)):
        names = ["base", *write_chain(2, PENALIZED, **TRAINING, reference=request.param)]
        prepare_chain()
        for start, name in pairwise(names):
            draw_round(name, start)
            train_round(name, start)
        yield names, request.param == "round_start"


def first_kl(name: str, start: str) -> tuple[float, float]:
    """Returns the mean k2 and the largest loss of the penalty before a round's first update."""
    inputs = inputs_of(name, start)
    trainer = load_trainer(read_params(), name, inputs)
    loaded = load_iteration(
        trainer, first_state(trainer, inputs), rollouts=inputs.rollouts, rewards=inputs.rewards
    )
    trajectory = loaded.iteration.trajectory
    needed = trajectory.mask.float()
    assert trainer.reference is not None
    now, reference = (
        compute_log_probs(each, trajectory, needed, 64).logp
        for each in (trainer.policy, trainer.reference)
    )
    distance = (reference - now)[trajectory.mask]
    return float(distance.square().mean() / 2), float(distance.abs().max())


def test_a_refreshed_reference_is_the_policy_itself_at_the_first_update_of_each_round(
    chained: tuple[list[str], bool],
):
    """The KL is 0 there; to the base it is 0 at the first round alone."""
    names, is_refreshed = chained
    for start, name in pairwise(names):
        kl, distance = first_kl(name, start)
        assert (kl == 0 and distance == 0) == (is_refreshed or start == "base")


def test_the_summary_names_a_refreshed_reference(chained: tuple[list[str], bool]):
    names, is_refreshed = chained
    for start, name in pairwise(names):
        summary = read_json(outputs_of(name)[1] / "summary.json")
        assert summary.get("reference") == (start if is_refreshed else None)


# test_iterations.py kills a round with the base as its reference.
@pytest.mark.parametrize(
    "chained", [pytest.param("base", marks=pytest.mark.long), "round_start"], indirect=True
)
@pytest.mark.parametrize(
    "stop_at", [*(pytest.param(each, marks=pytest.mark.long) for each in (1, 3)), 5]
)
def test_an_interrupted_round_goes_on_with_the_same_reference_to_the_same_bytes(
    chained: tuple[list[str], bool], monkeypatch: pytest.MonkeyPatch, stop_at: int
):
    names, _ = chained
    start, name = names[-2:]
    before = [contents(path) for path in outputs_of(name)]
    for path in outputs_of(name):
        remove(path)
    original = rounds._advance_bar

    def interrupt(progress: object, earlier: int, planned: int, done: int, total: int) -> None:
        if earlier + done == stop_at:
            raise Interrupted

    monkeypatch.setattr(rounds, "_advance_bar", interrupt)
    with pytest.raises(Interrupted):
        train_round(name, start)
    monkeypatch.setattr(rounds, "_advance_bar", original)
    train_round(name, start)
    assert [contents(path) for path in outputs_of(name)] == before
