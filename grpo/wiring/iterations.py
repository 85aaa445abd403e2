"""One iteration of a round: its rollouts and rewards, and the record of its training."""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

from grpo.allocation.forecast import compare_forecast
from grpo.allocation.selection import History, learn_round
from grpo.errors import ArtifactError, located
from grpo.modalities.policy import Policy, make_rollouts
from grpo.modalities.shared.directories import PolicyState, read_state, read_trainable
from grpo.modalities.shared.optimizer import PreciseAdamW
from grpo.modalities.shared.packed import Layout
from grpo.objective.advantage import rollout_advantage
from grpo.objective.base import Objective, State
from grpo.objective.penalty import needs_reference, penalizes_reward
from grpo.params.parameters import DecayingRate, Parameters, Training
from grpo.rewards.base import Part
from grpo.runtime.artifacts.files import atomic_path, read_json, write_json
from grpo.runtime.artifacts.tables import (
    ALLOCATION_RECORD,
    CREDIT,
    PARTS,
    PROMPT_WEIGHT,
    REWARDS,
    SCORE,
    SUMMARY,
    TABLE,
    TENSORS,
    is_judged,
    read_table,
    write_csv,
    write_table,
    wrong_cell,
)
from grpo.runtime.seeds import iteration_seed
from grpo.sampling.rollouts import (
    SampledBatch,
    read_allocation,
    read_batch,
    read_passed,
    select_rollouts,
)
from grpo.sampling.shaping import Shaping, improvements, reward_parts
from grpo.training.batches import explain_fewer
from grpo.training.frozen import compute_log_probs
from grpo.training.metrics import UpdateMetrics, step_metrics
from grpo.training.plateau import Plateau, find_plateau
from grpo.training.schedule import LearningRate, schedule_learning_rate
from grpo.training.updates import Iteration, TrainedIteration, TrainingSettings
from grpo.types import Cost, PartScores
from grpo.wiring.allocation import build_selection
from grpo.wiring.objectives import build_objective
from grpo.wiring.policies import load_policy, make_optimizer, scoring_draws_of_round
from grpo.wiring.rollouts import reuses_profile
from grpo.wiring.shaping import build_shaping


class RoundInputs(NamedTuple):
    """Paths of a round's inputs."""

    judge: Path  # manifest of the judge's files
    base: Path  # the base policy
    start: Path  # the policy that the round starts from
    prompts: Path
    curriculum: Path
    rollouts: Path  # of the first iteration
    rewards: Path


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """What stays loaded while a round is trained."""

    params: Parameters
    name: str  # of the round
    policy: Policy[Any]
    optimizer: PreciseAdamW
    objective: Objective
    reference: Policy[Any] | None  # the reference policy, if a link needs it
    start: PolicyState
    learning_rate: LearningRate | None  # None: that of the optimizer

    @property
    def arm(self) -> str:
        """The name of the round's arm."""
        return self.params.find_round(self.name).arm

    @property
    def training(self) -> Training:
        """The arm's parameters of training."""
        return self.params.find_arm(self.arm).training

    @property
    def reference_name(self) -> str | None:
        """The name of the reference policy if it is refreshed, and a link needs it."""
        is_used = self.reference is not None and self.training.refreshes_reference
        return self.start.name if is_used else None


@dataclass(frozen=True, kw_only=True)
class RoundState:
    """What the finished iterations of a round have left, beside weights and optimizer state."""

    metrics: tuple[UpdateMetrics, ...] = ()
    objective_state: State
    selection_state: History
    sampling_costs: tuple[Cost, ...] = ()  # one per finished iteration
    rewards: tuple[float, ...] = ()  # mean over the rollouts of each finished iteration
    plateau: Plateau | None = None  # on which the round has ended
    audit_cost: Cost = field(default_factory=Cost)
    drift_max: float = 0.0  # nats, between sampler and trainer before any update
    fewer_updates: str | None = None  # why the first iteration with too few updates had fewer

    @property
    def iterations(self) -> int:
        """The number of finished iterations."""
        return len(self.sampling_costs)


@dataclass(frozen=True, kw_only=True)
class LoadedIteration:
    """The rollouts and rewards of one iteration."""

    iteration: Iteration
    sampled: SampledBatch  # the same rows as the rollouts of `iteration`
    passed: list[str]  # prompts that were visited but are not trained on
    allocation: pd.DataFrame | None  # schema ALLOCATION; None: not allocated online
    rewards: tuple[float, ...]  # mean over the rollouts of each iteration, this one's at the end
    plateau: Plateau | None  # None: the round does not end here on one


