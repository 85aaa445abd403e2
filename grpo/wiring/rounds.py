"""Loading of a training round from parameters and artifacts, and writing of its results."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

from grpo.allocation.selection import History, learn_round
from grpo.errors import ArtifactError, DivergedError, UnsoundError, located
from grpo.modalities.policy import Policy, make_rollouts
from grpo.modalities.shared.directories import (
    PolicyState,
    gather_trained,
    read_state,
    read_trainable,
    save_trained,
)
from grpo.modalities.shared.packed import Layout
from grpo.objective.advantage import rollout_advantage
from grpo.params.parameters import Parameters, Reward, Training
from grpo.runtime.artifacts.files import Scratch, atomic_path, read_json, write_json
from grpo.runtime.artifacts.tables import (
    CREDIT,
    REWARDS,
    is_judged,
    read_table,
    write_csv,
    write_table,
    wrong_cell,
)
from grpo.runtime.ranks import this_rank
from grpo.runtime.seeds import derive_seed
from grpo.sampling.rollouts import SUMMARY, SampledBatch, read_batch, read_passed, select_rollouts
from grpo.schema import PARAMS
from grpo.training.batches import explain_fewer
from grpo.training.frozen import compute_log_probs
from grpo.training.metrics import step_metrics
from grpo.training.updates import Round, TrainedRound, TrainingSettings, train_round
from grpo.wiring.allocation import build_selection
from grpo.wiring.objectives import build_objective
from grpo.wiring.policies import draws_of_round, load_policy, make_optimizer

LARGE_REWARD = 1e6  # above it an overflow is attributed to rewards, not to the learning rate
TABLE, TENSORS = "table.parquet", "tensors.safetensors"


class RoundInputs(NamedTuple):
    """Paths of a round's inputs."""

    base: Path  # the base policy
    start: Path  # the policy that the round starts from
    rollouts: Path
    rewards: Path


@dataclass(frozen=True, kw_only=True)
class LoadedRound:
    """A round with its policy, rollouts and rewards loaded."""

    params: Parameters
    name: str
    round: Round
    sampled: SampledBatch  # the same rows as the rollouts of `round`
    start: PolicyState
    passed: list[str]  # prompts that were visited but are not trained on

    @property
    def arm(self) -> str:
        """The name of the round's arm."""
        return self.params.find_round(self.name).arm


def load_round(params: Parameters, name: str, inputs: RoundInputs) -> LoadedRound:
    """Returns a round with its starting policy, optimizer, rollouts and rewards.

    Raises:
      ArtifactError: If an artifact is invalid, or rewards and rollouts do not match.
    """
    each = params.find_round(name)
    arm = params.find_arm(each.arm)
    draws = draws_of_round(params, name)
    policy = load_policy(params, base=inputs.base, directory=inputs.start, draws=draws)
    optimizer = make_optimizer(policy.model, arm.training)
    start = read_state(inputs.start, each.start)
    if start.arm is not None:
        read_trainable(inputs.start, policy.model, optimizer)
    objective = build_objective(arm.objective, each.arm)
    penalties = [link.kinds for link in objective.links if link.settings.get("beta")]
    reference: Policy[Any] | None = None
    if any("penalty" in kinds for kinds in penalties):
        draws = params.modality.reference_draws(draws)
        reference = load_policy(params, base=inputs.base, directory=inputs.base, draws=draws)
    sampled, judged, passed = read_trainable_rollouts(
        policy.layout, inputs.rollouts, inputs.rewards, params.reward
    )
    group = torch.tensor(sampled.table["group"].to_numpy())
    with located(inputs.rollouts / TENSORS):
        trajectory, behavior_logp = policy.unpack(sampled.tensors, group)
    _require_as_drawn(sampled.table, policy, trajectory, inputs.rollouts)
    settings = training_settings(arm.training)
    reference_logp = None
    if reference and any("reward penalty" in kinds for kinds in penalties):
        frozen = compute_log_probs(
            reference, trajectory, trajectory.mask.float(), settings.tokens_per_microbatch
        )
        reference_logp = frozen.logp
    rollouts = make_rollouts(
        trajectory,
        behavior_logp,
        group=group,
        reward=torch.tensor(judged["reward"].to_numpy(np.float32)),
        outcome=torch.tensor(judged["outcome"].to_numpy(np.float32)),
        reference_logp=reference_logp,
    )
    return LoadedRound(
        params=params,
        name=name,
        round=Round(
            policy=policy,
            optimizer=optimizer,
            objective=objective,
            objective_state=start.objective_state or objective.init(),
            reference=reference,
            settings=settings,
            trajectory=trajectory,
            rollouts=rollouts,
            first_update=start.updates,
            generator=torch.Generator().manual_seed(derive_seed(params.seed, "train", name)),
        ),
        sampled=sampled,
        start=start,
        passed=passed,
    )


