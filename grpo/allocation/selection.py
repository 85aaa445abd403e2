"""Prompt selection: a chain of steps that choose which prompts of a phase a round samples.

The prompts of a phase are the candidates. Without a selection a round samples all of them. With a
step that sets a budget, a round samples some of them. It visits candidates in epochs, in random
order; rounds of the same phase continue the epoch. The statistics that steps keep about prompts are
stored in the policy directory. Steps that read posteriors of success rates are in `online.py`.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pandas as pd

from grpo.allocation.curriculum import require_fraction, require_positive
from grpo.allocation.signal import Price
from grpo.errors import ParameterError
from grpo.objective.link import Link
from grpo.runtime.artifacts.tables import PROMPT_WEIGHT
from grpo.schema import ANSWER

History = dict[str, dict[str, int | float]]  # by kind and prompt: checkpointed as JSON

VISITS = "visits"  # number of times that a prompt was sampled or skipped
KEEP_BASE = "keep_base"  # p of easy and of hard prompts
STREAKS = {"easy": "easy_streak", "hard": "hard_streak"}  # uniform groups in a row, by kind
LOWEST_BASE, HIGHEST_BASE = 0.05, 0.95  # of p [GRESO]


class Budget(NamedTuple):
    """The number of groups of a round, and the batches in which they are sampled."""

    owner: str  # name of the step that sets the budget
    prompts: int
    prompts_per_batch: int  # outcomes are read after every batch
    max_batches: int


class Revision(NamedTuple):
    """How a round samples groups from a first answer."""

    share: float  # of the groups
    template: str  # follows the prompt; ANSWER stands for the first answer
    judge: str  # its score says how good an answer is


class Offer(NamedTuple):
    """What an allocation chooses from."""

    prompts: pd.DataFrame  # the candidates: the least sampled first, in random order
    history: History
    price: Price | None  # None: the allocation reads no costs
    chooser: np.random.Generator


class Seconds(NamedTuple):
    """Declared seconds of an allocation's budget; all 0: the budget is in FLOPs."""

    per_sampled_step: float
    per_trained_step: float
    per_judgement: float


class Selection(NamedTuple):
    """A selection step, or several composed; the default of a field does not change sampling."""

    links: tuple[Link, ...] = ()
    budget: Budget | None = None  # None: all candidates
    keep_chance: Callable[[list[str], History], np.ndarray] = lambda ids, history: np.ones(len(ids))
    keeps_uniform: bool = True
    learn: Callable[[History, pd.DataFrame], History] = lambda history, groups: history
    reuses_profile: bool = False
    revision: Revision | None = None  # None: every group is sampled from the prompt itself
    # Returns a table of the schema ALLOCATION with a row per candidate; None: `visit` chooses.
    allocate: Callable[[Offer], pd.DataFrame] | None = None
    sizes: frozenset[int] = frozenset()  # group sizes that `allocate` may assign
    seconds: Seconds | None = None  # None: `allocate` reads no costs

    @property
    def chooses_prompts(self) -> bool:
        """Whether an iteration samples some of the phase's prompts; else, they are dealt."""
        return self.budget is not None or self.allocate is not None

    @property
    def reads_outcomes(self) -> bool:
        """Whether rollouts must be judged while a round is sampled."""
        return not self.keeps_uniform or self.revision is not None


def compose(*steps: Selection) -> Selection:
    """Returns all steps as one; the first budget is used (rule U19 refuses a second one)."""

    def keep_chance(ids: list[str], history: History) -> np.ndarray:
        chance = np.ones(len(ids))
        for step in steps:
            chance *= step.keep_chance(ids, history)
        return chance

    def learn(history: History, groups: pd.DataFrame) -> History:
        for step in steps:
            history = step.learn(history, groups)
        return history

    return Selection(
        links=tuple(link for step in steps for link in step.links),
        budget=next((step.budget for step in steps if step.budget), None),
        keep_chance=keep_chance,
        keeps_uniform=all(step.keeps_uniform for step in steps),
        learn=learn,
        reuses_profile=any(step.reuses_profile for step in steps),
        revision=next((step.revision for step in steps if step.revision), None),
        allocate=next((step.allocate for step in steps if step.allocate), None),
        sizes=frozenset().union(*(step.sizes for step in steps)),
        seconds=next((step.seconds for step in steps if step.seconds), None),
    )


