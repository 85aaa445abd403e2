"""Sampling and judging of rollouts of held-out prompts, and the choice of a few for the report."""

from collections.abc import Callable, Iterable, Mapping

import pandas as pd

from grpo.errors import located
from grpo.runtime.artifacts.files import Scratch
from grpo.runtime.artifacts.media import encode_png
from grpo.runtime.artifacts.tables import FIRST_OUTCOME, FIRST_TEXT
from grpo.runtime.executors.base import Executor
from grpo.runtime.seeds import derive_seed
from grpo.sampling.drawing import sample_rollouts, stored_batches
from grpo.sampling.rollouts import SampledBatch
from grpo.sampling.scoring import Judged, judge_stored, require_judged
from grpo.sampling.shaping import Shaping

CHOSEN_PROMPTS = 12  # at most; the same number of every family
CHOSEN_ROLLOUTS = 4  # of each chosen prompt


def draw_evaluation(
    executor: Executor,
    prompts: pd.DataFrame,
    *,
    draws: Iterable[str],
    rollouts_per_prompt: int,
    rollouts_per_batch: int,
    seed: int,
    scratch: Scratch,
    progress: Callable[[int, int], None],
) -> dict[str, SampledBatch]:
    """Returns rollouts of all prompts by sampling mode; only "sampled" has several per prompt.

    Seeds are the same for every policy, so that differences between policies are paired.

    Args:
      prompts: Schema PROMPTS.
      draws: Names of sampling modes.
    """
    return {
        kind: sample_rollouts(
            executor,
            prompts.assign(rollouts=rollouts_per_prompt if kind == "sampled" else 1),
            rollouts_per_batch=rollouts_per_batch,
            seed=derive_seed(seed, "evaluate", kind),
            scratch=scratch.within(kind).directory,
            draws=kind,
            progress=progress,
        )
        for kind in draws
    }


def score_evaluation(
    executor: Executor,
    draws: Iterable[str],
    shaping: Shaping,
    *,
    scratch: Scratch,
    progress: Callable[[int, int], None],
) -> dict[str, Judged]:
    """Returns the judged rollouts of `draw_evaluation` by sampling mode."""
    return {
        kind: judge_stored(
            executor,
            stored_batches(scratch.within(kind).directory),
            shaping,
            scratch=scratch.within(f"{kind}-judged").directory,
            progress=progress,
        )
        for kind in draws
    }


def require_all_judged(judged: Mapping[str, Judged]) -> list[str]:
    """Returns a warning for each sampling mode with unjudged rollouts.

    Raises:
      GrpoError: See `require_judged`; also if all rollouts of one mode alone were not judged.
    """
    found = []
    for kind, each in judged.items():
        with located(kind):
            said = require_judged(each.rewards)
        if said is not None:
            found.append(f"{kind}: {said}")
    return found


def with_first_rollouts(
    evaluated: pd.DataFrame, batches: Mapping[str, SampledBatch], judged: Mapping[str, Judged]
) -> pd.DataFrame:
    """Returns the table with the first sampled rollout of each prompt: its text and its outcome.

    Args:
      evaluated: Schema EVALUATION.
      judged: The judged rollouts of `batches`.
    """
    batch, (texts, rewards) = batches["sampled"], judged["sampled"]
    table = batch.table.assign(text=texts)[["rollout_id", "prompt_id", "text"]]
    first = table.groupby("prompt_id").head(1)
    first = first.merge(rewards[["rollout_id", "outcome"]], on="rollout_id", validate="1:1")
    first = first.rename(columns={"text": FIRST_TEXT, "outcome": FIRST_OUTCOME})
    return evaluated.merge(first.drop(columns="rollout_id"), on="prompt_id", validate="1:1")


def choose_samples(
    prompts: pd.DataFrame, batches: Mapping[str, SampledBatch], judged: Mapping[str, Judged]
) -> pd.DataFrame:
    """Returns some sampled rollouts for the report; the choice is the same for every policy.

    They are the first CHOSEN_ROLLOUTS of the first prompts of every family, under the schema
    EVALUATION_SAMPLES.

    Args:
      prompts: Schema PROMPTS.
      judged: The judged rollouts of `batches`.
    """
    batch, (texts, rewards) = batches["sampled"], judged["sampled"]
    ordered = prompts.sort_values(["family", "prompt_id"])
    per_family = max(1, CHOSEN_PROMPTS // ordered["family"].nunique())
    chosen = ordered.groupby("family").head(per_family).head(CHOSEN_PROMPTS)
    numbered = batch.table.assign(row=range(len(batch.table)))
    rollouts = numbered.groupby("prompt_id").head(CHOSEN_ROLLOUTS)
    table = chosen[["prompt_id", "family", "prompt"]].merge(rollouts, on="prompt_id")
    rows = table["row"].tolist()
    media = None if batch.media is None else batch.media[rows]
    images = [b""] * len(table) if media is None else [encode_png(each.numpy()) for each in media]
    table = table.assign(text=[texts[row] for row in rows], image=images)
    return table.merge(rewards.drop(columns="prompt_id"), on="rollout_id", validate="1:1")
