"""Draws rollouts in batches that are the same however often the work is interrupted."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import UInt8
from torch import Tensor

from grpo.errors import ArtifactError, located
from grpo.modalities.base import Policy
from grpo.modalities.shared.directories import require_counts
from grpo.modalities.shared.packed import STEPS, Layout, select_packed
from grpo.runtime.artifacts.files import atomic_path, read_json, write_json
from grpo.runtime.artifacts.tables import ROLLOUTS, is_judged, read_table, write_table, wrong_cell
from grpo.runtime.artifacts.tensors import read_tensors, write_tensors
from grpo.runtime.executors.base import Executor, Job, Local, Skill, Work
from grpo.runtime.seeds import derive_seed
from grpo.types import Cost

COST = "cost.json"
SUMMARY = "summary.json"
PASSED = "passed.json"  # prompts that a round visited and does not train on


@dataclass(frozen=True, kw_only=True)
class SampledBatch:
    """Rollouts as they are stored: a table, ragged tensors, and what they cost."""

    table: pd.DataFrame  # schema ROLLOUTS
    tensors: dict[str, Tensor]  # as the policy packs its trajectory
    cost: Cost

    @property
    def media(self) -> UInt8[Tensor, " rollout *sample"] | None:
        """What was drawn, row by row with the table; None if rollouts are text."""
        return self.tensors.get("media")


def sample_rollouts(
    executor: Executor,
    prompts: pd.DataFrame,
    *,
    rollouts_per_batch: int,
    seed: int,
    scratch: Path,
    draws: str = "sampled",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> SampledBatch:
    """Returns rollouts of all prompts, drawn batch by batch.

    A batch is fixed by the prompts and `rollouts_per_batch` alone and has its own seed, so it
    does not matter who draws it or when, and one that is found in `scratch` is not drawn again.

    Args:
      executor: Of which `drawing` is a skill.
      prompts: Columns prompt_id, prompt, rollouts; the group is the row's position.
      draws: The name of a way of drawing.
      progress: Called with the batches done and their number.
    """
    jobs = [
        Job(
            "draw",
            {"prompts": batch.to_dict("list"), "draws": draws, "seed": derive_seed(seed, index)},
            _place(scratch, index),
        )
        for index, batch in enumerate(_plan_batches(prompts, rollouts_per_batch))
    ]
    executor.finish(jobs, progress)
    return concatenate([read_batch(job.out) for job in jobs])


def drawing(
    load: Callable[[], Policy[Any]], draws: Mapping[str, Any], source: object = "the policy"
) -> Skill:
    """Returns the skill "draw"; it raises ArtifactError if a log-prob is not finite.

    Args:
      draws: What to set as the policy's `decoding`, by the name of a way of drawing.
      source: Of the policy, as that error names it: its directory.
    """

    def draw(order: dict[str, Any], out: Path) -> None:
        policy = load()
        policy.decoding = draws[order["draws"]]
        batch = pd.DataFrame(order["prompts"])
        with located(source):
            sampled = _sample_batch(policy, batch, seed=order["seed"])
        write_batch(out, sampled)

    return draw


def drawn_from(policy: Policy[Any], source: object = "the policy") -> Executor:
    """Returns the executor that draws from a policy in this process, as it is."""
    return Local(Work({"draw": drawing(lambda: policy, {"sampled": policy.decoding}, source)}))


def stored_batches(scratch: Path) -> list[Path]:
    """Returns the directories of the batches in a scratch, in their order."""
    return sorted(scratch.glob("batch-*"))


def store_batch(scratch: Path, batch: SampledBatch) -> None:
    """Writes rollouts that were not drawn here as the only batch of a scratch."""
    with atomic_path(_place(scratch, 0)) as temporary:
        write_batch(temporary, batch)


def write_rollouts(
    directory: Path, batch: SampledBatch, selection: Mapping[str, int | float] | None = None
) -> None:
    """Writes a round's rollouts with a summary of them.

    Args:
      selection: Where the prompts of its phase went, if the arm has a selection.
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


def read_passed(directory: Path) -> list[str]:
    """Returns the prompts that a round visited and does not train on; none without a selection.

    Raises:
      ArtifactError: If the file is broken.
    """
    path = directory / PASSED
    passed = read_json(path) if path.exists() else []
    if not isinstance(passed, list) or not all(isinstance(each, str) for each in passed):
        raise ArtifactError(f"{path}: must be a list of prompt ids; rerun the stage rollout")
    return passed


def concatenate(batches: list[SampledBatch]) -> SampledBatch:
    """Returns all batches as one, in their order."""
    return SampledBatch(
        table=pd.concat([batch.table for batch in batches], ignore_index=True),
        tensors={
            name: torch.cat([batch.tensors[name] for batch in batches])
            for name in batches[0].tensors
        },
        cost=sum((batch.cost for batch in batches), Cost()),
    )