def train_loaded(
    loaded: LoadedRound, *, scratch: Scratch, progress: Callable[[int, int], None]
) -> TrainedRound:
    """Trains a round; resumes from `scratch` bit-identically.

    Args:
      progress: Called with the number of finished updates and the total.

    Raises:
      DivergedError: If a number of an update is not finite; the message names a parameter to lower.
    """
    with located_in_objective(loaded.arm), _add_remedy(loaded):
        return train_round(loaded.round, scratch=scratch, progress=progress)


@contextmanager
def located_in_objective(arm: str) -> Iterator[None]:
    """Prepends the path of an arm's objective to a rule that is checked at run time (U27)."""
    try:
        yield
    except UnsoundError as error:
        raise UnsoundError(f"{PARAMS}: arms.{arm}.objective: {error}") from None


@contextmanager
def _add_remedy(loaded: LoadedRound) -> Iterator[None]:
    """Adds the name of the round and the parameter to lower to a DivergedError."""
    try:
        yield
    except DivergedError as error:
        highest = float(loaded.round.rollouts.reward.abs().max())
        rate = loaded.params.find_arm(loaded.arm).training.learning_rate
        lower = f"arms.{loaded.arm}.training.learning_rate, which is {rate:g}"
        if highest > LARGE_REWARD:
            lower = f"the scale of rewards under reward.*, the largest of which is {highest:g}"
        message = f"training of {loaded.name} diverged at {error}; lower {lower}, in {PARAMS}"
        raise DivergedError(message, error.updates) from None


def save_round(loaded: LoadedRound, trained: TrainedRound, *, policy_out: Path, out: Path) -> None:
    """Writes the trained policy, and metrics, steps, credit and cost of its training.

    All ranks must call it; the first one writes.
    """
    given = loaded.round
    weights = gather_trained(given.policy.model, given.optimizer)
    if this_rank() != 0:
        return
    cost = given.policy.cost
    if given.reference is not None:
        cost += given.reference.cost
    state = PolicyState(
        name=loaded.name,
        arm=loaded.arm,
        start=loaded.start.name,
        updates=loaded.start.updates + len(trained.metrics),
        objective_state=trained.objective_state,
        selection_state=_learn(loaded),
        cost=loaded.start.cost + loaded.sampled.cost + cost,
    )
    with atomic_path(out) as temporary:
        temporary.mkdir()
        frame = pd.DataFrame([asdict(each) for each in trained.metrics])
        write_csv(temporary / "updates.csv", frame)
        steps = step_metrics(given.rollouts, trained.batches)
        write_csv(temporary / "steps.csv", pd.DataFrame([asdict(each) for each in steps]))
        _write_phases(temporary / "phases.csv", loaded, trained)
        write_table(_credit_table(loaded, trained), temporary / "credit.parquet", CREDIT)
        summary: dict[str, object] = {
            "cost": asdict(cost),
            "audit_cost": asdict(trained.audit_cost),
            "updates": len(trained.metrics),
            "drift_max": trained.drift_max,
        }
        if (fewer := fewer_updates(loaded, trained)) is not None:
            summary["fewer_updates"] = fewer
        write_json(temporary / "summary.json", summary)
    with atomic_path(policy_out) as temporary:
        save_trained(temporary, weights, state)


def fewer_updates(loaded: LoadedRound, trained: TrainedRound) -> str | None:
    """Returns the reason for fewer updates than the arm's setting, or None if there are as many."""
    asked = loaded.round.settings.updates_per_round
    return explain_fewer(asked, loaded.round.rollouts, trained.batches)


def _write_phases(path: Path, loaded: LoadedRound, trained: TrainedRound) -> None:
    """Writes the training metrics by phase, if steps have phases."""
    modality, rollouts = loaded.params.modality, loaded.round.rollouts
    phases = modality.phases(loaded.params.policy)
    if not phases:
        return
    had_weight = torch.zeros_like(rollouts.mask)
    for batch in trained.batches:
        had_weight[batch.rows] = batch.credit.weight != 0
    rows = modality.describe_phases(
        rollouts, had_weight, trained.objective_state, [each.name for each in phases]
    )
    write_csv(path, pd.DataFrame([asdict(each) for each in rows]))


def _learn(loaded: LoadedRound) -> History:
    """Returns the prompt statistics for the selection of the next round."""
    selection = loaded.params.find_arm(loaded.arm).selection
    prompts = loaded.sampled.table[["prompt_id"]]
    return learn_round(
        build_selection(selection, loaded.arm),
        loaded.start.selection_state,
        prompts.assign(outcome=loaded.round.rollouts.outcome.numpy()),
        loaded.passed,
    )


def training_settings(training: Training) -> TrainingSettings:
    """Returns the settings of an arm's training that updates need."""
    names = [each.name for each in fields(TrainingSettings)]
    return TrainingSettings(**{name: getattr(training, name) for name in names})


class TrainableRollouts(NamedTuple):
    """The rollouts of a round that are trained on."""

    sampled: SampledBatch  # the cost is that of all rollouts
    rewards: pd.DataFrame  # the same rows as `sampled`
    passed: list[str]  # visited prompts without such a rollout


