"""Training of a round: its iterations, their checkpoints, and the writing of its results."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pandas as pd

from grpo.allocation.selection import History
from grpo.errors import DivergedError, UnsoundError
from grpo.modalities.shared.directories import (
    PolicyState,
    gather_trained,
    read_trainable,
    save_trained,
    write_trained,
)
from grpo.objective.base import continued_state
from grpo.params.parameters import Training
from grpo.runtime.artifacts.files import Scratch, atomic_path, read_json, write_json
from grpo.runtime.artifacts.tables import (
    REWARDS_FILE,
    ROLLOUTS_FOLDER,
    TENSORS,
    iteration_name,
    write_csv,
)
from grpo.runtime.artifacts.tensors import read_tensors, write_tensors
from grpo.runtime.artifacts.usage import Usage
from grpo.runtime.rank_files import bring, latest_checkpoint
from grpo.runtime.ranks import this_rank
from grpo.schema import PARAMS
from grpo.training.metrics import UpdateMetrics, update_rows
from grpo.training.updates import run_updates
from grpo.types import Cost
from grpo.wiring.iterations import (
    LoadedIteration,
    RoundInputs,
    RoundState,
    Trainer,
    advance,
    learn_iteration,
    load_iteration,
    write_record,
)
from grpo.wiring.rollouts import first_history

LARGE_REWARD = 1e6  # above it an overflow is attributed to rewards, not to the learning rate
STATE = "state.json"
# Starts to sample and judge an iteration with the present weights, and returns a function that
# waits for its rollouts and rewards. All ranks must call both. The arguments: the index of the
# iteration, the statistics of the arm's selection, the number of iterations behind the weights.
StartLater = Callable[[int, History, int], Callable[[], None]]
RECORD = "record"  # what training leaves of an iteration


def first_state(trainer: Trainer, inputs: RoundInputs) -> RoundState:
    """Returns the state of a round before its first iteration."""
    return RoundState(
        objective_state=continued_state(trainer.objective, trainer.start.objective_state),
        selection_state=first_history(
            trainer.params,
            trainer.name,
            trainer.start.selection_state,
            curriculum=inputs.curriculum,
        ),
    )


def train_round(
    trainer: Trainer,
    inputs: RoundInputs,
    *,
    start_later: StartLater | None,
    scratch: Scratch,
    usage: Usage,
    progress: Callable[[int, int], None],
    note: Callable[[UpdateMetrics], None],
    follow: Callable[[RoundState], None] = lambda state: None,
) -> RoundState:
    """Trains the iterations of a round, up to a plateau; resumes from `scratch` bit-identically.

    With `staleness` 1, the next iteration is sampled while the policy is updated, by the weights
    that this iteration starts from.

    Args:
      start_later: None: the round has one iteration.
      progress: Called with the number of finished updates and the number planned.
      note: Called with the metrics of each update.
      follow: Called after every iteration.

    Raises:
      ArtifactError: If an artifact is invalid, or rewards and rollouts do not match.
      DivergedError: If a number of an update is not finite; the message names a parameter to lower.
    """
    training = trainer.training
    total, per_iteration = training.iterations_per_round, training.optimizer_steps_per_iteration
    planned = total * per_iteration
    state = _resume(trainer, scratch) or first_state(trainer, inputs)
    saved = len(state.metrics)
    rollouts, rewards = inputs.rollouts, inputs.rewards
    is_finished = False
    while not is_finished:
        index = state.iterations
        place = scratch.directory / iteration_name(index)
        if index:
            rollouts, rewards = place / ROLLOUTS_FOLDER, place / REWARDS_FILE
            bring(rollouts)
            bring(rewards)
        before = _cost_of(trainer)
        with usage.part("read"):
            loaded = load_iteration(trainer, state, rollouts=rollouts, rewards=rewards)
        history = learn_iteration(trainer, state, loaded)
        is_finished = loaded.iteration.is_last
        start = None if is_finished else start_later
        if start and training.staleness:
            wait = start(index + 1, history, index)
        with usage.part("update"), _explained(trainer, state, loaded):
            trained = run_updates(
                loaded.iteration,
                scratch=scratch.within(f"{iteration_name(index)}/updates"),
                progress=partial(_advance_bar, progress, index * per_iteration, planned),
                note=note,
            )
        if this_rank() == 0:
            cost = _cost_of(trainer) - before
            write_record(place / RECORD, trainer, state, loaded, trained, history, cost)
        state = advance(state, loaded, trained, history)
        follow(state)
        if start:
            if not training.staleness:
                wait = start(index + 1, history, index + 1)
            wait()
            # After the rollouts, so that those of a stale iteration come before newer weights.
            if len(state.metrics) - saved >= training.updates_per_checkpoint:
                with usage.part("checkpoint"):
                    _save(trainer, state, scratch)
                saved = len(state.metrics)
    return state


def _cost_of(trainer: Trainer) -> Cost:
    """Returns the cost of the policy's and the reference's passes so far."""
    return trainer.policy.cost + (trainer.reference.cost if trainer.reference else Cost())


def _advance_bar(
    progress: Callable[[int, int], None], before: int, planned: int, done: int, _: int
) -> None:
    """Reports the updates of an iteration as part of those of the round."""
    progress(before + done, planned)


def _save(trainer: Trainer, state: RoundState, scratch: Scratch) -> None:
    """Stores weights, optimizer and state after an iteration; all ranks must call it."""
    trained = gather_trained(trainer.policy.model, trainer.optimizer)
    costs = [trainer.policy.cost, trainer.reference.cost if trainer.reference else Cost()]

    def write(directory: Path) -> None:
        write_trained(directory, trained)
        write_json(directory / STATE, {**asdict(state), "costs": [asdict(each) for each in costs]})

    if this_rank() == 0:
        scratch.save(state.iterations, write)


def _resume(trainer: Trainer, scratch: Scratch) -> RoundState | None:
    """Loads the newest checkpoint of `_save`; returns None if there is none."""
    latest = latest_checkpoint(scratch)
    if latest is None:
        return None
    _, directory = latest
    read_trainable(directory, trainer.policy.model, trainer.optimizer)
    content = read_json(directory / STATE)
    trainer.policy.cost, of_reference = (Cost(**each) for each in content.pop("costs"))
    if trainer.reference is not None:
        trainer.reference.cost = of_reference
    content["audit_cost"] = Cost(**content["audit_cost"])
    content["sampling_costs"] = tuple(Cost(**each) for each in content["sampling_costs"])
    content["metrics"] = tuple(UpdateMetrics(**each) for each in content["metrics"])
    content["rewards"] = tuple(content["rewards"])
    return RoundState(**content)


@contextmanager
def located_in_objective(arm: str) -> Iterator[None]:
    """Prepends the path of an arm's objective to a rule that is checked at run time (U27)."""
    try:
        yield
    except UnsoundError as error:
        raise UnsoundError(f"{PARAMS}: arms.{arm}.objective: {error}") from None