def select_rollouts(layout: Layout, batch: SampledBatch, kept: np.ndarray) -> SampledBatch:
    """Returns some rollouts of a batch at the cost of all.

    Args:
      kept: Whether, row by row of the table.

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
    """Returns the rollouts that were judged, at the cost of all.

    Args:
      rewards: Schema REWARDS, of the same rollouts in any order.
    """
    judged = rewards.set_index("rollout_id").loc[batch.table["rollout_id"]]
    return select_rollouts(layout, batch, is_judged(judged).to_numpy())


def write_batch(directory: Path, batch: SampledBatch) -> None:
    """Writes a batch."""
    directory.mkdir(parents=True, exist_ok=True)
    write_table(batch.table, directory / "table.parquet", ROLLOUTS)
    write_tensors(directory / "tensors.safetensors", batch.tensors)
    write_json(directory / COST, asdict(batch.cost))


def read_batch(directory: Path) -> SampledBatch:
    """Returns a batch that `write_batch` wrote.

    Raises:
      ArtifactError: If a file is missing or broken.
    """
    table = read_table(directory / "table.parquet", ROLLOUTS)
    tensors = read_tensors(directory / "tensors.safetensors")
    _require_same_steps(directory, table, tensors)
    return SampledBatch(table=table, tensors=tensors, cost=read_cost(directory / COST))


def read_cost(path: Path) -> Cost:
    """Returns the cost in a file.

    Raises:
      ArtifactError: If it is missing, or has other fields than whole numbers of at least 0.
    """
    try:
        cost = Cost(**read_json(path))
    except TypeError as error:
        raise ArtifactError(f"{path}: must hold a cost, {error}; rerun its stage") from None
    with located(path):
        require_counts(cost)
    return cost


def _require_same_steps(directory: Path, table: pd.DataFrame, tensors: dict[str, Tensor]) -> None:
    """Raises ArtifactError unless table and tensors say how many steps each rollout has."""
    steps = tensors.get(STEPS)
    if steps is None or len(steps) != len(table):  # as `Policy.unpack` says
        return
    differs = np.flatnonzero(table["steps"].to_numpy() != steps.numpy())
    if len(differs):
        row = int(differs[0])
        rule = f"{int(steps[row])}, as in {directory / 'tensors.safetensors'}"
        error = wrong_cell(table, directory / "table.parquet", row, "steps", rule)
        raise ArtifactError(f"{error}; rerun the stage that writes them")


def _place(scratch: Path, index: int) -> Path:
    return scratch / f"batch-{index:05d}"


def _plan_batches(prompts: pd.DataFrame, rollouts_per_batch: int) -> list[pd.DataFrame]:
    """Returns the prompts in batches of similar length, so that little is padded."""
    asked = prompts[["prompt_id", "prompt", "rollouts"]]
    numbered = asked.reset_index(drop=True).assign(group=range(len(prompts)))
    ordered = numbered.sort_values(["prompt"], key=lambda column: column.str.len(), kind="stable")
    before = ordered["rollouts"].cumsum() - ordered["rollouts"]
    return [batch for _, batch in ordered.groupby(before // rollouts_per_batch)]


def _sample_batch(policy: Policy[Any], batch: pd.DataFrame, *, seed: int) -> SampledBatch:
    """Returns freshly drawn rollouts of one batch.

    Raises:
      ArtifactError: If a log-prob is not finite.
    """
    start = policy.cost
    sizes = batch["rollouts"].tolist()
    trajectory, logp = policy.sample(
        batch["prompt"].tolist(), group_sizes=sizes, generator=torch.Generator().manual_seed(seed)
    )
    not_finite = (trajectory.mask & ~logp.isfinite()).any(dim=1).nonzero()[:, 0]
    if len(not_finite):
        prompt_id = batch.loc[batch.index.repeat(sizes), "prompt_id"].iloc[int(not_finite[0])]
        raise ArtifactError(
            f"log-probs must be finite, a rollout of {prompt_id!r} has others; its weights are "
            "too large: train the policy again with a lower learning rate"
        )
    repeated = batch.loc[batch.index.repeat(sizes)].reset_index(drop=True)
    member = repeated.groupby("group", sort=False).cumcount()
    table = pd.DataFrame(
        {
            "rollout_id": repeated["prompt_id"] + "/" + member.astype(str),
            "prompt_id": repeated["prompt_id"],
            "group": repeated["group"].astype("int64"),
            "text": policy.decode(trajectory),
            "steps": trajectory.mask.sum(dim=1).numpy(),
            "is_finished": policy.is_finished(trajectory).numpy(),
        }
    )
    tensors = trajectory.pack(logp)
    return SampledBatch(table=table, tensors=tensors, cost=policy.cost - start)
