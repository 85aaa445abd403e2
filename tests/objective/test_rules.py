"""Every composition rule: a plan that breaks it, and sound plans that break none."""

from dataclasses import replace

import pytest

from grpo.allocation import curriculum
from grpo.allocation.online import allocate_by_signal
from grpo.allocation.selection import (
    Selection,
    compose,
    reuse_profile_rollouts,
    revise_first_answers,
    skip_uniform_prompts,
    visit_prompts,
)
from grpo.objective.advantage import (
    add_improvement,
    center_by_group_mean,
    center_by_moving_average,
    scale_by_batch_std,
    scale_by_group_std,
    scale_by_improvement,
    sum_later_part_scores,
)
from grpo.objective.algorithms import (
    awm,
    chunk_grpo,
    cispo,
    dapo,
    diffusion_nft,
    dr_grpo,
    flash_grpo,
    flow_grpo,
    gmpo,
    group_revision,
    grpo,
    gspo,
    gspo_token,
    luspo,
    pcm,
    rloo,
    sapo,
    translation_grpo,
    two_grpo,
)
from grpo.objective.base import Objective, chain
from grpo.objective.chunks import (
    keep_highest_phase,
    sample_chunks_by_phase,
    sample_steps_by_advantage,
    sample_steps_uniformly,
)
from grpo.objective.link import Link
from grpo.objective.penalty import add_entropy_bonus, penalize_kl, subtract_kl_from_reward
from grpo.objective.rules import RULES, Plan, Severity
from grpo.objective.trust import (
    average_clipped_log_ratio,
    average_ratio_keeping_token_gradient,
    average_ratio_over_rollout,
    clip_surrogate,
    mask_mismatched_rollouts,
    normalize_log_ratio,
    scale_log_ratio,
    take_ratio_to_reference,
    truncate_mismatch,
    truncate_ratio,
)
from grpo.objective.weight import (
    average_over_rollouts,
    average_over_steps,
    drop_uniform_groups,
    keep_extreme_rollouts,
    weigh_by_noise_std,
)

CURRICULUM = {
    step.link.name: step.link
    for step in (
        curriculum.drop_trivial(0.75),
        curriculum.keep_rate_window(0.1, 0.9),
        curriculum.fix_group_size(8),
        curriculum.size_groups_by_inverse_rate(2, 8),
        curriculum.split_at_random(1, 1),
        curriculum.sample_unsolved(0.1),
        curriculum.split_by_group_size(1, unsolved=0.1),
        curriculum.split_easy_to_hard(1),
        curriculum.stage_by_family("one", 1),
    )
}


def acting(objective: Objective) -> Plan:
    """Returns a sound plan of a policy whose steps are chunks of actions."""
    return replace(plan_of(objective), acts=True)


def plan_of(objective: Objective, *steps: str) -> Plan:
    """Returns a sound plan around an objective: groups of 8, several updates, binary reward."""
    curriculum = steps or ("split_at_random", "fix_group_size")
    return Plan(
        links=objective.links,
        curriculum=tuple(CURRICULUM[name] for name in curriculum),
        group_sizes=frozenset({8}),
        optimizer_steps_per_iteration=4,
        updates_per_iteration=4,
        top_p=1.0,
        has_binary_reward=True,
        dropouts=frozenset(),
    )


def broken(plan: Plan) -> set[tuple[str, str]]:
    """Returns the ids of broken rules, with their severity."""
    return {(rule.id, rule.severity.name) for rule in RULES if rule.find(plan)}


