"""Every composition rule: a plan that breaks it, and sound plans that break none."""

from dataclasses import replace

import pytest

from grpo.objective.algorithms import dapo, dr_grpo, grpo, gspo, gspo_token, rloo, two_grpo
from grpo.objective.base import Link, Objective, chain
from grpo.objective.penalty import penalize_kl, subtract_kl_from_reward
from grpo.objective.ratio import clip_surrogate
from grpo.objective.rules import RULES, Plan, Severity
from grpo.objective.weight import average_over_steps, drop_uniform_groups


def plan_of(objective: Objective, *steps: str) -> Plan:
    """Returns a sound plan around an objective: groups of 8, several updates, binary reward."""
    curriculum = steps or ("split_at_random", "fix_group_size")
    return Plan(
        links=objective.links,
        curriculum=tuple(Link(name, {}) for name in curriculum),
        group_sizes=frozenset({8}),
        updates_per_round=4,
        top_p=1.0,
        has_binary_reward=True,
        dropouts=frozenset(),
    )


def broken(plan: Plan) -> set[tuple[str, str]]:
    """Returns the ids of broken rules, with their severity."""
    return {(rule.id, rule.severity.name) for rule in RULES if rule.find(plan)}


Z_SCORED = plan_of(grpo(beta=0.0))
CASES = {
    "gspo on-policy": (replace(plan_of(gspo()), updates_per_round=1), ("U10", "INFO")),
    "two clips": (plan_of(chain(rloo(), clip_surrogate())), ("U11", "ERROR")),
    "no clip": (plan_of(chain(*(), average_over_steps())), ("U11", "ERROR")),
    "two ratios": (plan_of(chain(gspo(), gspo_token())), ("U11", "ERROR")),
    "gspo by step": (plan_of(chain(gspo(), average_over_steps())), ("U12", "WARN")),
    "pair of continuous rewards": (
        replace(Z_SCORED, group_sizes=frozenset({2}), has_binary_reward=False),
        ("U16", "ERROR"),
    ),
    "mixed sizes": (replace(Z_SCORED, group_sizes=frozenset({2, 8})), ("U18", "WARN")),
    "two selectors": (
        plan_of(rloo(), "drop_trivial", "keep_rate_window", "fix_group_size"),
        ("U19", "ERROR"),
    ),
    "two sizers": (
        plan_of(rloo(), "fix_group_size", "size_groups_by_inverse_rate"),
        ("U19", "ERROR"),
    ),
    "two splitters": (
        plan_of(rloo(), "split_at_random", "split_easy_to_hard"),
        ("U19", "ERROR"),
    ),
    "filter on shaped reward": (
        replace(plan_of(chain(grpo(), drop_uniform_groups("reward"))), has_binary_reward=False),
        ("U20", "ERROR"),
    ),
    "kl on part": (plan_of(chain(rloo(), penalize_kl(0.1, "k2"))), ("U24", "WARN")),
    "top_p": (replace(Z_SCORED, top_p=0.9), ("U25", "ERROR")),
    "dropout": (replace(Z_SCORED, dropouts=frozenset({"policy.lora.dropout"})), ("U26", "ERROR")),
    "k1 as loss": (plan_of(chain(rloo(), penalize_kl(0.1, "k1"))), ("U35", "ERROR")),
    "k3 as loss": (plan_of(grpo(beta=0.1)), ("U35", "INFO")),
    "pair with a divergence in the reward": (
        replace(
            plan_of(chain(subtract_kl_from_reward(0.1), grpo(beta=0.0))),
            group_sizes=frozenset({2}),
        ),
        ("U16", "ERROR"),
    ),
    "divergence after the baseline": (
        plan_of(chain(rloo(), subtract_kl_from_reward(0.1))),
        ("H3", "ERROR"),
    ),
    "two averages": (plan_of(chain(rloo(), average_over_steps())), ("H1", "ERROR")),
    "two baselines": (plan_of(chain(rloo(), grpo())), ("H2", "ERROR")),
}


@pytest.mark.parametrize("name", CASES)
def test_a_broken_rule_is_found(name: str):
    plan, expected = CASES[name]
    assert expected in broken(plan)


def test_every_rule_has_a_case():
    ids = {(rule.id, rule.severity.name) for rule in RULES}
    assert ids == {expected for _, expected in CASES.values()}


@pytest.mark.parametrize(
    "objective",
    [dapo(), dr_grpo(horizon=8), gspo(), gspo_token(), rloo(), grpo(beta=0.0)],
    ids=["dapo", "dr_grpo", "gspo", "gspo_token", "rloo", "grpo"],
)
def test_published_algorithms_break_no_rule(objective: Objective):
    assert broken(plan_of(objective)) == set()


def test_pairs_with_a_binary_reward_are_sound():
    assert broken(replace(plan_of(two_grpo()), group_sizes=frozenset({2}))) == set()


def test_sentences_say_what_to_do():
    for rule in RULES:
        assert len(rule.sentence) > 30
        assert rule.severity in Severity
