"""Inputs of the advice: a finished profile, its prompt lengths and a cost model."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from grpo.allocation.posterior import Ints, Posterior, Prior, fit_prior, update
from grpo.errors import ArtifactError
from grpo.modalities.costs import CostModel
from grpo.params.parameters import BASE, Parameters
from grpo.runtime.artifacts.files import read_json
from grpo.runtime.artifacts.tables import (
    PROMPTS,
    ROLLOUTS,
    TABLE,
    known_prompts,
    read_profile,
    read_table,
)
from grpo.types import Cost
from grpo.wiring.prices import load_cost_model

MAKE_PROFILE = "dvc repro profile"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A finished profile and a cost model of the base policy."""

    profile: pd.DataFrame  # schema PROFILE plus prompt_tokens, sorted by prompt_id
    rollouts: pd.DataFrame  # columns row (of `profile`, ascending) and steps, one row per rollout
    cost: Cost  # of the profile
    rollouts_per_batch: int  # with which the profile was sampled
    cost_model: CostModel  # of the base policy
    prior: Prior
    posterior: Posterior  # in the row order of `profile`

    def rows_of(self, prompt_ids: pd.Series) -> Ints:
        """Returns the row numbers of these prompts in `profile`."""
        return np.asarray(self.profile["prompt_id"].searchsorted(prompt_ids))

    @property
    def drawn(self) -> Ints:
        """The number of sampled rollouts of each prompt, of which `profile` counts the judged."""
        counts: Ints = np.bincount(self.rollouts["row"], minlength=len(self.profile))
        return counts

    def steps_of(self, row: int) -> Ints:
        """Returns the lengths in steps of a prompt's rollouts in the profile."""
        return self._steps[self._starts[row] : self._starts[row + 1]]

    @cached_property
    def in_training(self) -> "Facts":
        """These facts, with the lengths that rollouts are expected to have while training.

        Training makes solved rollouts more likely: a prompt's rollouts become as long as its
        solved ones are, on average. Those of a prompt without solved rollouts change by the ratio
        that prompts with both outcomes have.
        """
        mean, solved = self.profile["mean_steps"], self.profile["solved_steps"]
        is_mixed = self.profile["outcome_rate"].between(0, 1, inclusive="neither")
        ratio = solved[is_mixed].sum() / mean[is_mixed].sum() if is_mixed.any() else 1.0
        factor = (solved / mean).fillna(ratio).to_numpy()
        row = self.rollouts["row"]
        steps = (self.rollouts["steps"] * factor[row]).round()
        steps = steps.clip(1, self.rollouts["steps"].max()).astype("int64")
        return replace(
            self,
            profile=self.profile.assign(mean_steps=steps.groupby(row).mean()),
            rollouts=self.rollouts.assign(steps=steps),
        )

    @cached_property
    def _steps(self) -> Ints:
        return self.rollouts["steps"].to_numpy()

    @cached_property
    def _starts(self) -> Ints:
        return self.rollouts["row"].searchsorted(np.arange(len(self.profile) + 1))


def make_facts(
    profile: pd.DataFrame,
    rollouts: pd.DataFrame,
    *,
    prompt_tokens: Mapping[str, int],
    cost: Cost,
    rollouts_per_batch: int,
    cost_model: CostModel,
) -> Facts:
    """Returns the facts of a profile.

    Args:
      profile: Schema PROFILE.
      rollouts: Columns prompt_id and steps of the profile's rollouts.
    """
    ordered = profile.sort_values("prompt_id", ignore_index=True)
    tokens = ordered["prompt_id"].map(prompt_tokens).astype("int64")
    counts = ordered["successes"].to_numpy(), ordered["rollouts"].to_numpy()
    rollouts = rollouts[rollouts["prompt_id"].isin(ordered["prompt_id"])]
    row = ordered["prompt_id"].searchsorted(rollouts["prompt_id"])
    drawn = pd.DataFrame({"row": row, "steps": rollouts["steps"].to_numpy()})
    prior = fit_prior(*counts)
    return Facts(
        profile=ordered.assign(prompt_tokens=tokens),
        rollouts=drawn.sort_values("row", kind="stable", ignore_index=True),
        cost=cost,
        rollouts_per_batch=rollouts_per_batch,
        cost_model=cost_model,
        prior=prior,
        posterior=update(prior, *counts),
    )


def read_facts(artifacts: Path, params: Parameters) -> Facts:
    """Returns the facts of the profile under `artifacts`; loads the base policy.

    Raises:
      ArtifactError: If the profile is missing, empty, broken, or of other parameters.
      ParameterError: If the modality has no cost model.
    """
    folder = artifacts / "profile"
    for name in ("prompts.parquet", "rollouts/table.parquet"):
        if not (folder / name).exists():
            raise ArtifactError(f"{folder / name}: must exist; run: {MAKE_PROFILE}")
    profile = read_profile(folder / "prompts.parquet")
    if not len(profile):
        raise ArtifactError(
            f"{folder}: must hold rollouts, is empty because no arm reads a profile; set "
            f"profile.when to always and run: {MAKE_PROFILE}"
        )
    texts = read_table(artifacts / "prompts" / "train.parquet", PROMPTS)
    _require_same(folder, profile, texts, params)
    cost_model = load_cost_model(params, artifacts / "policies" / BASE)
    tokens = cost_model.count_tokens(texts["prompt"].tolist())
    summary = read_json(folder / "summary.json")
    return make_facts(
        known_prompts(profile),
        read_table(folder / "rollouts" / TABLE, ROLLOUTS),
        prompt_tokens=dict(zip(texts["prompt_id"], tokens)),
        cost=Cost(**summary["cost"]),
        rollouts_per_batch=params.profile.rollouts_per_batch,
        cost_model=cost_model,
    )


def _require_same(
    folder: Path, profile: pd.DataFrame, texts: pd.DataFrame, params: Parameters
) -> None:
    """Raises ArtifactError unless the profile was made with these prompts and parameters."""
    if set(profile["prompt_id"]) != set(texts["prompt_id"]):
        raise ArtifactError(
            f"{folder}: must be of the prompts in {folder.parent / 'prompts'}, got others; run: "
            f"{MAKE_PROFILE}"
        )
    # A prompt has fewer rollouts than were asked for if the judge failed on some.
    asked, most = params.profile.rollouts_per_prompt, profile["rollouts"].max()
    if most > asked or (most < asked and profile["rollouts"].min() == most):
        raise ArtifactError(
            f"{folder}: must have {asked} rollouts per prompt (profile.rollouts_per_prompt), got "
            f"{most}; run: {MAKE_PROFILE}"
        )