PUBLISHED = {
    "dapo": dapo(),
    "dr_grpo": dr_grpo(horizon=8),
    "gspo": gspo(),
    "gspo_token": gspo_token(),
    "rloo": rloo(),
    "grpo": grpo(beta=0.0),
    "cispo": cispo(),
    "sapo": sapo(),
    "gmpo": gmpo(),
    "luspo": luspo(),
}
DENOISING = {
    "flow_grpo": flow_grpo(dimensions=8),
    "flash_grpo": flash_grpo(dimensions=8),
    "awm": awm(dimensions=8),
}
Z_SCORED = plan_of(grpo(beta=0.0))
PODS = plan_of(chain(grpo(beta=0.0), keep_extreme_rollouts(4)))
PODS_PAIR = plan_of(chain(rloo(), keep_extreme_rollouts(2)))
CASES = {
    "gspo on-policy": (replace(plan_of(gspo()), optimizer_steps_per_iteration=1), ("U10", "INFO")),
    "normalized scores and a plateau of the reward": (
        replace(Z_SCORED, normalized=("reward.judges[0].normalize",), stops_on_plateau=True),
        ("H25", "WARN"),
    ),
    "normalized scores and a temperature that follows the reward": (
        replace(Z_SCORED, normalized=("reward.judges[0].normalize",), follows_reward=True),
        ("H21", "WARN"),
    ),
    "ratio to the base policy": (plan_of(translation_grpo()), ("U28", "WARN")),
    "ratio to the base policy, after another": (
        plan_of(chain(gspo(), take_ratio_to_reference())),
        ("U28", "ERROR"),
    ),
    "other density of log-probs": (
        replace(plan_of(gspo()), has_other_density=True),
        ("U25", "ERROR"),
    ),
    "other density of log-probs and a ratio to the base policy": (
        replace(plan_of(translation_grpo()), has_other_density=True),
        ("U25", "WARN"),
    ),
    "two clips": (plan_of(chain(rloo(), clip_surrogate())), ("U11", "ERROR")),
    "a clip and a truncation": (plan_of(chain(rloo(), truncate_ratio(5.0))), ("U11", "ERROR")),
    "a clip and a gate": (plan_of(chain(sapo(), clip_surrogate())), ("U11", "ERROR")),
    "a ratio and a geometric mean": (
        plan_of(chain(average_ratio_over_rollout(), gmpo())),
        ("U11", "ERROR"),
    ),
    "no clip": (plan_of(chain(*(), average_over_steps())), ("U11", "ERROR")),
    "two ratios": (plan_of(chain(gspo(), gspo_token())), ("U11", "ERROR")),
    "gspo by step": (plan_of(chain(gspo(), average_over_steps())), ("U12", "WARN")),
    "gmpo by step": (plan_of(chain(gmpo(), average_over_steps())), ("U12", "WARN")),
    "rollout ratio with step weights": (
        plan_of(chain(truncate_mismatch(), gspo())),
        ("U15", "WARN"),
    ),
    "geometric mean with step weights": (
        plan_of(chain(truncate_mismatch(), gmpo())),
        ("U15", "WARN"),
    ),
    "kept pair of continuous rewards": (
        replace(PODS_PAIR, has_binary_reward=False),
        ("U16", "ERROR"),
    ),
    "extremes of mixed sizes": (
        replace(plan_of(chain(rloo(), keep_extreme_rollouts(4))), group_sizes=frozenset({2, 8})),
        ("U18", "WARN"),
    ),
    "selection before the average": (
        plan_of(
            chain(
                center_by_group_mean(),
                keep_extreme_rollouts(4),
                average_over_rollouts(),
                clip_surrogate(),
            )
        ),
        ("U21", "ERROR"),
    ),
    "filter before the baseline": (
        plan_of(chain(drop_uniform_groups(), grpo(beta=0.0))),
        ("U21", "ERROR"),
    ),
    "extremes of four": (replace(PODS, group_sizes=frozenset({4})), ("U22", "ERROR")),
    "extremes of pairs": (
        replace(plan_of(chain(two_grpo(), keep_extreme_rollouts(2))), group_sizes=frozenset({2})),
        ("U22", "ERROR"),
    ),
    "extremes of all": (
        plan_of(chain(grpo(beta=0.0), keep_extreme_rollouts(8))),
        ("U22", "ERROR"),
    ),
    "best against worst": (PODS_PAIR, ("U22", "WARN")),
    "kl on extremes": (
        plan_of(chain(grpo(beta=0.1), keep_extreme_rollouts(4))),
        ("U24", "WARN"),
    ),
    "entropy of extremes": (
        plan_of(chain(rloo(), keep_extreme_rollouts(4), add_entropy_bonus(0.1))),
        ("U24", "WARN"),
    ),
    "entropy of some chunks": (
        acting(chain(pcm(tokens=32, budget=3), add_entropy_bonus(0.1))),
        ("U24", "WARN"),
    ),
    "kl to the policy itself": (
        replace(plan_of(grpo(beta=0.1)), refreshes_reference=True, optimizer_steps_per_iteration=1),
        ("H23", "WARN"),
    ),
    "kl of the sampler to itself": (
        replace(plan_of(chain(subtract_kl_from_reward(0.1), rloo())), refreshes_reference=True),
        ("H23", "WARN"),
    ),
    "a reference for nothing": (
        replace(plan_of(rloo()), refreshes_reference=True),
        ("H24", "WARN"),
    ),
    "entropy of denoising": (
        replace(plan_of(chain(flow_grpo(dimensions=3), add_entropy_bonus(0.1))), denoises=True),
        ("H22", "ERROR"),
    ),
    "extremes of a shaped reward": (replace(PODS, has_binary_reward=False), ("U34", "WARN")),
    "advantages of the full group": (
        plan_of(chain(grpo(beta=0.0), keep_extreme_rollouts(4, "full_group"))),
        ("H5", "WARN"),
    ),
    "correction behind the clip": (
        plan_of(chain(rloo(), truncate_mismatch())),
        ("H4", "ERROR"),
    ),
    "ratio behind the clip": (
        plan_of(chain(rloo(), average_ratio_over_rollout())),
        ("H4", "ERROR"),
    ),
    "pair of continuous rewards": (
        replace(Z_SCORED, group_sizes=frozenset({2}), has_binary_reward=False),
        ("U16", "ERROR"),
    ),
    "pair of normalized scores": (
        replace(
            plan_of(rloo()),
            group_sizes=frozenset({2}),
            normalized=("reward.judges[1].normalize",),
            has_binary_reward=False,
        ),
        ("U16", "WARN"),
    ),
    "mixed sizes": (replace(Z_SCORED, group_sizes=frozenset({2, 8})), ("U18", "WARN")),
    "mixed sizes and a sum up to a constant": (
        replace(plan_of(dr_grpo(horizon=24)), group_sizes=frozenset({2, 8})),
        ("U18", "WARN"),
    ),
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
    "stale and uncorrected": (
        replace(Z_SCORED, staleness=1, iterations_per_round=2),
        ("H16", "ERROR"),
    ),
    "replay on-policy": (
        replace(
            Z_SCORED, routing="replay_sampled", has_routers=True, optimizer_steps_per_iteration=1
        ),
        ("U33", "INFO"),
    ),
    "stale routing of the trainer": (
        replace(
            Z_SCORED, routing="replay_proximal", has_routers=True, optimizer_steps_per_iteration=4
        ),
        ("U33", "WARN"),
    ),
    "replay of a dense model": (
        replace(Z_SCORED, routing="replay_sampled", has_routers=False),
        ("U33", "ERROR"),
    ),
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


SKIP = Link("skip_uniform_prompts", {"floor": 0.01}, "prompt selection")
RESAMPLE = Link("resample_uniform_groups", {}, "prompt selection")
REUSE = Link("reuse_profile_rollouts", {})
VISIT = visit_prompts(4).links[0]


def spending(*selection: Link, **changes: object) -> Plan:
    """Returns a sound plan whose rollouts are spent by a selection, in two rounds of a phase."""
    return replace(plan_of(rloo()), selection=selection, phases=(1, 1), **changes)


def allocated(**settings: str) -> Link:
    """Returns the link of an allocation by signal."""
    return allocate_by_signal(1e12, **settings).links[0]


SIGNAL = allocated()


def allocating(*, weights: str = "none", **changes: object) -> Plan:
    """Returns a sound plan whose group sizes are set by an allocation by signal."""
    selection = (allocated(weights=weights),)
    plan = replace(plan_of(rloo(), "split_at_random"), selection=selection, phases=(1, 1))
    return replace(plan, group_sizes=frozenset(range(2, 129)), profile_rollouts=8, **changes)


FLOWS = {"denoises": True, "density": "flow_sde", "stochastic": "all"}
SINGLE = {**FLOWS, "stochastic": "one_per_prompt"}
MATCHES = {**FLOWS, "density": "matched"}
SOUND_SELECTIONS = {
    "skip": spending(SKIP),
    "resample": spending(RESAMPLE),
    "reuse": spending(REUSE, profile_rollouts=8),
    "skip and reuse": spending(SKIP, REUSE),
    "visits and reuse": spending(VISIT, REUSE, profile_rollouts=8),
    "visits of what comes once": replace(spending(VISIT), phases=(1, 2)),
    "visits after triage": replace(
        plan_of(rloo(), "drop_trivial", "fix_group_size", "split_by_group_size"),
        selection=(VISIT,),
    ),
    "signal": allocating(),
    "signal with chances and several passes": replace(
        allocating(weights="ht"), updates_per_iteration=1
    ),
}
CASES |= {
    "skipping and resampling": (spending(SKIP, RESAMPLE), ("U19", "ERROR")),
    "visiting twice": (spending(VISIT, VISIT), ("U19", "ERROR")),
    "visiting and skipping": (spending(VISIT, SKIP), ("U19", "ERROR")),
    "visiting and an allocation": (
        replace(allocating(), selection=(SIGNAL, VISIT)),
        ("U19", "ERROR"),
    ),
    "sampled unsolved prompts and those of phases": (
        plan_of(rloo(), "sample_unsolved", "fix_group_size", "split_by_group_size"),
        ("U19", "ERROR"),
    ),
    "unsolved prompts of phases and skipping": (
        replace(plan_of(rloo(), "fix_group_size", "split_by_group_size"), selection=(SKIP,)),
        ("U19", "ERROR"),
    ),
    "triage and skipping": (
        replace(plan_of(rloo(), "drop_trivial", "fix_group_size"), selection=(SKIP,)),
        ("U19", "ERROR"),
    ),
    "window and resampling": (
        replace(plan_of(rloo(), "keep_rate_window", "fix_group_size"), selection=(RESAMPLE,)),
        ("U19", "ERROR"),
    ),
    "stages and phases": (
        plan_of(rloo(), "split_at_random", "stage_by_family", "fix_group_size"),
        ("U19", "ERROR"),
    ),
    "skipping without a floor": (
        spending(Link("skip_uniform_prompts", {"floor": 0.0})),
        ("U34", "WARN"),
    ),
    "skipping what comes once": (replace(spending(SKIP), phases=(1, 2)), ("H6", "WARN")),
    "reuse by later rounds": (spending(REUSE, starts_from_base=False), ("H7", "WARN")),
    "reuse of small groups": (spending(REUSE, profile_rollouts=4), ("H8", "WARN")),
    "reuse of what was chosen": (spending(REUSE, reads_profile=True), ("H9", "INFO")),
    "reuse of mixed groups": (spending(REUSE, RESAMPLE), ("H9", "INFO")),
    "signal and skipping": (spending(SIGNAL, SKIP), ("U19", "ERROR")),
    "signal and a group size": (spending(SIGNAL), ("U19", "ERROR")),
    "signal without a chance": (spending(allocated(draws="optimism")), ("U34", "WARN")),
    "signal of prompts that come once": (replace(allocating(), phases=(1, 2)), ("H6", "WARN")),
    "signal of revisions": (
        replace(allocating(), selection=(SIGNAL, *revise_first_answers("boxes").links)),
        ("H20", "WARN"),
    ),
    "signal of a continuous reward": (allocating(has_binary_reward=False), ("H26", "ERROR")),
    "signal of a reward less a penalty": (
        replace(allocating(), links=(*subtract_kl_from_reward(0.1).links, *rloo().links)),
        ("H26", "ERROR"),
    ),
    "a running baseline and dropped groups": (
        plan_of(
            chain(
                center_by_moving_average(),
                average_over_steps(),
                clip_surrogate(),
                drop_uniform_groups(),
            )
        ),
        ("H32", "WARN"),
    ),
    "chances that no average reads": (
        replace(allocating(weights="ht"), links=grpo().links),
        ("H27", "ERROR"),
    ),
    "chances of several updates": (
        replace(allocating(weights="ht"), updates_per_iteration=2),
        ("H33", "WARN"),
    ),
    "signal of reused rollouts": (
        replace(allocating(), selection=(SIGNAL, REUSE)),
        ("H9", "INFO"),
    ),
    "signal and a z-score": (replace(allocating(), links=grpo().links), ("U18", "WARN")),
    "noise levels of tokens": (plan_of(flash_grpo(dimensions=8)), ("H10", "ERROR")),
    "a penalty on denoising": (replace(plan_of(grpo(beta=0.04)), denoises=True), ("H12", "ERROR")),
    "a penalty before the dimensions": (
        replace(plan_of(chain(penalize_kl(0.04, "exact"), flow_grpo(8))), denoises=True),
        ("H34", "ERROR"),
    ),
    "a ratio over all dimensions": (replace(Z_SCORED, denoises=True), ("H11", "WARN")),
    "two weights by noise": (
        replace(plan_of(chain(flash_grpo(8), weigh_by_noise_std())), denoises=True),
        ("U5", "ERROR"),
    ),
    "a ratio across conditions": (
        replace(plan_of(flow_grpo(8)), **FLOWS, has_variants=True),
        ("U8", "ERROR"),
    ),
    "single steps of unequal windows": (
        replace(plan_of(flash_grpo(8)), **SINGLE, owners=("sampling.scope",)),
        ("U29", "WARN"),
    ),
    "two owners of a window": (
        replace(
            plan_of(flow_grpo(8)), **FLOWS, owners=("sampling.scope", "sampling.window_stride")
        ),
        ("U30", "ERROR"),
    ),
    "one deviation for different steps": (
        replace(
            plan_of(
                chain(
                    center_by_group_mean(),
                    scale_by_batch_std(),
                    average_over_rollouts(),
                    scale_log_ratio(8),
                    clip_surrogate(),
                )
            ),
            **SINGLE,
        ),
        ("U31", "WARN"),
    ),
    "a contrast without matching": (
        replace(plan_of(diffusion_nft(8)), **FLOWS),
        ("H13", "ERROR"),
    ),
    "exact divergences of tokens": (
        plan_of(chain(rloo(), penalize_kl(0.1, "exact"))),
        ("H10", "ERROR"),
    ),
    "a normalized ratio behind its clip": (
        replace(plan_of(chain(flow_grpo(8), normalize_log_ratio())), **FLOWS),
        ("H4", "ERROR"),
    ),
    "reuse of a shaped reward": (
        spending(REUSE, reads_profile=True, has_binary_reward=False),
        ("H9", "WARN"),
    ),
}


@pytest.mark.parametrize("name", SOUND_SELECTIONS)
def test_a_sound_selection_breaks_no_rule(name: str):
    assert broken(SOUND_SELECTIONS[name]) == set()


PCM = pcm(tokens=32, budget=3)
WEIGHTED = pcm(tokens=32, budget=3, weights="ht")
CASES |= {
    "chunks without weights": (acting(PCM), ("U1", "WARN")),
    "a rollout ratio over some chunks": (
        acting(chain(average_ratio_over_rollout(), WEIGHTED)),
        ("U9", "WARN"),
    ),
    "chunks chosen before the baseline": (
        acting(chain(sample_chunks_by_phase(3), chunk_grpo(tokens=32))),
        ("U21", "ERROR"),
    ),
    "a penalty on some chunks": (acting(chain(PCM, penalize_kl(0.1, "k2"))), ("U24", "WARN")),
    "a penalty where advantages are large": (
        acting(chain(chunk_grpo(tokens=32), sample_steps_by_advantage(2), penalize_kl(0.1, "k2"))),
        ("U24", "WARN"),
    ),
    "two owners of the chunks": (
        acting(chain(PCM, sample_steps_uniformly(2))),
        ("U30", "ERROR"),
    ),
    "only one phase": (
        acting(chain(chunk_grpo(tokens=32), keep_highest_phase(3))),
        ("U34", "WARN"),
    ),
    "no floor under a phase": (acting(pcm(tokens=32, budget=3, floor=0.0)), ("U34", "WARN")),
    "phases of tokens": (plan_of(chain(rloo(), sample_chunks_by_phase(3))), ("H14", "ERROR")),
    "a ratio over a chunk's tokens": (acting(rloo()), ("H15", "WARN")),
}


def revising(objective: Objective, *steps: Selection, share: float = 0.5) -> Plan:
    """Returns a plan whose rollouts revise a first answer."""
    selection = compose(revise_first_answers("boxes", share), *steps)
    return replace(plan_of(objective), selection=selection.links, has_binary_reward=False)


REVISED = group_revision(center="group")
CASES |= {
    "advantages that do not sum to 0": (revising(group_revision()), ("U17", "WARN")),
    "an improvement that counts twice": (revising(REVISED), ("U17", "WARN")),
    "only revisions": (revising(grpo(), share=1.0), ("U32", "WARN")),
    "an improvement without first answers": (plan_of(REVISED), ("H17", "ERROR")),
    "two revisions": (revising(grpo(), revise_first_answers("boxes")), ("H18", "ERROR")),
    "first answers of a profile": (revising(grpo(), reuse_profile_rollouts()), ("H19", "ERROR")),
    "streaks of revisions": (revising(grpo(), skip_uniform_prompts(2)), ("H20", "WARN")),
    "an improvement behind the baseline": (
        revising(chain(grpo(), add_improvement())),
        ("H3", "ERROR"),
    ),
    "a pair of improved rewards": (
        replace(revising(chain(add_improvement(), grpo())), group_sizes=frozenset({2})),
        ("U16", "ERROR"),
    ),
}


LATER_PARTS = (sum_later_part_scores(), average_over_rollouts())
SCORED = replace(plan_of(chain(*LATER_PARTS, clip_surrogate())), scores_parts=True)
BY_TOKEN = (average_ratio_keeping_token_gradient(), clip_surrogate(3e-4, 4e-4))


def supervised(*others: Objective) -> Plan:
    """Returns a plan with a judge that scores parts, a link that reads them, and others."""
    return replace(SCORED, links=chain(*LATER_PARTS, *others).links)


CASES |= {
    "parts without a judge": (replace(SCORED, scores_parts=False), ("H28", "ERROR")),
    "parts and a ratio per rollout": (
        supervised(average_ratio_over_rollout(), clip_surrogate()),
        ("H29", "ERROR"),
    ),
    "parts and the geometric mean": (supervised(average_clipped_log_ratio()), ("H29", "ERROR")),
    "parts and a scale": (supervised(scale_by_batch_std(), clip_surrogate()), ("H30", "ERROR")),
    "parts and extremes": (
        supervised(clip_surrogate(), keep_extreme_rollouts(4)),
        ("H30", "ERROR"),
    ),
    "parts and an improvement": (supervised(add_improvement(), clip_surrogate()), ("H30", "ERROR")),
    "parts behind a whole algorithm": (supervised(two_grpo()), ("H2", "ERROR")),
    "parts and uniform groups": (
        supervised(drop_uniform_groups(), clip_surrogate()),
        ("H31", "WARN"),
    ),
    "parts and skipped prompts": (
        replace(
            SCORED,
            selection=skip_uniform_prompts(2).links,
            iterations_per_round=2,
        ),
        ("H31", "WARN"),
    ),
}


def test_sound_part_scores_break_no_rule():
    assert broken(SCORED) == set()
    assert broken(supervised(*BY_TOKEN)) == set()
    assert broken(replace(SCORED, group_sizes=frozenset({2}), has_binary_reward=False)) == set()
    assert broken(supervised(clip_surrogate(), sample_steps_by_advantage(2))) == set()


def test_sound_revisions_break_no_rule():
    assert broken(revising(grpo())) == set()
    assert broken(revising(chain(add_improvement(), grpo()))) == set()
    assert broken(revising(chain(grpo(), scale_by_improvement(center="group")))) == set()


@pytest.mark.parametrize("name", CASES)
def test_a_broken_rule_is_found(name: str):
    plan, expected = CASES[name]
    assert expected in broken(plan)


def test_weighted_chunks_break_no_rule_and_take_a_penalty():
    assert broken(acting(WEIGHTED)) == set()
    assert broken(acting(chunk_grpo(tokens=32))) == set()
    penalized = acting(chain(WEIGHTED, penalize_kl(0.1, "k2")))
    # Of the groups that are kept, as for every policy.
    assert broken(penalized) == {("U24", "WARN")}


def test_every_rule_has_a_case():
    ids = {(rule.id, rule.severity.name) for rule in RULES}
    assert ids == {expected for _, expected in CASES.values()}


@pytest.mark.parametrize("name", DENOISING)
def test_published_algorithms_for_denoising_break_no_rule(name: str):
    assert broken(replace(plan_of(DENOISING[name]), denoises=True)) == set()


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_algorithms_break_no_rule(name: str):
    assert broken(plan_of(PUBLISHED[name])) == set()


@pytest.mark.parametrize(
    "objective",
    [
        chain(grpo(beta=0.0), keep_extreme_rollouts(4)),
        chain(rloo(), keep_extreme_rollouts(4, "kept_mean")),
        chain(truncate_mismatch(), cispo()),
        chain(mask_mismatched_rollouts(), gspo()),
        chain(mask_mismatched_rollouts(), truncate_mismatch(), rloo()),
    ],
    ids=["pods", "pods on rloo", "tis on cispo", "mask on gspo", "tis and mask"],
)
def test_sound_compositions_break_no_rule(objective: Objective):
    assert broken(plan_of(objective)) == set()


@pytest.mark.parametrize(
    "plan",
    [
        replace(Z_SCORED, routing="replay_sampled", has_routers=True),
        replace(Z_SCORED, routing="replay_sampled"),  # an import: known when it is loaded
        replace(
            Z_SCORED, routing="replay_proximal", has_routers=True, optimizer_steps_per_iteration=2
        ),
        replace(Z_SCORED, routing="live", has_routers=True, optimizer_steps_per_iteration=1),
        replace(Z_SCORED, routing="live", has_routers=False),
    ],
)
def test_sound_routing_breaks_no_rule(plan: Plan):
    assert broken(plan) == set()


@pytest.mark.parametrize(
    "plan",
    [
        replace(plan_of(chain(flow_grpo(8), penalize_kl(0.04, "exact"))), **FLOWS),
        replace(plan_of(flash_grpo(8)), **SINGLE),
        replace(plan_of(flow_grpo(8)), **FLOWS, owners=("sampling.scope",)),
        replace(plan_of(diffusion_nft(8)), **MATCHES, has_variants=True),
        replace(plan_of(awm(8)), **MATCHES, has_variants=True),
        replace(
            plan_of(
                chain(
                    center_by_group_mean(),
                    scale_by_group_std(),
                    average_over_rollouts(),
                    scale_log_ratio(8),
                    normalize_log_ratio(),
                    clip_surrogate(),
                )
            ),
            **FLOWS,
        ),
    ],
    ids=["kl", "flash", "scope", "nft on variants", "awm on variants", "guard"],
)
def test_sound_denoising_breaks_no_rule(plan: Plan):
    assert broken(plan) == set()


def test_pairs_with_a_binary_reward_are_sound():
    assert broken(replace(plan_of(two_grpo()), group_sizes=frozenset({2}))) == set()


def test_sentences_say_what_to_do():
    for rule in RULES:
        assert len(rule.sentence) > 30
        assert rule.severity in Severity
