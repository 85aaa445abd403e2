"""First answers, which groups revise, and the share of their error that a revision removes."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pandas as pd

from grpo.allocation.selection import Revision
from grpo.runtime.artifacts.tables import FIRST_ANSWER, FIRST_SCORE, SCORE
from grpo.runtime.chats import extend_prompt
from grpo.sampling.rollouts import SampledBatch
from grpo.schema import ANSWER
from grpo.types import Cost

NO_ANSWERS = pd.DataFrame(
    {FIRST_ANSWER: pd.Series(dtype=object), FIRST_SCORE: pd.Series(dtype=float)}
)


class FirstAnswers(NamedTuple):
    """The first answers of a round, and what sampling them cost."""

    table: pd.DataFrame  # by prompt_id: FIRST_ANSWER and FIRST_SCORE
    cost: Cost


def sample_first_answers(
    prompts: pd.DataFrame,
    revision: Revision,
    *,
    sample: Callable[[pd.DataFrame], SampledBatch],
    judge: Callable[[], pd.DataFrame],
    seed: int,
) -> FirstAnswers:
    """Returns a first answer to each prompt of a random `share`, rounded at random if not whole.

    Its score is NaN if its status is not `scored`, or it did not end: the group is then sampled
    from the prompt itself.

    Args:
      prompts: Columns prompt_id, prompt, rollouts.
      sample: Samples `rollouts` of each prompt.
      judge: Returns the rewards of what `sample` sampled, schema REWARDS.
    """
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(prompts))
    chosen = order + rng.random() < revision.share * len(prompts)
    if not chosen.any():
        return FirstAnswers(NO_ANSWERS, Cost())
    batch = sample(prompts[chosen].assign(rollouts=1).reset_index(drop=True))
    first = batch.table.merge(judge().drop(columns="prompt_id"), on="rollout_id", validate="1:1")
    is_usable = first["is_finished"] & (first["status"] == "scored")
    table = first.rename(columns={"text": FIRST_ANSWER}).assign(
        **{FIRST_SCORE: first[SCORE + revision.judge].where(is_usable)}
    )
    return FirstAnswers(table.set_index("prompt_id")[[FIRST_ANSWER, FIRST_SCORE]], batch.cost)


def ask_for_revisions(
    prompts: pd.DataFrame, first: FirstAnswers, revision: Revision
) -> pd.DataFrame:
    """Returns the prompts, followed by the template where there is a first answer with a score.

    Args:
      prompts: Columns prompt_id, prompt.
    """
    known = first.table[first.table[FIRST_SCORE].notna()][FIRST_ANSWER]
    texts = [
        extend_prompt(prompt, revision.template.replace(ANSWER, known[each]))
        if each in known
        else prompt
        for each, prompt in zip(prompts["prompt_id"], prompts["prompt"])
    ]
    return prompts.assign(prompt=texts)


def add_first_answers(batch: SampledBatch, first: FirstAnswers) -> SampledBatch:
    """Returns rollouts with the first answers of their groups, and with their cost."""
    return SampledBatch(
        table=batch.table.join(first.table, on="prompt_id"),
        tensors=batch.tensors,
        cost=first.cost + batch.cost,
    )