@contextmanager
def _explained(trainer: Trainer, state: RoundState, loaded: LoadedIteration) -> Iterator[None]:
    """Adds to errors of updates the parameter to change and the updates of earlier iterations."""
    try:
        with located_in_objective(trainer.arm):
            yield
    except DivergedError as error:
        highest = float(loaded.iteration.rollouts.reward.abs().max())
        rate = trainer.training.learning_rate
        lower = f"arms.{trainer.arm}.training.learning_rate, which is {rate:g}"
        if highest > LARGE_REWARD:
            lower = f"the scale of rewards under reward.*, the largest of which is {highest:g}"
        message = f"training of {trainer.name} diverged at {error}; lower {lower}, in {PARAMS}"
        updates = [*update_rows(state.metrics), *error.updates]
        raise DivergedError(message, updates) from None


def save_round(
    trainer: Trainer, state: RoundState, scratch: Scratch, *, policy_out: Path, out: Path
) -> None:
    """Writes the trained policy, and metrics, steps, credit and cost of its training.

    All ranks must call it; the first one writes.

    Args:
      scratch: That of `train_round`.
    """
    weights = gather_trained(trainer.policy.model, trainer.optimizer)
    if this_rank() != 0:
        return
    cost = _cost_of(trainer)
    first, *later = state.sampling_costs
    later_sampling = sum(later, Cost())
    policy_state = PolicyState(
        name=trainer.name,
        arm=trainer.arm,
        start=trainer.start.name,
        updates=trainer.start.updates + len(state.metrics),
        objective_state=state.objective_state,
        selection_state=state.selection_state,
        cost=trainer.start.cost + first + later_sampling + cost,
    )
    with atomic_path(out) as temporary:
        _copy_files(scratch.directory / iteration_name(0) / RECORD, temporary)
        write_csv(temporary / "updates.csv", pd.DataFrame(update_rows(state.metrics)))
        for index in range(1, state.iterations):
            name = iteration_name(index)
            _copy_iteration(scratch.directory / name, temporary / name, trainer.training)
        summary: dict[str, object] = {
            "cost": asdict(later_sampling + cost),
            "audit_cost": asdict(state.audit_cost),
            "updates": len(state.metrics),
            "drift_max": state.drift_max,
        }
        if state.iterations > 1:
            summary["iterations"] = state.iterations
            summary["sampling_cost"] = asdict(later_sampling)
        if state.plateau is not None:
            planned = trainer.training.iterations_per_round
            summary["plateau"] = {**asdict(state.plateau), "planned_iterations": planned}
        if trainer.reference_name is not None:
            summary["reference"] = trainer.reference_name
        if state.fewer_updates is not None:
            summary["fewer_updates"] = state.fewer_updates
        write_json(temporary / "summary.json", summary)
    with atomic_path(policy_out, hashes=True) as temporary:
        save_trained(temporary, weights, policy_state)


def _copy_iteration(source: Path, target: Path, training: Training) -> None:
    """Copies the rollouts, rewards, metrics and credit of an iteration after the first."""
    _copy_files(source / RECORD, target)
    shutil.copyfile(source / REWARDS_FILE, target / REWARDS_FILE)
    left_out = "" if training.stored_rollouts == "all" else TENSORS
    _copy_files(source / ROLLOUTS_FOLDER, target / ROLLOUTS_FOLDER, left_out=left_out)
    if training.stored_rollouts == "without_media":
        tensors = read_tensors(source / ROLLOUTS_FOLDER / TENSORS)
        tensors.pop("media", None)
        write_tensors(target / ROLLOUTS_FOLDER / TENSORS, tensors)


def _copy_files(source: Path, target: Path, *, left_out: str = "") -> None:
    """Copies the files of a directory; an OSError names what failed, unlike that of `copytree`."""
    target.mkdir()
    for file in sorted(source.iterdir()):
        if file.name != left_out:
            shutil.copyfile(file, target / file.name)