def read_trainable_rollouts(
    layout: Layout, rollouts: Path, rewards: Path, shaping: Reward
) -> TrainableRollouts:
    """Returns the rollouts of a round that were judged and have steps.

    The others are dropped before group statistics are computed, so that a round is trained as if
    they had not been sampled.

    Args:
      rewards: Path of the rewards of all rollouts, in any order.
      shaping: The parameters that map outcomes to rewards.

    Raises:
      ArtifactError: If an artifact is invalid, rewards and rollouts do not match, or no rollout was
        judged and has steps.
    """
    stored = read_batch(rollouts)
    table = stored.table
    judged = read_table(rewards, REWARDS).set_index("rollout_id")
    missing = ~table["rollout_id"].isin(judged.index)
    if missing.any() or len(judged) != len(table):
        example = table.loc[missing, "rollout_id"].iloc[0] if missing.any() else "none"
        raise ArtifactError(
            f"{rewards}: must hold one reward per rollout, has {len(judged)} for {len(table)}, "
            f"first missing: {example}; rerun its score stage"
        )
    _require_counted(rollouts, table)
    _require_shaped(judged, table, rewards, shaping)
    judged = judged.loc[table["rollout_id"]]
    counts = is_judged(judged).to_numpy() & (table["steps"] > 0).to_numpy()
    if not counts.any():
        first = judged.iloc[0]
        raise ArtifactError(
            f"{rewards}: must hold a rollout that was judged and has steps, none of {len(table)} "
            f"does; the first is {first.name} {first['status']}: {first['detail'] or 'no steps'}"
        )
    with located(rollouts / TENSORS):
        sampled = select_rollouts(layout, stored, counts)
    passed = {*read_passed(rollouts), *table["prompt_id"]} - {*sampled.table["prompt_id"]}
    return TrainableRollouts(sampled, judged[counts], sorted(passed))


def _require_counted(rollouts: Path, table: pd.DataFrame) -> None:
    """Raises ArtifactError unless a table has as many rollouts as its summary."""
    path = rollouts / SUMMARY
    summary = read_json(path)
    drawn = summary.get("rollouts") if isinstance(summary, dict) else None
    if drawn != len(table):
        raise ArtifactError(
            f"{path}: rollouts must be {len(table)}, as in its table, got {drawn!r}; rerun the "
            "stage that writes them"
        )


def _require_shaped(
    judged: pd.DataFrame, table: pd.DataFrame, rewards: Path, shaping: Reward
) -> None:
    """Raises ArtifactError unless each reward has the rollout's prompt and follows its outcome.

    Args:
      judged: Rewards of the table's rollouts, indexed by rollout_id.
      table: Schema ROLLOUTS.
    """
    drawn = table.set_index("rollout_id").loc[judged.index]
    penalty = np.where(drawn["is_finished"], 0.0, shaping.unfinished_penalty)
    expected = {"prompt_id": drawn["prompt_id"]}
    if shaping.maximize == "outcome":
        expected["reward"] = judged["outcome"] - penalty
    for column, values in expected.items():
        differs = np.flatnonzero(judged[column] != values)
        if len(differs):
            row = int(differs[0])
            why = "by its outcome and reward.*" if column == "reward" else "as it was sampled"
            rule = f"{values.iloc[row]}, {why}"
            error = wrong_cell(judged.reset_index(), rewards, row, column, rule)
            raise ArtifactError(f"{error}; rerun its score stage")


def _require_as_drawn(
    table: pd.DataFrame, policy: Policy[Any], trajectory: Any, rollouts: Path
) -> None:
    """Raises ArtifactError unless table and tensors agree on each rollout."""
    drawn = {
        "text": policy.decode(trajectory),
        "is_finished": policy.is_finished(trajectory).tolist(),
    }
    for column, values in drawn.items():
        differs = np.flatnonzero(table[column].to_numpy() != np.array(values, dtype=object))
        if len(differs):
            row = int(differs[0])
            rule = f"as in {rollouts / TENSORS}"
            error = wrong_cell(table, rollouts / TABLE, row, column, rule)
            raise ArtifactError(f"{error}; rerun the stage that writes them")


def _credit_table(loaded: LoadedRound, trained: TrainedRound) -> pd.DataFrame:
    """Returns the credit of each rollout under the schema CREDIT."""
    parts = []
    for index, batch in enumerate(trained.batches):
        rows = batch.rows.numpy()
        parts.append(
            pd.DataFrame(
                {
                    "rollout_id": loaded.sampled.table["rollout_id"].to_numpy()[rows],
                    "prompt_id": loaded.sampled.table["prompt_id"].to_numpy()[rows],
                    "update": loaded.start.updates + index,
                    "advantage": rollout_advantage(batch.credit, batch.rollouts).double().numpy(),
                    "weight": batch.credit.weight.double().sum(dim=1).numpy(),
                    "trained_steps": (batch.credit.weight != 0).sum(dim=1).numpy(),
                }
            )
        )
    return pd.concat(parts, ignore_index=True).sort_values("rollout_id", ignore_index=True)
