"""Draws rollouts in batches that are the same however often the work is interrupted."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import UInt8
from torch import Tensor

from grpo.artifacts.files import atomic_path, read_json, write_json
from grpo.artifacts.tables import ROLLOUTS, read_table, write_table
from grpo.artifacts.tensors import read_tensors, write_tensors
from grpo.engines.base import Engine, Job, Local, Skill, Work
from grpo.errors import ArtifactError
from grpo.policies.base import Policy
from grpo.seeds import derive_seed
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
    engine: Engine,
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
      engine: Of which `drawing` is a skill.
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
    engine.finish(jobs, progress)
    return concatenate([read_batch(job.out) for job in jobs])


def drawing(load: Callable[[], Policy[Any]], draws: Mapping[str, Any]) -> Skill:
    """Returns the skill "draw".

    Args:
      draws: What to set as the policy's `decoding`, by the name of a way of drawing.
    """

    def draw(order: dict[str, Any], out: Path) -> None:
        policy = load()
        policy.decoding = draws[order["draws"]]
        write_batch(out, _sample_batch(policy, pd.DataFrame(order["prompts"]), seed=order["seed"]))

    return draw


def drawn_from(policy: Policy[Any]) -> Engine:
    """Returns the engine that draws from a policy in this process, as it is."""
    return Local(Work({"draw": drawing(lambda: policy, {"sampled": policy.decoding})}))


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
    path = directory / COST
    try:
        cost = Cost(**read_json(path))
    except TypeError as error:
        raise ArtifactError(f"{path}: must hold a cost, {error}; rerun its stage") from None
    return SampledBatch(table=table, tensors=tensors, cost=cost)


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
    """Returns freshly drawn rollouts of one batch."""
    start = policy.cost
    sizes = batch["rollouts"].tolist()
    trajectory, logp = policy.sample(
        batch["prompt"].tolist(), group_sizes=sizes, generator=torch.Generator().manual_seed(seed)
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
