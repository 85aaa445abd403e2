"""What a round may sample, and where its rollouts come from, from parameters and artifacts."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from grpo.artifacts.tables import CURRICULUM, read_table
from grpo.build.rewards import build_reward
from grpo.curriculum import add_prompts, select_phase
from grpo.errors import located
from grpo.params import BASE, DATA, PARAMS, Parameters
from grpo.policies.base import Policy
from grpo.policies.scope import Judgement
from grpo.policy_params import DenoisingSampling
from grpo.rollout import Source, policy_source
from grpo.scoring import score_captions, without_shaping
from grpo.selection import Selection, require_candidates


def read_candidates(
    params: Parameters, name: str, selection: Selection, *, curriculum: Path, tasks: pd.DataFrame
) -> pd.DataFrame:
    """Returns the prompts of a round's phase in its order, with their text.

    Raises:
      ParameterError: If there is no such phase, or it has too few prompts for the selection.
      ArtifactError: If the curriculum is broken or of other prompts.
    """
    each = params.find_round(name)
    plan = read_table(curriculum, CURRICULUM)
    with located(f"{PARAMS}: rounds.{name}.phase"):
        plan = select_phase(plan, each.phase)
    with located(f"{PARAMS}: arms.{each.arm}.selection"):
        require_candidates(selection, len(plan))
    with located(curriculum):
        return add_prompts(plan, tasks)


def judge_on_the_way(params: Parameters, arm: str, tasks: pd.DataFrame) -> Judgement | None:
    """Returns what judges an arm's pilots; None if it looks at none.

    Raises:
      MissingExtraError: If the judge's package is not installed.
      ParameterError: If the judge's model cannot be loaded.
    """
    sampling = params.find_arm(arm).sampling
    if not isinstance(sampling, DenoisingSampling) or sampling.scope is None:
        return None
    rule = without_shaping(build_reward(params, DATA))
    return partial(score_captions, tasks=tasks, rule=rule)


def build_source(
    params: Parameters,
    name: str,
    selection: Selection,
    *,
    policy: Policy[Any],
    tasks: pd.DataFrame,
    profile: Path,
    progress: Callable[[int, int], None],
) -> Source:
    """Returns the source of a round's rollouts: its policy, or what the profile drew from it.

    Raises:
      ArtifactError: If the profile's rollouts are needed and broken.
      MissingExtraError: If the judge's package is not installed.
    """
    each = params.find_round(name)
    arm = params.find_arm(each.arm)
    reuses = selection.reuses_profile and each.start == BASE
    return policy_source(
        policy,
        rule=None if selection.keeps_uniform else build_reward(params, DATA),
        tasks=tasks,
        rollouts_per_batch=arm.sampling.rollouts_per_batch,
        profile=profile if reuses else None,
        progress=progress,
    )