def load_trainer(params: Parameters, name: str, inputs: RoundInputs) -> Trainer:
    """Returns the policy that a round starts from, its optimizer and its objective.

    Raises:
      ArtifactError: If an artifact is invalid.
    """
    each, base, start = params.find_round(name), inputs.base, inputs.start
    arm = params.find_arm(each.arm)
    draws = scoring_draws_of_round(params, name)
    policy = load_policy(params, base=base, directory=start, draws=draws)
    optimizer = make_optimizer(policy.model, arm.training)
    state = read_state(start, each.start)
    if state.arm is not None:
        read_trainable(start, policy.model, optimizer)
    objective = build_objective(arm.objective, each.arm)
    reference: Policy[Any] | None = None
    if needs_reference(objective):
        draws = params.modality.reference_draws(draws)
        directory = start if arm.training.refreshes_reference else base
        reference = load_policy(params, base=base, directory=directory, draws=draws)
    return Trainer(
        params=params,
        name=name,
        policy=policy,
        optimizer=optimizer,
        objective=objective,
        reference=reference,
        start=state,
        learning_rate=build_learning_rate(arm.training),
    )


def load_iteration(
    trainer: Trainer, state: RoundState, *, rollouts: Path, rewards: Path
) -> LoadedIteration:
    """Returns the next iteration's rollouts and rewards, ready for its updates.

    Raises:
      ArtifactError: If an artifact is invalid, or rewards and rollouts do not match.
    """
    params, name, index = trainer.params, trainer.name, state.iterations
    policy, reference = trainer.policy, trainer.reference
    level = params.find_arm(trainer.arm).sampling.level(state.selection_state)
    policy.decoding = scoring_draws_of_round(params, name, index, level=level)
    if reference is not None:
        reference.decoding = params.modality.reference_draws(policy.decoding)
    sampled, judged, passed = read_trainable_rollouts(
        policy.layout, rollouts, rewards, build_shaping(params)
    )
    group = torch.tensor(sampled.table["group"].to_numpy())
    with located(rollouts / TENSORS):
        trajectory, behavior_logp = policy.unpack(sampled.tensors, group)
    _require_as_drawn(sampled.table, policy, trajectory, rollouts)
    settings = training_settings(trainer.training)
    reference_logp = None
    if reference and penalizes_reward(trainer.objective):
        frozen = compute_log_probs(
            reference, trajectory, trajectory.mask.float(), settings.tokens_per_microbatch
        )
        reference_logp = frozen.logp
    made = make_rollouts(
        trajectory,
        behavior_logp,
        group=group,
        reward=torch.tensor(judged["reward"].to_numpy(np.float32)),
        outcome=torch.tensor(judged["outcome"].to_numpy(np.float32)),
        reference_logp=reference_logp,
        improvement=_improvement(trainer, sampled.table, judged),
        prompt_weight=_prompt_weight(sampled.table),
        parts=_part_scores(trainer, trajectory, judged, rewards),
    )
    series = (*state.rewards, float(made.reward.double().mean()))
    plateau = _find_plateau(trainer.training, series)
    seed = iteration_seed(params.seed, "train", name, index)
    return LoadedIteration(
        iteration=Iteration(
            policy=policy,
            optimizer=trainer.optimizer,
            objective=trainer.objective,
            objective_state=state.objective_state,
            reference=reference,
            settings=settings,
            trajectory=trajectory,
            rollouts=made,
            first_update=trainer.start.updates + len(state.metrics),
            generator=torch.Generator().manual_seed(seed),
            learning_rate=trainer.learning_rate,
            is_last=plateau is not None or index + 1 == trainer.training.iterations_per_round,
        ),
        sampled=sampled,
        passed=passed,
        allocation=read_allocation(rollouts),
        rewards=series,
        plateau=plateau,
    )


def _find_plateau(training: Training, rewards: tuple[float, ...]) -> Plateau | None:
    """Returns the plateau on which a round ends before its last iteration, if there is one.

    It is known before the updates of its last iteration, whose rollouts the policy has sampled.
    """
    stop = training.stop_on_plateau
    if stop is None or len(rewards) == training.iterations_per_round:
        return None
    return find_plateau(rewards, iterations=stop.iterations, tolerance=stop.tolerance)


def _improvement(
    trainer: Trainer, rollouts: pd.DataFrame, rewards: pd.DataFrame
) -> torch.Tensor | None:
    """Returns what rollouts improve on first answers; None if the arm does not revise any."""
    selection = trainer.params.find_arm(trainer.arm).selection
    revision = build_selection(selection, trainer.arm).revision
    if revision is None:
        return None
    found = improvements(rollouts, rewards, revision.judge)
    return torch.tensor(found.astype(np.float32))