def visit_prompts(prompts: int) -> Selection:
    """Samples `prompts` prompts per iteration: the least visited first, in random order.

    An arm can thus pass over a phase several times, as TRL does with num_train_epochs. Without a
    selection, prompts are dealt once. The choice does not depend on outcomes.
    """
    require_positive("visit_prompts.prompts", prompts)
    return Selection(
        links=(Link("visit_prompts", {"prompts": prompts}, "visits"),),
        budget=Budget("visit_prompts", prompts, prompts, 1),
    )


def skip_uniform_prompts(
    prompts: int,
    start: float = 0.5,
    step: float = 0.01,
    target_easy: float = 0.25 / 3,
    target_hard: float = 0.5 / 3,
    floor: float = 0.01,
) -> Selection:
    """Skips a prompt with probability 1 - max(p^c, floor), c its uniform groups in a row. [GRESO]

    There is one p for easy groups (all rollouts solved) and one for hard groups (none solved). From
    the second visit of a prompt on, each round decreases p by `step` if the fraction of such groups
    exceeds its target, and increases it otherwise. Unlike the paper: a group is uniform if its
    binary outcomes are all equal (there: mean reward >= 0.98 or <= 0.11); p changes once per round;
    uniform groups that were sampled are kept.

    Args:
      prompts: Maximum number of prompts that a round samples.
      start: Initial p.
    """
    settings = {
        "prompts": prompts,
        "start": start,
        "step": step,
        "target_easy": target_easy,
        "target_hard": target_hard,
        "floor": floor,
    }
    require_positive("skip_uniform_prompts.prompts", prompts)
    for name in settings.keys() - {"prompts"}:
        require_fraction(f"skip_uniform_prompts.{name}", settings[name])
    targets = {"easy": target_easy, "hard": target_hard}

    def keep_chance(ids: list[str], history: History) -> np.ndarray:
        bases = _bases(history, start)
        chance = np.ones(len(ids))
        for kind, name in STREAKS.items():
            streaks = history.get(name, {})
            chance *= bases[kind] ** np.array([streaks.get(each, 0) for each in ids], float)
        return np.maximum(chance, floor)

    def learn(history: History, groups: pd.DataFrame) -> History:
        bases = _bases(history, start)
        shares = {kind: float(each.mean()) for kind, each in _uniform(groups).items()}
        if groups["prompt_id"].isin(history.get(VISITS, {})).any():
            for kind, target in targets.items():
                moved = bases[kind] + (-step if shares[kind] > target else step)
                bases[kind] = min(max(moved, LOWEST_BASE), HIGHEST_BASE)
        return {**history, **_longer_streaks(history, groups), KEEP_BASE: bases}

    return Selection(
        links=(Link("skip_uniform_prompts", settings, "prompt selection"),),
        budget=Budget("skip_uniform_prompts", prompts, prompts, 1),
        keep_chance=keep_chance,
        learn=learn,
    )


def resample_uniform_groups(
    prompts: int, prompts_per_batch: int, max_batches: int = 10
) -> Selection:
    """Samples batches of candidates until there are `prompts` mixed groups. [DAPO, eq. 11]

    Uniform groups are dropped, and so are mixed groups beyond `prompts`. Unlike verl's recipe: a
    round that reaches `max_batches` trains on the groups that it has.
    """
    require_positive("resample_uniform_groups.prompts", prompts)
    require_positive("resample_uniform_groups.prompts_per_batch", prompts_per_batch)
    require_positive("resample_uniform_groups.max_batches", max_batches)
    if prompts_per_batch * max_batches < prompts:
        raise ParameterError(
            "resample_uniform_groups needs prompts_per_batch * max_batches >= prompts, got "
            f"{prompts_per_batch} * {max_batches} < {prompts}"
        )
    settings = {
        "prompts": prompts,
        "prompts_per_batch": prompts_per_batch,
        "max_batches": max_batches,
    }
    return Selection(
        links=(Link("resample_uniform_groups", settings, "prompt selection"),),
        budget=Budget("resample_uniform_groups", prompts, prompts_per_batch, max_batches),
        keeps_uniform=False,
    )


