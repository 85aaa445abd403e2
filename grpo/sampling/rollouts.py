"""Sampled rollouts and their storage."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jaxtyping import UInt8
from torch import Tensor

from grpo.errors import ArtifactError, located
from grpo.modalities.shared.directories import require_counts
from grpo.modalities.shared.packed import STEPS, Layout, select_packed
from grpo.runtime.artifacts.files import read_json, write_json
from grpo.runtime.artifacts.tables import (
    ALLOCATION,
    ROLLOUTS,
    SUMMARY,
    TABLE,
    TENSORS,
    is_judged,
    member_ids,
    read_table,
    write_table,
    wrong_cell,
)
from grpo.runtime.artifacts.tensors import read_tensors, write_tensors
from grpo.types import Cost

COST = "cost.json"
ALLOCATED = "allocation.parquet"  # what an online allocation chose of all candidates
PASSED = "passed.json"  # prompts that a round visited but does not train on


@dataclass(frozen=True, kw_only=True)
class SampledBatch:
    """Rollouts in their stored form: a table, ragged tensors, and their cost."""

    table: pd.DataFrame  # schema ROLLOUTS
    tensors: dict[str, Tensor]  # from `Trajectory.pack`
    cost: Cost

    @property
    def media(self) -> UInt8[Tensor, " rollout *sample"] | None:
        """The sampled media, one per row of the table; None if rollouts are text."""
        return self.tensors.get("media")


def write_rollouts(
    directory: Path, batch: SampledBatch, selection: Mapping[str, int | float] | None = None
) -> None:
    """Writes a round's rollouts and their summary.

    Args:
      selection: Counts of the prompts of its phase, if the arm has a selection.
    """
    write_batch(directory, batch)
    table = batch.table
    summary = {
        "cost": asdict(batch.cost),
        "prompts": int(table["group"].nunique()),
        "rollouts": len(table),
        "finished_fraction": float(table["is_finished"].mean()),
        **({} if selection is None else {"selection": dict(selection)}),
    }
    write_json(directory / SUMMARY, summary)


def read_allocation(directory: Path) -> pd.DataFrame | None:
    """Returns what an online allocation chose, schema ALLOCATION; None without one.

    Raises:
      ArtifactError: If the file is invalid.
    """
    path = directory / ALLOCATED
    return read_table(path, ALLOCATION) if path.exists() else None


def read_passed(directory: Path) -> list[str]:
    """Returns the prompts that a round visited but does not train on; none without a selection.

    Raises:
      ArtifactError: If the file is invalid.
    """
    path = directory / PASSED
    passed = read_json(path) if path.exists() else []
    if not isinstance(passed, list) or not all(isinstance(each, str) for each in passed):
        raise ArtifactError(f"{path}: must be a list of prompt ids; rerun the stage rollout")
    return passed


def concatenate(batches: list[SampledBatch]) -> SampledBatch:
    """Returns the batches concatenated, in order."""
    return SampledBatch(
        table=pd.concat([batch.table for batch in batches], ignore_index=True),
        tensors={
            name: torch.cat([batch.tensors[name] for batch in batches])
            for name in batches[0].tensors
        },
        cost=sum((batch.cost for batch in batches), Cost()),
    )


def select_rollouts(layout: Layout, batch: SampledBatch, kept: np.ndarray) -> SampledBatch:
    """Returns some rollouts of a batch; their cost is that of the whole batch.

    Args:
      kept: Mask over the rows of the table.

    Raises:
      ArtifactError: If the tensors do not fit the layout or the table.
    """
    if kept.all():
        return batch
    group = torch.tensor(batch.table["group"].to_numpy())
    return SampledBatch(
        table=batch.table[kept].reset_index(drop=True),
        tensors=select_packed(layout, batch.tensors, group, torch.tensor(kept)),
        cost=batch.cost,
    )


def keep_judged(layout: Layout, batch: SampledBatch, rewards: pd.DataFrame) -> SampledBatch:
    """Returns the judged rollouts of a batch; their cost is that of the whole batch.

    Args:
      rewards: Schema REWARDS, of the same rollouts in any order.
    """
    judged = rewards.set_index("rollout_id").loc[batch.table["rollout_id"]]
    return select_rollouts(layout, batch, is_judged(judged).to_numpy())


def number_anew(batch: SampledBatch) -> SampledBatch:
    """Returns the batch with ids that count its rollouts of each prompt from 0, without a gap."""
    return replace(batch, table=batch.table.assign(rollout_id=member_ids(batch.table)))


def write_batch(directory: Path, batch: SampledBatch) -> None:
    """Writes a batch to a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    write_table(batch.table, directory / TABLE, ROLLOUTS)
    write_tensors(directory / TENSORS, batch.tensors)
    write_json(directory / COST, asdict(batch.cost))


def read_batch(directory: Path) -> SampledBatch:
    """Returns a batch that `write_batch` wrote.

    Raises:
      ArtifactError: If a file is missing or invalid.
    """
    table = read_table(directory / TABLE, ROLLOUTS)
    tensors = read_tensors(directory / TENSORS)
    _require_same_steps(directory, table, tensors)
    return SampledBatch(table=table, tensors=tensors, cost=read_cost(directory / COST))


def read_cost(path: Path) -> Cost:
    """Returns the cost in a file.

    Raises:
      ArtifactError: If the file is missing, or its fields are not integers >= 0.
    """
    try:
        cost = Cost(**read_json(path))
    except TypeError as error:
        raise ArtifactError(f"{path}: must hold a cost, {error}; rerun its stage") from None
    with located(path):
        require_counts(cost)
    return cost


def _require_same_steps(directory: Path, table: pd.DataFrame, tensors: dict[str, Tensor]) -> None:
    """Raises ArtifactError unless table and tensors agree on the number of steps per rollout."""
    steps = tensors.get(STEPS)
    if steps is None or len(steps) != len(table):  # `Policy.unpack` raises
        return
    differs = np.flatnonzero(table["steps"].to_numpy() != steps.numpy())
    if len(differs):
        row = int(differs[0])
        rule = f"{int(steps[row])}, as in {directory / TENSORS}"
        error = wrong_cell(table, directory / TABLE, row, "steps", rule)
        raise ArtifactError(f"{error}; rerun the stage that writes them")