def _prompt_weight(rollouts: pd.DataFrame) -> torch.Tensor | None:
    """Returns the weight of each rollout's prompt; None if prompts weigh the same."""
    if PROMPT_WEIGHT not in rollouts:
        return None
    return torch.tensor(rollouts[PROMPT_WEIGHT].to_numpy(np.float32))


def _part_scores(
    trainer: Trainer, trajectory: Any, rewards: pd.DataFrame, path: Path
) -> PartScores | None:
    """Returns the scores of the parts of texts, at their last steps; None if no link reads them.

    Raises:
      ArtifactError: If the rewards have none.
    """
    if not any("part scores" in link.kinds for link in trainer.objective.links):
        return None
    if PARTS not in rewards:
        raise ArtifactError(f"{path}: column {PARTS!r} is missing; rerun its score stage")
    parts = [[Part(*each) for each in json.loads(cell)] for cell in rewards[PARTS]]
    ends = trainer.policy.find_steps(trajectory, [[part.end for part in row] for row in parts])
    shape = len(parts), max(map(len, parts))
    end, score = torch.full(shape, -1), torch.zeros(shape)
    for row, (steps, of_row) in enumerate(zip(ends, parts)):
        end[row, : len(steps)] = torch.tensor(steps, dtype=torch.long)
        score[row, : len(steps)] = torch.tensor([part.score for part in of_row])
    return PartScores(end, score)


def advance(
    state: RoundState, loaded: LoadedIteration, trained: TrainedIteration, history: History
) -> RoundState:
    """Returns the state of a round after an iteration.

    Args:
      history: The statistics of the arm's selection after it.
    """
    given = loaded.iteration
    fewer = explain_fewer(given.settings.updates_per_iteration, given.rollouts, trained.batches)
    return RoundState(
        metrics=(*state.metrics, *trained.metrics),
        objective_state=trained.objective_state,
        selection_state=history,
        sampling_costs=(*state.sampling_costs, loaded.sampled.cost),
        rewards=loaded.rewards,
        plateau=loaded.plateau,
        audit_cost=state.audit_cost + trained.audit_cost,
        drift_max=max(state.drift_max, trained.drift_max),
        fewer_updates=state.fewer_updates or fewer,
    )


def write_record(
    directory: Path,
    trainer: Trainer,
    state: RoundState,
    loaded: LoadedIteration,
    trained: TrainedIteration,
    history: History,
    cost: Cost,
) -> None:
    """Writes the metrics by step and by phase, the credit of each rollout, and what has a level.

    If prompts or group sizes are allocated online, also what that expected and what happened.

    Args:
      state: Before the iteration.
      history: The statistics of the arm's selection after it.
      cost: Of the updates.
    """
    with atomic_path(directory) as temporary:
        temporary.mkdir()
        steps = step_metrics(loaded.iteration.rollouts, trained.batches)
        write_csv(temporary / "steps.csv", pd.DataFrame([asdict(each) for each in steps]))
        _write_phases(temporary / "phases.csv", trainer, loaded, trained)
        write_table(_credit_table(loaded, trained), temporary / "credit.parquet", CREDIT)
        sampling = trainer.params.find_arm(trainer.arm).sampling
        if settings := sampling.describe(sampling.level(state.selection_state)):
            write_json(temporary / "sampling.json", settings)
        if loaded.allocation is not None:
            selection = trainer.params.find_arm(trainer.arm).selection
            record = compare_forecast(
                loaded.allocation,
                _outcomes(loaded),
                history,
                seconds=build_selection(selection, trainer.arm).seconds,
                sampling=loaded.sampled.cost,
                updates=cost,
            )
            write_json(temporary / ALLOCATION_RECORD, record)


def _outcomes(loaded: LoadedIteration) -> pd.DataFrame:
    """Returns prompt_id, steps and raw outcome of the rollouts."""
    outcome = loaded.iteration.rollouts.outcome.numpy()
    return loaded.sampled.table[["prompt_id", "steps"]].assign(outcome=outcome)


def _write_phases(
    path: Path, trainer: Trainer, loaded: LoadedIteration, trained: TrainedIteration
) -> None:
    """Writes the training metrics by phase, if steps have phases."""
    modality, rollouts = trainer.params.modality, loaded.iteration.rollouts
    phases = modality.phases(trainer.params.policy)
    if not phases:
        return
    had_weight = torch.zeros_like(rollouts.mask)
    for batch in trained.batches:
        had_weight[batch.rows] = batch.credit.weight != 0
    rows = modality.describe_phases(
        rollouts, had_weight, trained.objective_state, [each.name for each in phases]
    )
    write_csv(path, pd.DataFrame([asdict(each) for each in rows]))


