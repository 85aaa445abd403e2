"""The candidates of a round and the rollouts of its iterations, from parameters and artifacts."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd

from grpo.allocation.curriculum import add_prompts, allocated_sizes, select_phase
from grpo.allocation.online import add_profile
from grpo.allocation.selection import History, deal, require_candidates
from grpo.allocation.signal import Price
from grpo.errors import ArtifactError, ParameterError, located
from grpo.params.parameters import BASE, Parameters
from grpo.runtime.artifacts.tables import CURRICULUM, PROFILED, PROMPTS, read_table
from grpo.runtime.executors.base import Executor
from grpo.runtime.seeds import derive_seed, iteration_seed
from grpo.sampling.round_rollouts import DrawnRound, draw_round, executor_source
from grpo.schema import PARAMS
from grpo.wiring.allocation import build_selection, counts_profile, curriculum_of
from grpo.wiring.policies import mode_name, stored_layout
from grpo.wiring.sampling_workers import SamplingSetup
from grpo.wiring.shaping import build_shaping


def read_candidates(
    params: Parameters, name: str, *, curriculum: Path, prompts: Path
) -> pd.DataFrame:
    """Returns the prompts of a round's phase with their text, sorted by position.

    Raises:
      ParameterError: If there is no such phase, or it has too few prompts for the selection.
      ArtifactError: If the curriculum is invalid or has other prompts.
    """
    each = params.find_round(name)
    selection = build_selection(params.find_arm(each.arm).selection, each.arm)
    plan, tasks = read_table(curriculum, CURRICULUM), read_table(prompts, PROMPTS)
    with located(f"{PARAMS}: rounds.{name}.phase"):
        plan = select_phase(plan, each.phase)
    with located(f"{PARAMS}: arms.{each.arm}.selection"):
        require_candidates(selection, len(plan))
    with located(curriculum):
        _require_allocated(params, each.arm, plan)
        return add_prompts(plan, tasks)


def _require_allocated(params: Parameters, arm: str, plan: pd.DataFrame) -> None:
    """Raises ArtifactError if a group's size differs from the arm's curriculum."""
    steps = curriculum_of(params, arm)
    if not any(step.sizes for step in steps):
        return
    if "rollouts" not in plan:
        raise ArtifactError("column 'rollouts' is missing; rerun the curriculum stage")
    sizes = allocated_sizes(plan, steps)
    broken = plan[plan["rollouts"] != sizes]
    if len(broken):
        first = broken.iloc[0]
        raise ArtifactError(
            f"row {broken.index[0]} (prompt_id={first['prompt_id']!r}): column 'rollouts' must be "
            f"{sizes[broken.index[0]]}, as set by arms.{arm}.curriculum, got {first['rollouts']}; "
            "rerun the curriculum stage"
        )


def draw_iteration(
    setup: SamplingSetup,
    index: int,
    *,
    executor: Executor,
    candidates: pd.DataFrame,
    history: History,
    profile: Path | None = None,
    price: Price | None = None,
    scratch: Path,
    progress: Callable[[int, int], None],
) -> DrawnRound:
    """Returns the rollouts of one iteration of a round.

    Args:
      executor: The executor that was opened with `setup`.
      candidates: The prompts of the phase.
      history: The statistics of the arm's selection after the iteration before.
      profile: Directory of the profile's rollouts; the first iteration may reuse them.
      price: That of `build_price`.

    Raises:
      ArtifactError: If the profile's rollouts are needed and invalid.
    """
    params, name = setup.params, setup.round
    assert name is not None
    each = params.find_round(name)
    arm = params.find_arm(each.arm)
    selection = build_selection(arm.selection, each.arm)
    parts = arm.training.iterations_per_round
    if not selection.chooses_prompts:
        with located(f"{PARAMS}: arms.{each.arm}.training.iterations_per_round"):
            candidates = deal(candidates, parts, index, derive_seed(params.seed, "deal", name))
    reuses = reuses_profile(params, name, index)
    if reuses and price is not None:
        candidates = with_pairs(candidates, each.arm)
        price = replace(price, largest=int(candidates[PROFILED].min()))
    source = executor_source(
        executor,
        layout=stored_layout(params, setup.base),
        shaping=build_shaping(params),
        rollouts_per_batch=arm.sampling.rollouts_per_batch,
        profile=profile if reuses else None,
        progress=progress,
        draws=mode_name(index, arm.sampling.level(history)),
        revision=selection.revision,
    )
    return draw_round(
        selection,
        candidates,
        history,
        source=source,
        seed=iteration_seed(params.seed, "rollout", name, index),
        scratch=scratch,
        price=price,
    )


def with_pairs(candidates: pd.DataFrame, arm: str) -> pd.DataFrame:
    """Returns the prompts of which the profile has two judged rollouts, the smallest group.

    Raises:
      ParameterError: If there are none.
    """
    kept = candidates[candidates[PROFILED] >= 2].reset_index(drop=True)
    if kept.empty:
        raise ParameterError(
            f"{PARAMS}: arms.{arm}.selection: reuse_profile_rollouts needs two judged rollouts of "
            "a prompt; set profile.rollouts_per_prompt to 2 or more"
        )
    return kept


def reuses_profile(params: Parameters, name: str, index: int) -> bool:
    """Returns whether an iteration of a round trains on the profile's rollouts."""
    each = params.find_round(name)
    selection = build_selection(params.find_arm(each.arm).selection, each.arm)
    return selection.reuses_profile and each.start == BASE and index == 0


def first_history(params: Parameters, name: str, history: History, *, curriculum: Path) -> History:
    """Returns the statistics of an arm's selection before a round.

    The profile's outcomes are the first data of an online allocation, if the arm reads a profile.

    Args:
      history: Of the policy that the round starts from.

    Raises:
      ArtifactError: If the curriculum is invalid.
    """
    if not counts_profile(params, params.find_round(name).arm):
        return history
    plan = read_table(curriculum, CURRICULUM)
    if PROFILED not in plan:
        raise ArtifactError(f"{curriculum}: column {PROFILED!r} is missing; rerun its stage")
    return add_profile(history, plan)