def reuse_profile_rollouts() -> Selection:
    """Trains rounds that start from the base policy on the profile's rollouts. [ours]

    The base policy sampled these rollouts, so that they are on-policy and cost nothing more. A
    group keeps its first rollouts, up to its size in the curriculum. The choice does not depend on
    outcomes.
    """
    return Selection(links=(Link("reuse_profile_rollouts", {}),), reuses_profile=True)


def revise_first_answers(
    judge: str,
    share: float = 0.5,
    template: str = "\n\nA first answer: {answer}\nKeep it if it is right, else correct it.",
) -> Selection:
    """Samples a first answer, and the group as its revisions. [Group Revision, arXiv 2605.15951]

    The first answer to a prompt is sampled and judged. The group is sampled from the prompt
    followed by `template`. If the first answer has no score, or did not end, the group is sampled
    from the prompt itself, as it would be without this step. The first answer is not trained on;
    its cost counts. Unlike the paper: `share` of the groups, chosen at random, revise; the others
    train the prompt itself, which is what evaluation and users ask (rule U32).

    Args:
      judge: One of reward.judges, of weight 0 if it is to have no other effect. The error of an
        answer is 1 - its score.
    """
    require_fraction("revise_first_answers.share", share)
    if share == 0:
        raise ParameterError("revise_first_answers.share must be above 0, got 0; drop the step")
    if ANSWER not in template:
        raise ParameterError(
            f"revise_first_answers.template must hold {ANSWER}, the place of the first answer, got "
            f"{template!r}"
        )
    link = Link("revise_first_answers", {"judge": judge, "share": share, "template": template})
    return Selection(
        links=(link,),
        revision=Revision(share, template, judge),
    )


def require_candidates(selection: Selection, candidates: int) -> None:
    """Raises ParameterError if a phase has fewer candidates than the budget needs."""
    budget = selection.budget
    if budget and candidates < budget.prompts:
        raise ParameterError(
            f"{budget.owner} needs {budget.prompts} prompts, the phase has {candidates}; give the "
            "phase more prompts or lower the number"
        )


def deal(candidates: pd.DataFrame, parts: int, index: int, seed: int) -> pd.DataFrame:
    """Returns part `index` of the candidates: each is in one part, which one is random.

    Raises:
      ParameterError: If there are fewer candidates than parts.
    """
    if parts == 1:
        return candidates
    if len(candidates) < parts:
        raise ParameterError(
            f"must be at most {len(candidates)}, the prompts of the phase, got {parts}: every "
            "iteration samples other prompts"
        )
    shuffled = np.random.default_rng(seed).permutation(len(candidates))
    return candidates.iloc[np.sort(np.array_split(shuffled, parts)[index])].reset_index(drop=True)


def visit(
    selection: Selection, candidates: pd.DataFrame, history: History, seed: int
) -> tuple[pd.DataFrame, list[str]]:
    """Returns the candidates that a round samples, in order, and the ids of those that it skips.

    A round samples at most as many as its budget allows.

    Candidates are visited in epochs: the least visited first, in random order. If all would be
    skipped, the first is sampled: a round needs a group.
    """
    budget = selection.budget
    if budget is None:
        return candidates, []
    chooser = np.random.default_rng(seed)
    ordered = _order(candidates, history, chooser)
    ids = ordered["prompt_id"].tolist()
    kept = chooser.random(len(ids)) < selection.keep_chance(ids, history)
    kept[0] |= not kept.any()
    most = budget.prompts_per_batch * budget.max_batches
    chosen = np.flatnonzero(kept)[:most]
    reached = chosen[-1] if len(chosen) == most else len(ids)
    passed = np.flatnonzero(~kept[:reached])
    return ordered.iloc[chosen].reset_index(drop=True), [ids[each] for each in passed]


