"""Sampling of a round: once, until enough groups are mixed, or reused from the profile."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from grpo.allocation.selection import (
    History,
    Revision,
    Selection,
    allocate,
    mixed_prompts,
    visit,
)
from grpo.allocation.signal import Price
from grpo.errors import ArtifactError, located
from grpo.modalities.shared.packed import Layout
from grpo.runtime.artifacts.files import write_json
from grpo.runtime.artifacts.tables import ALLOCATION, PROMPT_WEIGHT, is_judged, write_table
from grpo.runtime.executors.base import Executor
from grpo.runtime.seeds import derive_seed
from grpo.sampling.drawing import sample_rollouts, store_batch, stored_batches
from grpo.sampling.revision import add_first_answers, ask_for_revisions, sample_first_answers
from grpo.sampling.rollouts import (
    ALLOCATED,
    PASSED,
    SampledBatch,
    concatenate,
    read_batch,
    select_rollouts,
    write_rollouts,
)
from grpo.sampling.scoring import judge_stored, require_judged
from grpo.sampling.shaping import Shaping
from grpo.types import Cost


class Source(NamedTuple):
    """Functions that produce, judge and select rollouts; a Path is a scratch directory."""

    draw: Callable[[pd.DataFrame, int, Path], SampledBatch]  # from prompts and a seed
    judge: Callable[[Path], pd.DataFrame]  # schema REWARDS
    keep: Callable[[SampledBatch, set[str]], SampledBatch]  # the rollouts of some prompts


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Counts of the prompts of a round's phase."""

    candidates: int
    skipped: int
    sampled: int  # groups
    reused: int  # groups
    kept: int  # groups
    batches: int

    @property
    def oversampling_factor(self) -> float:
        """Number of sampled groups per kept group."""
        return self.sampled / self.kept


@dataclass(frozen=True, kw_only=True)
class DrawnRound:
    """A round's rollouts; their cost includes the dropped ones."""

    batch: SampledBatch
    passed: list[str]  # prompts skipped, and prompts whose groups were dropped
    counts: Counts
    allocation: pd.DataFrame | None = (
        None  # schema ALLOCATION; None: no step of the selection has one
    )
    unjudged: str | None = None  # what to warn of: rollouts, also dropped ones, without a judgment


def draw_round(
    selection: Selection,
    candidates: pd.DataFrame,
    history: History,
    *,
    source: Source,
    seed: int,
    scratch: Path,
    price: Price | None = None,
) -> DrawnRound:
    """Returns a round's rollouts: of all candidates, or within the selection's budget.

    If no group is mixed when the budget ends, the first groups are kept. Then at least one rollout
    must have been judged. A batch without a judgment because of a server that does not answer ends
    the draw: its groups would be dropped as uniform ones.

    Args:
      candidates: Columns prompt_id, prompt and, unless the selection sets it, rollouts; the phase,
        sorted by position.
      price: Required if the selection reads costs.

    Raises:
      GrpoError: See `require_judged`.
    """
    if selection.allocate:
        asked, table = allocate(
            selection, candidates, history, price=price, seed=derive_seed(seed, "visit")
        )
        batch = _add_weights(source.draw(asked, seed, scratch), asked)
        drawn = _drawn([batch], batch, len(candidates), [])
        return replace(drawn, allocation=table)
    chosen, skipped = visit(selection, candidates, history, derive_seed(seed, "visit"))
    if selection.budget is None:
        batch = source.draw(chosen, seed, scratch)
        return _drawn([batch], batch, len(candidates), skipped)
    prompts, size = selection.budget.prompts, selection.budget.prompts_per_batch
    parts: list[SampledBatch] = []
    wanted: list[str] = []
    judged: list[pd.DataFrame] = []
    for index, start in enumerate(range(0, len(chosen), size)):
        part = scratch / f"part-{index:05d}"
        asked = chosen[start : start + size].reset_index(drop=True)
        parts.append(source.draw(asked, derive_seed(seed, "part", index), part))
        ids = asked["prompt_id"]
        if not selection.keeps_uniform:
            rewards = source.judge(part)
            known = rewards[is_judged(rewards)]
            if known.empty and (rewards["status"] == "unanswered").any():
                require_judged(rewards)
            judged.append(rewards)
            ids = ids[ids.isin(mixed_prompts(known))]
        wanted += ids.tolist()
        if len(wanted) >= prompts:
            break
    unjudged = require_judged(pd.concat(judged)) if judged else None
    kept = set(wanted[:prompts] or chosen["prompt_id"][:prompts])
    drawn = _drawn(parts, _merge(parts, kept, source), len(candidates), skipped)
    return replace(drawn, unjudged=unjudged)


