"""Sampling of rollouts in batches that do not depend on interruptions."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from grpo.errors import ArtifactError, located
from grpo.modalities.policy import Policy
from grpo.runtime.artifacts.files import atomic_path
from grpo.runtime.artifacts.tables import member_ids
from grpo.runtime.executors.base import Executor, Job, Local, Skill, Work
from grpo.runtime.seeds import derive_seed
from grpo.sampling.rollouts import SampledBatch, concatenate, read_batch, write_batch


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
    """Returns rollouts of all prompts, sampled in batches.

    A batch depends only on the prompts and `rollouts_per_batch`, and has its own seed. It is thus
    the same on every worker. A batch that is already in `scratch` is not sampled again.

    Args:
      executor: Executor with the skill `sampling_skill`.
      prompts: Columns prompt_id, prompt, rollouts; the row index is the group id.
      draws: Name of a sampling mode.
      progress: Called with the number of finished batches and the total.
    """
    jobs = [
        Job(
            "draw",
            {"prompts": batch.to_dict("list"), "draws": draws, "seed": derive_seed(seed, index)},
            _place(scratch, index),
        )
        for index, batch in enumerate(batch_prompts(prompts, rollouts_per_batch))
    ]
    executor.finish(jobs, progress)
    return concatenate([read_batch(job.out) for job in jobs])


def sampling_skill(
    load: Callable[[], Policy[Any]],
    draws: Mapping[str, Any],
    source: Callable[[], object] = lambda: "the policy",
) -> Skill:
    """Returns the skill "draw", which raises ArtifactError if a log-prob is not finite.

    Args:
      draws: Values of the policy's `decoding` by name of the sampling mode.
      source: Returns the policy's directory or description, for the error message.
    """

    def draw(order: dict[str, Any], out: Path) -> None:
        policy = load()
        # The policy may be one that is trained, whose log-probs have other settings.
        before, policy.decoding = policy.decoding, draws[order["draws"]]
        batch = pd.DataFrame(order["prompts"])
        with located(source()):
            sampled = _sample_batch(policy, batch, seed=order["seed"])
        policy.decoding = before
        write_batch(out, sampled)

    return draw


def local_executor(policy: Policy[Any], source: object = "the policy") -> Executor:
    """Returns an executor that samples from a loaded policy in this process."""
    draw = sampling_skill(lambda: policy, {"sampled": policy.decoding}, lambda: source)
    return Local(Work({"draw": draw}))


def stored_batches(scratch: Path) -> list[Path]:
    """Returns the directories of the batches in a scratch directory, in order."""
    return sorted(scratch.glob("batch-*"))


def store_batch(scratch: Path, batch: SampledBatch) -> None:
    """Writes rollouts from another source as the only batch of a scratch directory."""
    with atomic_path(_place(scratch, 0)) as temporary:
        write_batch(temporary, batch)


def _place(scratch: Path, index: int) -> Path:
    return scratch / f"batch-{index:05d}"


def batch_prompts(prompts: pd.DataFrame, rollouts_per_batch: int) -> list[pd.DataFrame]:
    """Returns the prompts in batches of similar prompt length, to reduce padding."""
    asked = prompts[["prompt_id", "prompt", "rollouts"]]
    numbered = asked.reset_index(drop=True).assign(group=range(len(prompts)))
    ordered = numbered.sort_values(["prompt"], key=lambda column: column.str.len(), kind="stable")
    before = ordered["rollouts"].cumsum() - ordered["rollouts"]
    return [batch for _, batch in ordered.groupby(before // rollouts_per_batch)]


def _sample_batch(policy: Policy[Any], batch: pd.DataFrame, *, seed: int) -> SampledBatch:
    """Returns newly sampled rollouts of one batch.

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
    table = pd.DataFrame(
        {
            "rollout_id": member_ids(repeated),
            "prompt_id": repeated["prompt_id"],
            "group": repeated["group"].astype("int64"),
            "text": policy.decode(trajectory),
            "steps": trajectory.mask.sum(dim=1).numpy(),
            "is_finished": policy.is_finished(trajectory).numpy(),
        }
    )
    tensors, cost = trajectory.pack(logp), policy.cost - start
    policy.cost = start  # the batch has the cost; the policy may be one that is trained
    return SampledBatch(table=table, tensors=tensors, cost=cost)