def learn_iteration(trainer: Trainer, state: RoundState, loaded: LoadedIteration) -> History:
    """Returns the statistics for the selection and the sampling of the next iteration."""
    arm = trainer.params.find_arm(trainer.arm)
    selection, passed = build_selection(arm.selection, trainer.arm), loaded.passed
    outcomes = _outcomes(loaded)
    if selection.allocate and reuses_profile(trainer.params, trainer.name, state.iterations):
        # Their outcomes are those of the profile, which `first_history` has counted.
        passed, outcomes = [*passed, *outcomes["prompt_id"].unique()], outcomes[:0]
    learned = learn_round(selection, state.selection_state, outcomes, passed)
    return arm.sampling.learn(learned, loaded.rewards[-1])


def training_settings(training: Training) -> TrainingSettings:
    """Returns the settings of an arm's training that updates need."""
    names = [each.name for each in fields(TrainingSettings)]
    return TrainingSettings(**{name: getattr(training, name) for name in names})


def build_learning_rate(training: Training) -> LearningRate | None:
    """Returns the learning rate by update; None if the arm has no schedule."""
    schedule = training.schedule
    if schedule is None:
        return None
    return schedule_learning_rate(
        schedule.kind,
        training.learning_rate,
        warmup_updates=schedule.warmup_updates,
        total_updates=schedule.total_updates if isinstance(schedule, DecayingRate) else 0,
    )


class _TrainableRollouts(NamedTuple):
    """The rollouts of a round that are trained on."""

    sampled: SampledBatch  # the cost is that of all rollouts
    rewards: pd.DataFrame  # the same rows as `sampled`
    passed: list[str]  # visited prompts without such a rollout


def read_trainable_rollouts(
    layout: Layout, rollouts: Path, rewards: Path, shaping: Shaping
) -> _TrainableRollouts:
    """Returns the rollouts of a round that were judged and have steps.

    The others are dropped before group statistics are computed, so that a round is trained as if
    they had not been sampled.

    Args:
      rewards: Path of the rewards of all rollouts, in any order.
      shaping: The mapping from scores to rewards.

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
    return _TrainableRollouts(sampled, judged[counts], sorted(passed))


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
    judged: pd.DataFrame, table: pd.DataFrame, rewards: Path, shaping: Shaping
) -> None:
    """Raises ArtifactError unless each reward has the rollout's prompt and follows its outcome.

    Parts must end within the rollout's text.

    Args:
      judged: Rewards of the table's rollouts, indexed by rollout_id.
      table: Schema ROLLOUTS.
    """
    drawn = table.set_index("rollout_id").loc[judged.index]
    expected = {"prompt_id": drawn["prompt_id"]}
    has_scores = all(SCORE + each.judge in judged for each in shaping.shares)
    if has_scores or shaping.maximize == "outcome":
        parts = reward_parts(judged.reset_index(drop=True), shaping)
        expected["reward"] = pd.Series(sum(parts.values()) - shaping.penalties(drawn))
    for column, values in expected.items():
        differs = np.flatnonzero(judged[column].to_numpy() != values.to_numpy())
        if len(differs):
            row = int(differs[0])
            why = "by its outcome and reward.*" if column == "reward" else "as it was sampled"
            rule = f"{values.iloc[row]}, {why}"
            error = wrong_cell(judged.reset_index(), rewards, row, column, rule)
            raise ArtifactError(f"{error}; rerun its score stage")
    for row, (cell, text) in enumerate(zip(judged.get(PARTS, ()), drawn["text"])):
        if any(end > len(text) for end, _ in json.loads(cell)):
            rule = f"within the {len(text)} characters of its text"
            error = wrong_cell(judged.reset_index(), rewards, row, PARTS, rule)
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


def _credit_table(loaded: LoadedIteration, trained: TrainedIteration) -> pd.DataFrame:
    """Returns the credit of each rollout under the schema CREDIT."""
    parts = []
    for index, batch in enumerate(trained.batches):
        rows = batch.rows.numpy()
        parts.append(
            pd.DataFrame(
                {
                    "rollout_id": loaded.sampled.table["rollout_id"].to_numpy()[rows],
                    "prompt_id": loaded.sampled.table["prompt_id"].to_numpy()[rows],
                    "update": loaded.iteration.first_update + index,
                    "advantage": rollout_advantage(batch.credit, batch.rollouts).double().numpy(),
                    "weight": batch.credit.weight.double().sum(dim=1).numpy(),
                    "trained_steps": (batch.credit.weight != 0).sum(dim=1).numpy(),
                }
            )
        )
    return pd.concat(parts, ignore_index=True).sort_values("rollout_id", ignore_index=True)