def executor_source(
    executor: Executor,
    *,
    layout: Layout,
    shaping: Shaping,
    rollouts_per_batch: int,
    profile: Path | None,
    progress: Callable[[int, int], None],
    draws: str = "sampled",
    revision: Revision | None = None,
) -> Source:
    """Returns a source that samples with an executor, or reuses the profile's rollouts.

    A batch is judged once, even if the work is interrupted.

    Args:
      executor: Samples, and judges if the selection reads outcomes.
      layout: Of stored rollouts.
      profile: Directory of the profile's rollouts, if they are reused.
      draws: Name of the executor's sampling mode.
      revision: How groups are sampled from a first answer, if they are.

    Raises:
      ArtifactError: If the profile's rollouts are invalid.
    """
    reused = read_batch(profile) if profile else None

    def draw(prompts: pd.DataFrame, seed: int, scratch: Path) -> SampledBatch:
        if reused is not None:
            with located(profile):
                taken = take_rollouts(layout, reused, prompts)
            store_batch(scratch, taken)  # `judge` reads batches from the scratch directory
            return taken
        if revision is None:
            return sample(prompts, seed, scratch)
        place = scratch / "first"
        first = sample_first_answers(
            prompts,
            revision,
            sample=lambda asked: sample(asked, derive_seed(seed, "first"), place),
            # Kept, because the groups sampled next depend on it.
            judge=lambda: judge(place, keep_unjudged=True),
            seed=derive_seed(seed, "revise"),
        )
        asked = ask_for_revisions(prompts, first, revision)
        return add_first_answers(sample(asked, seed, scratch), first)

    def sample(prompts: pd.DataFrame, seed: int, scratch: Path) -> SampledBatch:
        return sample_rollouts(
            executor,
            prompts,
            rollouts_per_batch=rollouts_per_batch,
            seed=seed,
            scratch=scratch,
            draws=draws,
            progress=progress,
        )

    def judge(scratch: Path, *, keep_unjudged: bool = False) -> pd.DataFrame:
        return judge_stored(
            executor,
            stored_batches(scratch),
            shaping,
            scratch=scratch / "judged",
            keep_unjudged=keep_unjudged,
        ).rewards

    def keep(batch: SampledBatch, prompts: set[str]) -> SampledBatch:
        return select_rollouts(layout, batch, batch.table["prompt_id"].isin(prompts).to_numpy())

    return Source(draw, judge, keep)


def take_rollouts(layout: Layout, stored: SampledBatch, prompts: pd.DataFrame) -> SampledBatch:
    """Returns the first stored rollouts of each prompt, up to its group size, at no cost.

    Raises:
      ArtifactError: If a prompt has no stored rollout.
    """
    known = stored.table["prompt_id"]
    missing = ~prompts["prompt_id"].isin(known)
    if missing.any():
        example = prompts.loc[missing, "prompt_id"].iloc[0]
        raise ArtifactError(f"has no rollouts of the prompt {example!r}; rerun the stage profile")
    sizes = known.map(prompts.set_index("prompt_id")["rollouts"]).fillna(0)
    member = stored.table.groupby("prompt_id").cumcount()
    batch = select_rollouts(layout, stored, (member < sizes).to_numpy())
    return SampledBatch(table=batch.table, tensors=batch.tensors, cost=Cost())


def write_round(directory: Path, drawn: DrawnRound, *, has_selection: bool) -> None:
    """Writes a round's rollouts; with a selection, also the skipped prompts and the counts."""
    if not has_selection:
        write_rollouts(directory, drawn.batch)
        return
    factor = {"oversampling_factor": drawn.counts.oversampling_factor}
    write_rollouts(directory, drawn.batch, {**asdict(drawn.counts), **factor})
    write_json(directory / PASSED, drawn.passed)
    if drawn.allocation is not None:
        write_table(drawn.allocation, directory / ALLOCATED, ALLOCATION)


def _add_weights(batch: SampledBatch, asked: pd.DataFrame) -> SampledBatch:
    """Returns the rollouts with the weights of their prompts, if these have any."""
    if PROMPT_WEIGHT not in asked:
        return batch
    weights = asked.set_index("prompt_id")[PROMPT_WEIGHT]
    return replace(batch, table=batch.table.join(weights, on="prompt_id"))


def _drawn(
    parts: list[SampledBatch], batch: SampledBatch, candidates: int, skipped: list[str]
) -> DrawnRound:
    """Returns a round with its counts, from all sampled batches and the kept rollouts."""
    drawn = [each for part in parts for each in part.table["prompt_id"].unique()]
    kept = set(batch.table["prompt_id"])
    # Rollouts that are reused from the profile have a cost of 0 steps.
    sampled = sum(part.table["prompt_id"].nunique() for part in parts if part.cost.sampled_steps)
    counts = Counts(
        candidates=candidates,
        skipped=len(skipped),
        sampled=sampled,
        reused=len(drawn) - sampled,
        kept=len(kept),
        batches=len(parts),
    )
    dropped = [each for each in drawn if each not in kept]
    return DrawnRound(batch=batch, passed=sorted([*skipped, *dropped]), counts=counts)


def _merge(parts: list[SampledBatch], kept: set[str], source: Source) -> SampledBatch:
    """Returns the kept prompts' rollouts as one batch with new group ids."""
    merged = concatenate(
        [source.keep(each, kept) for each in parts if kept & {*each.table["prompt_id"]}]
    )
    group, _ = pd.factorize(merged.table["prompt_id"])
    return SampledBatch(
        table=merged.table.assign(group=group.astype("int64")),
        tensors=merged.tensors,
        cost=sum((each.cost for each in parts), Cost()),
    )
