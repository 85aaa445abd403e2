"""Curricula: chains of steps that choose prompts, their group sizes and their phases.

A step takes and returns a table with prompt_id, family and outcome_rate; steps add the columns
rollouts, phase and position. sGPO [Sudalairaj et al., 2026] is drop_trivial,
size_groups_by_inverse_rate, split_by_group_size with a share of unsolved prompts in every phase.
Unlike the paper: settings come from a public re-implementation (docs/methods/sgpo.md), and a phase
is one round, not trained "to convergence".
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from grpo.errors import ArtifactError, ParameterError
from grpo.objective.link import Kind, Link, Setting
from grpo.runtime.artifacts.tables import known_prompts

Step = Callable[[pd.DataFrame, np.random.Generator], pd.DataFrame]

LARGEST_GROUP = 65536  # rollouts of a prompt; far above practical sizes


class CurriculumStep(NamedTuple):
    """A curriculum step with the metadata that rules and reports read."""

    link: Link
    apply: Step
    reads_profile: bool = False  # whether it reads outcome rates
    sizes: frozenset[int] = frozenset()  # group sizes that it can assign
    phases: int = 0  # number of phases that it creates
    reads_sizes: bool = False  # whether it reads group sizes
    # Changes group sizes by phase, in a plan or in one phase of it; None: it changes none.
    resize: Callable[[pd.DataFrame], pd.DataFrame] | None = None


def drop_trivial(above: float) -> CurriculumStep:
    """Drops prompts whose outcome rate exceeds `above`. [sGPO, section 4.3.1]"""
    require_fraction("drop_trivial.above", above)

    def apply(frame: pd.DataFrame, chooser: np.random.Generator) -> pd.DataFrame:
        return frame[frame["outcome_rate"] <= above]

    link = Link("drop_trivial", {"above": above}, "triage")
    return CurriculumStep(link, apply, reads_profile=True)


def sample_unsolved(fraction: float) -> CurriculumStep:
    """Keeps a random `fraction` of the prompts that no profile rollout solved. [sGPO]

    Many of them are solvable: P(0 of 8 | p = 0.1) = 0.43. Unlike the paper: it draws once;
    split_by_group_size draws for every phase.
    """
    require_fraction("sample_unsolved.fraction", fraction)

    def apply(frame: pd.DataFrame, chooser: np.random.Generator) -> pd.DataFrame:
        unsolved = np.flatnonzero(frame["outcome_rate"] == 0)
        count = round(fraction * len(unsolved))
        kept = chooser.permutation(unsolved)[:count]
        return frame[(frame["outcome_rate"] > 0) | np.isin(np.arange(len(frame)), kept)]

    link = Link("sample_unsolved", {"fraction": fraction}, "triage")
    return CurriculumStep(link, apply, reads_profile=True)


def keep_rate_window(low: float, high: float) -> CurriculumStep:
    """Keeps prompts with low <= outcome rate <= high: open-r1's pass-rate filter."""
    require_fraction("keep_rate_window.low", low)
    require_fraction("keep_rate_window.high", high)

    def apply(frame: pd.DataFrame, chooser: np.random.Generator) -> pd.DataFrame:
        return frame[frame["outcome_rate"].between(low, high)]

    link = Link("keep_rate_window", {"low": low, "high": high}, "rate window")
    return CurriculumStep(link, apply, reads_profile=True)


def fix_group_size(rollouts: int) -> CurriculumStep:
    """Gives every prompt the same number of rollouts."""
    _require_group("fix_group_size.rollouts", rollouts)

    def apply(frame: pd.DataFrame, chooser: np.random.Generator) -> pd.DataFrame:
        return frame.assign(rollouts=rollouts)

    link = Link("fix_group_size", {"rollouts": rollouts}, "group size")
    return CurriculumStep(link, apply, sizes=frozenset({rollouts}))


def size_groups_by_inverse_rate(smallest: int, largest: int) -> CurriculumStep:
    """Sets G = 1 / rate, rounded to a power of two in [smallest, largest]. [sGPO, eq. 7, 10]

    With sizes 2 to 8: rate > 1/4 gets 2; 1/8 < rate <= 1/4 gets 4; rate <= 1/8 gets 8.
    """
    _require_group("size_groups_by_inverse_rate.smallest", smallest)
    _require_group("size_groups_by_inverse_rate.largest", largest)
    if largest < smallest:
        raise ParameterError(
            f"size_groups_by_inverse_rate needs largest >= smallest, got {largest} < {smallest}"
        )

    def apply(frame: pd.DataFrame, chooser: np.random.Generator) -> pd.DataFrame:
        rates = frame["outcome_rate"]
        return frame.assign(rollouts=[inverse_rate_size(r, smallest, largest) for r in rates])

    settings = {"smallest": smallest, "largest": largest}
    return CurriculumStep(
        Link("size_groups_by_inverse_rate", settings, "group size"),
        apply,
        reads_profile=True,
        sizes=frozenset(_doubled(smallest, largest)),
    )


