"""Which links compose: composition rules for the links of this library (docs/rules.md).

A rule is data: id, severity, sentence, and a predicate that names what causes it. Ids are stable:
reports and documents cite them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from grpo.objective.base import Link

BASELINES = ("center_by_group_mean", "leave_one_out", "center_by_moving_average")
AVERAGES = (
    "average_over_steps",
    "average_over_rollouts",
    "average_over_horizon",
    "average_over_prompts",
)
ROLLOUT_RATIOS = ("average_ratio_over_rollout", "average_ratio_keeping_token_gradient")
TRUST_REGIONS = ("clip_surrogate",)
PENALTIES = ("penalize_kl", "subtract_kl_from_reward")


class Severity(Enum):
    INFO = 0
    WARN = 1
    ERROR = 2


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a rule may know of an arm."""

    links: tuple[Link, ...]
    curriculum: tuple[Link, ...]
    group_sizes: frozenset[int]
    updates_per_round: int
    top_p: float
    has_binary_reward: bool
    dropouts: frozenset[str]  # parameter paths of dropouts that are on

    def named(self, *names: str) -> list[str]:
        """Returns which of `names` stand in the objective, once per occurrence."""
        return [link.name for link in self.links if link.name in names]

    def steps(self, *names: str) -> list[str]:
        """Returns which of `names` stand in the curriculum."""
        return [link.name for link in self.curriculum if link.name in names]


class Rule(NamedTuple):
    """`find` returns the causes: link names or parameter paths; none if the rule is kept."""

    id: str
    severity: Severity
    sentence: str
    find: Callable[[Plan], list[str]]


def _unless_one(names: tuple[str, ...]) -> Callable[[Plan], list[str]]:
    """Returns a predicate: exactly one of `names` must stand in the objective."""

    def find(plan: Plan) -> list[str]:
        found = plan.named(*names)
        return [] if len(found) == 1 else (found[1:] or ["objective"])

    return find


def _both(first: tuple[str, ...], second: tuple[str, ...]) -> Callable[[Plan], list[str]]:
    """Returns a predicate that names `second` if one of each stands in the objective."""
    return lambda plan: plan.named(*second) if plan.named(*first) else []


def _rollout_ratio_on_policy(plan: Plan) -> list[str]:
    return plan.named(*ROLLOUT_RATIOS) if plan.updates_per_round == 1 else []


def _is_shaped(plan: Plan) -> bool:
    """Returns whether the reward takes more than two values."""
    return not plan.has_binary_reward or bool(_active(plan, "subtract_kl_from_reward"))


def _active(plan: Plan, *penalties: str) -> list[str]:
    """Returns which penalties stand in the objective with a weight above 0."""
    return [link.name for link in plan.links if link.name in penalties and link.settings["beta"]]


def _pair_z_score(plan: Plan) -> list[str]:
    is_hidden = 2 in plan.group_sizes and _is_shaped(plan)
    return plan.named("scale_by_group_std") if is_hidden else []


def _variable_groups(plan: Plan) -> list[str]:
    scaled = plan.named("scale_by_group_std", "average_over_steps", "average_over_rollouts")
    return scaled if len(plan.group_sizes) > 1 else []


def _selection_owners(plan: Plan) -> list[str]:
    triage = plan.steps("drop_trivial", "sample_unsolved")
    windows = plan.steps("keep_rate_window")
    return windows if triage and windows else windows[1:]


def _size_owners(plan: Plan) -> list[str]:
    return plan.steps("fix_group_size", "size_groups_by_inverse_rate")[1:]


def _phase_owners(plan: Plan) -> list[str]:
    return plan.steps("split_at_random", "split_easy_to_hard")[1:]


def _filter_on_reward(plan: Plan) -> list[str]:
    by_reward = [
        link.name
        for link in plan.links
        if link.name == "drop_uniform_groups" and link.settings["by"] == "reward"
    ]
    return by_reward if _is_shaped(plan) else []


def _truncated_sampling(plan: Plan) -> list[str]:
    return ["sampling.top_p"] if plan.top_p < 1 else []