def _order(
    candidates: pd.DataFrame, history: History, chooser: np.random.Generator
) -> pd.DataFrame:
    """Returns the candidates in random order, the least visited first."""
    shuffled = candidates.iloc[chooser.permutation(len(candidates))]
    visits = history.get(VISITS, {})
    order = np.argsort([visits.get(each, 0) for each in shuffled["prompt_id"]], kind="stable")
    return shuffled.iloc[order].reset_index(drop=True)


def allocate(
    selection: Selection,
    candidates: pd.DataFrame,
    history: History,
    *,
    price: Price | None,
    seed: int,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Returns the candidates that an iteration samples with their group sizes, and the allocation.

    The allocation has the schema ALLOCATION and a row per candidate. If it has inclusion
    probabilities, the chosen candidates have the column PROMPT_WEIGHT.
    """
    assert selection.allocate is not None
    chooser = np.random.default_rng(seed)
    ordered = _order(candidates, history, chooser)
    table = selection.allocate(Offer(ordered, history, price, chooser))
    taken = (table["rollouts"] > 0).to_numpy()
    chosen = ordered[taken].assign(rollouts=table["rollouts"][taken])
    if table["chance"].notna().any():
        chosen = chosen.assign(**{PROMPT_WEIGHT: table["weight"][taken]})
    return chosen.reset_index(drop=True), table


def mixed_prompts(outcomes: pd.DataFrame) -> set[str]:
    """Returns the prompts whose raw outcomes differ (rule U20).

    Args:
      outcomes: prompt_id and outcome of every judged rollout.
    """
    groups = outcomes.groupby("prompt_id")["outcome"]
    return set(groups.min().index[groups.min() < groups.max()])


def learn_round(
    selection: Selection, history: History, outcomes: pd.DataFrame, passed: list[str]
) -> History:
    """Returns the history after a round.

    Args:
      outcomes: prompt_id, raw outcome and steps of every judged rollout: whole groups, before any
        selection among them (rules U20, U21). Groups of one rollout are ignored.
      passed: Prompts that were visited and not trained on.
    """
    groups = outcomes.groupby("prompt_id", as_index=False).agg(
        rollouts=("outcome", "size"), successes=("outcome", "sum"), steps=("steps", "mean")
    )
    compared = groups[groups["rollouts"] > 1]
    learned = selection.learn(history, compared) if len(compared) else history
    if not selection.chooses_prompts:
        return learned
    visits = dict(history.get(VISITS, {}))
    for each in [*groups["prompt_id"], *passed]:
        visits[each] = visits.get(each, 0) + 1
    return {**learned, VISITS: visits}


def _bases(history: History, start: float) -> dict[str, int | float]:
    return dict(history.get(KEEP_BASE, dict.fromkeys(STREAKS, start)))


def _uniform(groups: pd.DataFrame) -> dict[str, pd.Series]:
    """Returns a mask of the uniform groups by kind."""
    return {
        "easy": groups["successes"] == groups["rollouts"],
        "hard": groups["successes"] == 0,
    }


def _longer_streaks(history: History, groups: pd.DataFrame) -> History:
    """Returns the streaks after these groups: incremented, or removed."""
    streaks = {}
    for kind, is_uniform in _uniform(groups).items():
        before = history.get(STREAKS[kind], {})
        seen = dict(zip(groups["prompt_id"], is_uniform))
        unseen = {each: length for each, length in before.items() if each not in seen}
        grown = {each: before.get(each, 0) + 1 for each, uniform in seen.items() if uniform}
        streaks[STREAKS[kind]] = {**unseen, **grown}
    return streaks