def split_at_random(phases: int, prompts_per_phase: int) -> CurriculumStep:
    """Draws the prompts of each phase at random, without replacement."""
    require_positive("split_at_random.phases", phases)
    require_positive("split_at_random.prompts_per_phase", prompts_per_phase)

    def apply(frame: pd.DataFrame, chooser: np.random.Generator) -> pd.DataFrame:
        needed = phases * prompts_per_phase
        if len(frame) < needed:
            raise ParameterError(
                f"split_at_random needs {needed} prompts, the selection has {len(frame)}; "
                "raise task.train_prompts or lower prompts_per_phase"
            )
        drawn = frame.iloc[chooser.permutation(len(frame))[:needed]]
        order = np.arange(needed)
        return drawn.assign(
            phase=order // prompts_per_phase + 1, position=order % prompts_per_phase
        )

    settings = {"phases": phases, "prompts_per_phase": prompts_per_phase}
    return CurriculumStep(Link("split_at_random", settings, "phases"), apply, phases=phases)


def split_easy_to_hard(phases: int) -> CurriculumStep:
    """Sorts by decreasing outcome rate and splits into phases of about equal rollout counts.

    Equal rates are ordered at random. Unlike sGPO, whose clusters are those of split_by_group_size:
    phases have equal cost.
    """
    require_positive("split_easy_to_hard.phases", phases)

    def apply(frame: pd.DataFrame, chooser: np.random.Generator) -> pd.DataFrame:
        if len(frame) < phases:
            raise ParameterError(
                f"split_easy_to_hard needs a prompt per phase, the selection has {len(frame)} "
                f"for {phases}; widen the selection or raise task.train_prompts"
            )
        shuffled = frame.iloc[chooser.permutation(len(frame))]
        ordered = shuffled.sort_values("outcome_rate", ascending=False, kind="stable")
        before = ordered["rollouts"].cumsum() - ordered["rollouts"]
        phase = (before * phases // ordered["rollouts"].sum()).clip(upper=phases - 1) + 1
        empty = {*range(1, phases + 1)} - {*phase}
        if empty:
            raise ParameterError(
                f"split_easy_to_hard leaves phase {min(empty)} of {phases} without a prompt, "
                f"because a group of {ordered['rollouts'].max()} rollouts is more than a phase; "
                "lower phases or the largest group size"
            )
        split = ordered.assign(phase=phase)
        return split.assign(position=split.groupby("phase").cumcount())

    link = Link("split_easy_to_hard", {"phases": phases}, "phases")
    return CurriculumStep(link, apply, reads_profile=True, phases=phases, reads_sizes=True)


def split_by_group_size(phases: int, unsolved: float = 0.0) -> CurriculumStep:
    """Creates one phase per group size, from the smallest to the largest. [sGPO, eq. 9, 13]

    Within a phase, prompts are in random order.

    Args:
      phases: Number of different group sizes of the selection.
      unsolved: Fraction of the prompts with outcome rate 0 that each phase draws, without
        replacement over phases; they get the group size of their phase, and the rest is dropped.
        With 0, they stay in the phase of their own group size.
    """
    require_positive("split_by_group_size.phases", phases)
    require_fraction("split_by_group_size.unsolved", unsolved)
    if phases * unsolved > 1:
        raise ParameterError(
            f"split_by_group_size needs phases * unsolved <= 1, got {phases} * {unsolved}; lower "
            "unsolved: a prompt is in one phase"
        )

    def apply(frame: pd.DataFrame, chooser: np.random.Generator) -> pd.DataFrame:
        shuffled = frame.iloc[chooser.permutation(len(frame))]
        is_drawn = (shuffled["outcome_rate"] == 0) & (unsolved > 0)
        sizes = sorted(set(shuffled.loc[~is_drawn, "rollouts"].tolist()))
        if len(sizes) != phases:
            raise ParameterError(
                f"split_by_group_size needs a group size per phase, got sizes {sizes} for {phases} "
                "phases; set phases to the number of sizes, or change the steps before it"
            )
        phase = np.searchsorted(sizes, shuffled["rollouts"]) + 1
        # Rounded cumulatively: shares that are rounded one by one may exceed the prompts.
        ends = np.rint(unsolved * is_drawn.sum() * np.arange(1, phases + 1))
        phase[is_drawn] = np.searchsorted(ends, np.arange(is_drawn.sum()), side="right") + 1
        split = _resize_unsolved(shuffled.assign(phase=phase)[phase <= phases])
        return split.assign(position=split.groupby("phase").cumcount())

    settings = {"phases": phases, "unsolved": unsolved}
    kinds: tuple[Kind, ...] = ("phases", "triage") if unsolved else ("phases",)
    return CurriculumStep(
        Link("split_by_group_size", settings, *kinds),
        apply,
        reads_profile=unsolved > 0,
        phases=phases,
        reads_sizes=True,
        resize=_resize_unsolved if unsolved else None,
    )


def _resize_unsolved(plan: pd.DataFrame) -> pd.DataFrame:
    """Returns the plan with the group size of a phase's solved prompts for its unsolved ones."""
    is_solved = plan["outcome_rate"] > 0
    of_phase = plan["phase"].map(plan[is_solved].groupby("phase")["rollouts"].first())
    sizes = plan["rollouts"].where(is_solved | of_phase.isna(), of_phase)
    return plan.assign(rollouts=sizes.astype("int64"))


def stage_by_family(order: str, prompts_per_phase: int) -> CurriculumStep:
    """Creates one phase per family, in the given order. [Logic-RL, 2502.14768]

    The prompts of a phase are drawn at random, without replacement. Unlike the paper: the rounds of
    params.yaml set the length of a phase, not a number of epochs.

    Args:
      order: Family names separated by commas: "3 people, 4 people, 5 people".
    """
    require_positive("stage_by_family.prompts_per_phase", prompts_per_phase)
    stages = split_order(order)
    if not all(stages) or len(set(stages)) < len(stages):
        raise ParameterError(
            f"stage_by_family.order must name each family once, separated by commas, got {order!r}"
        )

    def apply(frame: pd.DataFrame, chooser: np.random.Generator) -> pd.DataFrame:
        _require_same_families(stages, set(frame["family"]))
        phases = []
        for number, family in enumerate(stages, start=1):
            own = frame[frame["family"] == family]
            if len(own) < prompts_per_phase:
                raise ParameterError(
                    f"stage_by_family needs {prompts_per_phase} prompts of {family!r}, the "
                    f"selection has {len(own)}; raise task.train_prompts or lower it"
                )
            drawn = own.iloc[chooser.permutation(len(own))[:prompts_per_phase]]
            phases.append(drawn.assign(phase=number, position=range(prompts_per_phase)))
        return pd.concat(phases)

    settings: dict[str, Setting] = {"order": order, "prompts_per_phase": prompts_per_phase}
    return CurriculumStep(Link("stage_by_family", settings, "phases"), apply, phases=len(stages))


def split_order(order: str) -> list[str]:
    """Returns the names in a comma-separated list."""
    return [name.strip() for name in order.split(",")]


def inverse_rate_size(rate: float, smallest: int, largest: int) -> int:
    """Returns the smallest power-of-two multiple of `smallest` with size * rate > 1/2, capped.

    At smallest = 2: 2 for rate > 1/4, 4 for rate > 1/8, 8 for the rest.
    """
    sizes = _doubled(smallest, largest)
    return next((size for size in sizes if not size * rate <= 0.5), largest)


def _doubled(smallest: int, largest: int) -> Iterator[int]:
    """Yields `smallest` times powers of two below `largest`, then `largest`."""
    size = smallest
    while size < largest:
        yield size
        size *= 2
    yield largest


def plan_curriculum(
    profile: pd.DataFrame, steps: list[CurriculumStep], seed: int, *, has_sizes: bool = False
) -> pd.DataFrame:
    """Returns the curriculum under the schema CURRICULUM, sorted by phase and position.

    Args:
      profile: prompt_id, family and outcome_rate of every training prompt; the rate is NaN for
        steps that do not read it.
      has_sizes: Whether the selection sets group sizes; no step need set them.

    Raises:
      ParameterError: If the steps leave no prompt, or no step sets group sizes or phases.
    """
    require_sizes_and_phases(steps, has_sizes=has_sizes)
    chooser = np.random.default_rng(seed)
    columns = ["prompt_id", "family", "outcome_rate"]
    frame = profile.sort_values("prompt_id")[columns].reset_index(drop=True)
    for step in steps:
        frame = step.apply(frame, chooser)
        if len(frame) == 0:
            raise ParameterError(f"{step.link.name} leaves no prompt of {len(profile)}; loosen it")
    counts = [each for each in ("rollouts", "phase", "position") if each in frame]
    return frame.astype(dict.fromkeys(counts, "int64")).sort_values(["phase", "position"])


def curriculum_input(
    profile: pd.DataFrame, prompts: pd.DataFrame, steps: list[CurriculumStep]
) -> pd.DataFrame:
    """Returns the input of the steps: the profile, or prompts with NaN rates if it has no rows.

    Prompts without a judged rollout in a profile are left out.

    Args:
      profile: Schema PROFILE; without rows if no component reads a profile.
      prompts: Schema PROMPTS.

    Raises:
      ArtifactError: If the prompts of the profile differ from `prompts`, or a step reads outcome
        rates and the profile has no rows.
    """
    if len(profile):
        _require_same_prompts(profile, prompts)
        return known_prompts(profile)
    for step in steps:
        if step.reads_profile:
            raise ArtifactError(f"{step.link.name} reads a profile, got one without rows")
    return prompts.assign(outcome_rate=np.nan)


def require_sizes_and_phases(steps: list[CurriculumStep], *, has_sizes: bool = False) -> None:
    """Raises ParameterError unless a step sets group sizes and a step sets phases.

    Args:
      has_sizes: Whether the selection sets group sizes.
    """
    owned: set[Kind] = set()
    for step in steps:
        if step.reads_sizes and "group size" not in owned:
            raise ParameterError(f"{step.link.name} must come after a step that sizes groups")
        owned |= step.link.kinds
    if "group size" not in owned and not has_sizes:
        raise ParameterError("a curriculum needs a step that sizes groups, such as fix_group_size")
    if "phases" not in owned:
        raise ParameterError("a curriculum needs a step that makes phases, such as split_at_random")


def allocated_sizes(plan: pd.DataFrame, steps: Sequence[CurriculumStep]) -> "pd.Series[int]":
    """Returns the number of rollouts that the steps assign to each prompt of a plan.

    Args:
      plan: Schema CURRICULUM.
    """
    unused = np.random.default_rng(0)  # sizes are not drawn
    for step in steps:
        if "group size" in step.link.kinds:
            plan = step.apply(plan, unused)
        elif step.resize:
            plan = step.resize(plan)
    return plan["rollouts"]


def select_phase(curriculum: pd.DataFrame, phase: int) -> pd.DataFrame:
    """Returns the rows of one phase, sorted by position.

    Raises:
      ParameterError: If the curriculum has no such phase.
    """
    selected = curriculum[curriculum["phase"] == phase].sort_values("position")
    if len(selected) == 0:
        there = sorted(map(int, curriculum["phase"].unique()))
        raise ParameterError(
            f"phase must be one of {there}, the phases of the curriculum with prompts, got {phase}"
        )
    return selected


def add_prompts(plan: pd.DataFrame, prompts: pd.DataFrame) -> pd.DataFrame:
    """Returns `plan` with a column `prompt`, the text to continue.

    Raises:
      ArtifactError: If a prompt of the plan is not among `prompts`.
    """
    known = prompts[["prompt_id", "prompt", "family"]]
    joined = plan.merge(known, on="prompt_id", how="left", suffixes=("", "_known"))
    unknown = joined.loc[joined["prompt"].isna(), "prompt_id"]
    if len(unknown):
        raise ArtifactError(
            f"{unknown.iloc[0]!r} must be a prompt of the training set; rerun the curriculum stage"
        )
    moved = joined[joined["family"] != joined["family_known"]]
    if len(moved):
        first = moved.iloc[0]
        raise ArtifactError(
            f"prompt_id={first['prompt_id']!r}: column 'family' must be "
            f"{first['family_known']!r}, as in the prompts, got {first['family']!r}; rerun the "
            "curriculum stage"
        )
    return joined.drop(columns="family_known")


def _require_same_prompts(profile: pd.DataFrame, prompts: pd.DataFrame) -> None:
    """Raises ArtifactError unless a profile has exactly the given prompts."""
    given, wanted = (
        frame.set_index("prompt_id")["family"].to_dict() for frame in (profile, prompts)
    )
    if given != wanted:
        differing = [str(each) for each in given | wanted if given.get(each) != wanted.get(each)]
        first = min(differing)
        raise ArtifactError(
            f"prompt_id={first!r} must be of family {wanted.get(first)!r}, as in the prompts, got "
            f"{given.get(first)!r}; rerun the stage profile"
        )


def _require_same_families(stages: list[str], families: set[str]) -> None:
    """Raises ParameterError unless `stages` are exactly the families of the selection."""
    if set(stages) != families:
        raise ParameterError(
            f"stage_by_family.order must name the families of the selection, {sorted(families)}, "
            f"got {sorted(stages)}"
        )


def require_fraction(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ParameterError(f"{name} must be in [0, 1], got {value}")


def require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ParameterError(f"{name} must be at least 1, got {value}")


def _require_group(name: str, value: int) -> None:
    if value < 2:
        raise ParameterError(
            f"{name} must be at least 2, got {value}: a group of one has no baseline"
        )
    if value > LARGEST_GROUP:
        raise ParameterError(f"{name} must be at most {LARGEST_GROUP}, got {value}")
