"""Pairs of methods and the composition rules that only both together break.

python -m tests.objective.pairs    # prints the table of docs/rules.md
"""

from dataclasses import dataclass, replace
from typing import Any

from grpo.allocation import curriculum
from grpo.allocation.online import (
    allocate_by_signal,
    sample_prompts_near_rate,
    size_groups_by_knapsack,
)
from grpo.allocation.selection import (
    Selection,
    compose,
    resample_uniform_groups,
    reuse_profile_rollouts,
    revise_first_answers,
    skip_uniform_prompts,
    visit_prompts,
)
from grpo.objective.advantage import (
    add_improvement,
    center_by_group_mean,
    leave_one_out,
    scale_by_group_std,
)
from grpo.objective.base import Objective, chain
from grpo.objective.link import Link
from grpo.objective.penalty import add_entropy_bonus, penalize_kl, subtract_kl_from_reward
from grpo.objective.rules import RULES, Plan, Rule
from grpo.objective.trust import (
    average_ratio_over_rollout,
    clip_surrogate,
    take_ratio_to_reference,
    truncate_mismatch,
)
from grpo.objective.weight import (
    average_over_prompts,
    average_over_rollouts,
    drop_uniform_groups,
    keep_extreme_rollouts,
)
from grpo.runtime.markdown import markdown_table


@dataclass(frozen=True, kw_only=True)
class Method:
    """What a method adds to plain GRPO with groups of 16."""

    reward: tuple[Objective, ...] = ()  # links before the baseline
    credit: tuple[Objective, ...] = ()  # links behind the average
    ratio: tuple[Objective, ...] = ()  # links before the trust region
    loss: tuple[Objective, ...] = ()  # links behind it
    curriculum: tuple[Link, ...] = ()
    sizes: frozenset[int] = frozenset()
    selection: tuple[Selection, ...] = ()
    facts: tuple[tuple[str, Any], ...] = ()


SGPO = (
    curriculum.drop_trivial(0.75).link,
    curriculum.sample_unsolved(0.1).link,
    curriculum.size_groups_by_inverse_rate(2, 8).link,
)
CONTINUOUS = ("has_binary_reward", False)
METHODS = {
    "2-GRPO": Method(curriculum=(curriculum.fix_group_size(2).link,), sizes=frozenset({2})),
    "sGPO": Method(curriculum=SGPO, sizes=frozenset({2, 4, 8}), facts=(("reads_profile", True),)),
    "GRESO": Method(selection=(skip_uniform_prompts(64),)),
    "dynamic sampling": Method(selection=(resample_uniform_groups(64, 64),)),
    "signal per cost": Method(selection=(allocate_by_signal(1e12),)),
    "MoPPS": Method(selection=(sample_prompts_near_rate(64),)),
    "Knapsack RL": Method(selection=(size_groups_by_knapsack(64, 16),)),
    "several passes": Method(selection=(visit_prompts(64),)),
    "profile's rollouts": Method(selection=(reuse_profile_rollouts(),)),
    "PODS": Method(credit=(keep_extreme_rollouts(4),)),
    "dropped uniform groups": Method(credit=(drop_uniform_groups(),)),
    "GSPO": Method(ratio=(average_ratio_over_rollout(),)),
    "ratio to the base": Method(ratio=(take_ratio_to_reference(),)),
    "TIS": Method(ratio=(truncate_mismatch(),)),
    "KL as a loss": Method(loss=(penalize_kl(0.01, "k2"),)),
    "entropy bonus": Method(loss=(add_entropy_bonus(0.01),)),
    "KL in the reward": Method(reward=(subtract_kl_from_reward(0.01),)),
    "continuous reward": Method(facts=(CONTINUOUS,)),
    "judges normalized in groups": Method(
        facts=(CONTINUOUS, ("normalized", ("reward.judges[0].normalize",)))
    ),
    "rising temperature": Method(facts=(("follows_reward", True),)),
    "reference-free GRPO": Method(  # as published, for translation
        ratio=(take_ratio_to_reference(), average_ratio_over_rollout()),
        loss=(penalize_kl(0.001, "k3_mirrored", over="rollout"),),
        facts=(CONTINUOUS,),
    ),
    "Group Revision": Method(
        reward=(add_improvement(),), selection=(revise_first_answers("boxes"),)
    ),
}


Z_SCORED = (center_by_group_mean(), scale_by_group_std(), average_over_rollouts())
LEAVE_ONE_OUT = (leave_one_out(), average_over_prompts())


def plan_of(*methods: Method, advantage: tuple[Objective, ...] = Z_SCORED) -> Plan:
    """Returns the plan of GRPO with some methods: four updates per iteration, two rounds.

    Args:
      advantage: Its links of advantage and average.
    """
    steps = [link for each in methods for link in each.curriculum]
    selection = compose(*(step for each in methods for step in each.selection))
    if not selection.sizes and not any("group size" in link.kinds for link in steps):
        steps.append(curriculum.fix_group_size(16).link)
    corrections = [link for each in methods for link in each.ratio if "correction" in kinds(link)]
    ratios = [link for each in methods for link in each.ratio if "correction" not in kinds(link)]
    ratios.sort(key=lambda each: "reference ratio" not in kinds(each))
    objective = chain(
        *corrections,
        *(link for each in methods for link in each.reward),
        *advantage,
        *(link for each in methods for link in each.credit),
        *ratios,
        clip_surrogate(),
        *(link for each in methods for link in each.loss),
    )
    sizes = selection.sizes.union(*(each.sizes for each in methods)) or frozenset({16})
    plan = Plan(
        links=objective.links,
        curriculum=(curriculum.split_at_random(1, 64).link, *steps),
        group_sizes=sizes,
        optimizer_steps_per_iteration=4,
        updates_per_iteration=4,
        has_binary_reward=True,
        dropouts=frozenset(),
        selection=selection.links,
        phases=(1, 1),
        profile_rollouts=16,
    )
    return replace(plan, **{name: value for each in methods for name, value in each.facts})


def kinds(objective: Objective) -> frozenset[str]:
    """Returns the kinds of the links of an objective."""
    return frozenset(kind for link in objective.links for kind in link.kinds)


def broken(plan: Plan) -> list[Rule]:
    """Returns the rules that a plan breaks."""
    return [rule for rule in RULES if rule.find(plan)]


def named(rules: list[Rule]) -> str:
    """Returns ids and severities, e.g. `U16 ERROR, U18 WARN`."""
    return ", ".join(sorted({f"{rule.id} {rule.severity.name}" for rule in rules}))


def cell(first: Method, second: Method) -> str:
    """Returns the rules that both methods together break and neither alone."""
    alone = broken(plan_of(first)) + broken(plan_of(second))
    return named([rule for rule in broken(plan_of(first, second)) if rule not in alone])


def table() -> str:
    """Returns the rules that each method breaks, alone and with each other one, as Markdown."""
    rows = []
    for name, method in METHODS.items():
        cells = {other: cell(method, METHODS[other]) for other in METHODS if other != name}
        found = [f"{other}: {text}" for other, text in cells.items() if text]
        alone = named(broken(plan_of(method)))
        rows.append([name, alone or "none", "; ".join(found) or "nothing"])
    return markdown_table(["method", "alone", "together with"], rows)


if __name__ == "__main__":
    print(table())