def _kl_estimator(estimator: str) -> Callable[[Plan], list[str]]:
    def find(plan: Plan) -> list[str]:
        return [
            link.name
            for link in plan.links
            if link.name == "penalize_kl"
            and link.settings["estimator"] == estimator
            and link.settings["beta"]
        ]

    return find


def _kl_on_part(plan: Plan) -> list[str]:
    return _active(plan, *PENALTIES) if plan.named("drop_uniform_groups") else []


def _late_kl(plan: Plan) -> list[str]:
    names = [link.name for link in plan.links]
    late = "subtract_kl_from_reward"
    first = min((names.index(each) for each in BASELINES if each in names), default=len(names))
    return [late] if late in names[first:] else []


RULES: tuple[Rule, ...] = (
    Rule(
        "U10",
        Severity.INFO,
        "a rollout ratio has no effect with one update per round (s = 1); raise "
        "training.updates_per_round or drop it",
        _rollout_ratio_on_policy,
    ),
    Rule(
        "U11",
        Severity.ERROR,
        "an objective needs exactly one trust region; keep one clip_surrogate",
        _unless_one(TRUST_REGIONS),
    ),
    Rule(
        "U11",
        Severity.ERROR,
        "a rollout ratio can stand once; keep one",
        lambda plan: plan.named(*ROLLOUT_RATIOS)[1:],
    ),
    Rule(
        "U12",
        Severity.WARN,
        "with a rollout ratio this average weighs rollouts by their length, which is not GSPO; "
        "use average_over_rollouts or average_over_prompts",
        _both(ROLLOUT_RATIOS, ("average_over_steps", "average_over_horizon")),
    ),
    Rule(
        "U16",
        Severity.ERROR,
        "the z-score of two continuous rewards is their sign: the margin is lost; drop "
        "scale_by_group_std or make the reward binary",
        _pair_z_score,
    ),
    Rule(
        "U18",
        Severity.WARN,
        "with groups of different sizes its scale or weight depends on the size; use "
        "leave_one_out and average_over_prompts",
        _variable_groups,
    ),
    Rule(
        "U19",
        Severity.ERROR,
        "prompts must be selected by one owner; keep keep_rate_window or sGPO's triage",
        _selection_owners,
    ),
    Rule(
        "U19",
        Severity.ERROR,
        "group sizes must have one owner; keep one of fix_group_size and "
        "size_groups_by_inverse_rate",
        _size_owners,
    ),
    Rule(
        "U19",
        Severity.ERROR,
        "phases must have one owner; keep one of split_at_random and split_easy_to_hard",
        _phase_owners,
    ),
    Rule(
        "U20",
        Severity.ERROR,
        "a filter on the shaped reward keeps groups without signal; set by: outcome",
        _filter_on_reward,
    ),
    Rule(
        "U24",
        Severity.WARN,
        "the penalty covers only the groups that are kept, so its weight falls with their share; "
        "drop drop_uniform_groups to cover all",
        _kl_on_part,
    ),
    Rule(
        "U25",
        Severity.ERROR,
        "top_p < 1 samples from another density than the one that is scored; set it to 1",
        _truncated_sampling,
    ),
    Rule(
        "U26",
        Severity.ERROR,
        "dropout makes the ratio differ from 1 before any update; set it to 0",
        lambda plan: sorted(plan.dropouts),
    ),
    Rule(
        "U35",
        Severity.ERROR,
        "k1 as a loss has zero gradient in expectation; use k2, k3 or subtract_kl_from_reward",
        _kl_estimator("k1"),
    ),
    Rule(
        "U35",
        Severity.INFO,
        "k3 as a loss follows the gradient of KL(ref || pi), the forward KL; k2 that of "
        "KL(pi || ref)",
        _kl_estimator("k3"),
    ),
    Rule(
        "H3",
        Severity.ERROR,
        "what is taken off the reward must be taken off before the baseline; move it to the front",
        _late_kl,
    ),
    Rule(
        "H1",
        Severity.ERROR,
        "an objective needs exactly one average, or its scale is undefined",
        _unless_one(AVERAGES),
    ),
    Rule(
        "H2",
        Severity.ERROR,
        "an objective needs exactly one baseline",
        _unless_one(BASELINES),
    ),
)
