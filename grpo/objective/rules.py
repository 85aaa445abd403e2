"""Which links compose: composition rules for the links of this library (docs/rules.md).

A rule is data: id, severity, sentence, and a predicate that names what causes it. Ids are stable:
reports and documents cite them.
"""

from grpo.objective.chunk_rules import CHUNK_RULES
from grpo.objective.predicates import (
    batch_std_of_single_steps,
    behind_trust_region,
    beside,
    contrast_without_matching,
    early_selection,
    extreme_pair,
    extremes_of_full_group,
    extremes_of_shaped_reward,
    extremes_of_variable_groups,
    filter_on_reward,
    kl_estimator,
    kl_of_denoising,
    kl_on_part,
    late_kl,
    no_floor,
    noise_weight_owners,
    noise_without_denoising,
    nothing_to_choose,
    pair_z_score,
    phase_owners,
    prompts_come_once,
    ratio_across_conditions,
    ratio_of_all_dimensions,
    replay_on_policy,
    replay_without_routers,
    reuse_after_choice,
    reuse_of_small_groups,
    reuse_without_base,
    rollout_ratio_on_policy,
    selection_owners,
    size_owners,
    stale_proximal_routing,
    truncated_sampling,
    unequal_chances_of_steps,
    unless_one,
    variable_groups,
    window_owners,
)
from grpo.objective.rule import Rule, Severity

RULES: tuple[Rule, ...] = (
    Rule(
        "U5",
        Severity.ERROR,
        "denoising steps can be weighed by their noise once; keep one of rectify_noise_level, "
        "weigh_by_noise_std and normalize_log_ratio",
        noise_weight_owners,
    ),
    Rule(
        "U8",
        Severity.ERROR,
        "rollouts drawn under a variant of the prompt have no ratio to the prompt's own density; "
        "set sampling.density: matched",
        ratio_across_conditions,
    ),
    Rule(
        "U10",
        Severity.INFO,
        "a rollout ratio has no effect with one update per round (s = 1); raise "
        "training.updates_per_round or drop it",
        rollout_ratio_on_policy,
    ),
    Rule(
        "U11",
        Severity.ERROR,
        "an objective needs exactly one trust region, such as clip_surrogate",
        unless_one("trust region"),
    ),
    Rule(
        "U11",
        Severity.ERROR,
        "a rollout ratio can stand once, and average_clipped_log_ratio forms its own; keep one",
        lambda plan: plan.of("rollout level")[1:],
    ),
    Rule(
        "U12",
        Severity.WARN,
        "with a rollout ratio this average weighs rollouts by their length, which is not GSPO; "
        "use average_over_rollouts, average_over_prompts, or sum_over_steps if you want it (LUSPO)",
        beside("rollout level", "average_over_steps", "average_over_horizon"),
    ),
    Rule(
        "U15",
        Severity.WARN,
        "a ratio by rollout and a weight by step are different estimators; use "
        "mask_mismatched_rollouts",
        beside("rollout level", "truncate_mismatch"),
    ),
    Rule(
        "U16",
        Severity.ERROR,
        "the z-score of two continuous rewards is their sign: the margin is lost; drop "
        "scale_by_group_std, keep more than two, or make the reward binary",
        pair_z_score,
    ),
    Rule(
        "U18",
        Severity.WARN,
        "with groups of different sizes its scale or weight depends on the size; use "
        "leave_one_out and average_over_prompts",
        variable_groups,
    ),
    Rule(
        "U18",
        Severity.WARN,
        "with groups of different sizes it keeps other shares of them, so the scale depends on the "
        "size; sample groups of one size",
        extremes_of_variable_groups,
    ),
    Rule(
        "U19",
        Severity.ERROR,
        "prompts must be selected by one owner; keep one of sGPO's triage, keep_rate_window, "
        "skip_uniform_prompts and resample_uniform_groups",
        selection_owners,
    ),
    Rule(
        "U19",
        Severity.ERROR,
        "group sizes must have one owner; keep one of fix_group_size and "
        "size_groups_by_inverse_rate",
        size_owners,
    ),
    Rule(
        "U19",
        Severity.ERROR,
        "phases must have one owner; keep one of split_at_random, split_easy_to_hard and "
        "stage_by_family",
        phase_owners,
    ),
    Rule(
        "U20",
        Severity.ERROR,
        "a filter on the shaped reward keeps groups without signal; set by: outcome",
        filter_on_reward,
    ),
    Rule(
        "U21",
        Severity.ERROR,
        "baseline, scale and average are decided on everything sampled, before any selection; "
        "move the selection behind them",
        early_selection,
    ),
    Rule(
        "U22",
        Severity.ERROR,
        "groups of at most 4 rollouts, or of no more than it keeps, leave nothing to choose; "
        "sample larger groups or drop keep_extreme_rollouts",
        nothing_to_choose,
    ),
    Rule(
        "U22",
        Severity.WARN,
        "the best against the worst alone learns measurably worse than four; set keep: 4 or more",
        extreme_pair,
    ),
    Rule(
        "U24",
        Severity.WARN,
        "the penalty covers only the groups that are kept, so its weight falls with their share; "
        "drop drop_uniform_groups to cover all",
        kl_on_part("drop_uniform_groups"),
    ),
    Rule(
        "U24",
        Severity.WARN,
        "the penalty covers only the rollouts that are kept, which were chosen by their reward; "
        "drop keep_extreme_rollouts to cover all",
        kl_on_part("keep_extreme_rollouts"),
    ),
    Rule(
        "U25",
        Severity.ERROR,
        "top_p < 1 samples from another density than the one that is scored; set it to 1",
        truncated_sampling,
    ),
    Rule(
        "U26",
        Severity.ERROR,
        "dropout makes the ratio differ from 1 before any update; set it to 0",
        lambda plan: sorted(plan.dropouts),
    ),
    Rule(
        "U29",
        Severity.WARN,
        "one step per prompt, drawn from windows that differ by prompt, weighs steps unequally: "
        "another objective than one step of all; set stochastic: all to train on whole windows",
        unequal_chances_of_steps,
    ),
    Rule(
        "U30",
        Severity.ERROR,
        "the steps with noise must be chosen by one owner; keep one of scope and window_stride",
        window_owners,
    ),
    Rule(
        "U31",
        Severity.WARN,
        "rewards of prompts with noise at different steps spread differently; use "
        "scale_by_group_std",
        batch_std_of_single_steps,
    ),
    Rule(
        "U33",
        Severity.INFO,
        "with one update per round, replaying the sampler's routing brought nothing in its paper; "
        "set it to live",
        replay_on_policy,
    ),
    Rule(
        "U33",
        Severity.WARN,
        "with 4 or more updates per round, the trainer's routing collapsed in its paper; use "
        "replay_sampled",
        stale_proximal_routing,
    ),
    Rule(
        "U33",
        Severity.ERROR,
        "a dense model has no routing to replay; set it to live",
        replay_without_routers,
    ),
    Rule(
        "U34",
        Severity.WARN,
        "rollouts with a middling reward are never kept, which no weight repairs: the direction is "
        "exact only if the reward is binary",
        extremes_of_shaped_reward,
    ),
    Rule(
        "U34",
        Severity.WARN,
        "with floor 0 the chance of a prompt falls towards 0, and no weight repairs what is never "
        "drawn; set it to 0.01",
        no_floor,
    ),
    Rule(
        "U35",
        Severity.ERROR,
        "k1 as a loss has zero gradient in expectation; use k2, k3 or subtract_kl_from_reward",
        kl_estimator("k1"),
    ),
    Rule(
        "U35",
        Severity.INFO,
        "k3 as a loss follows the gradient of KL(ref || pi), the forward KL; k2 that of "
        "KL(pi || ref)",
        kl_estimator("k3"),
    ),
    Rule(
        "H3",
        Severity.ERROR,
        "what is taken off the reward must be taken off before the baseline; move it to the front",
        late_kl,
    ),
    Rule(
        "H4",
        Severity.ERROR,
        "behind the trust region it changes nothing; move it in front",
        behind_trust_region,
    ),
    Rule(
        "H5",
        Severity.WARN,
        "advantages of the full group do not add up to 0 over what is kept, which favors or "
        "disfavors all of it; set advantage: kept_mean or kept_z_score",
        extremes_of_full_group,
    ),
    Rule(
        "H6",
        Severity.WARN,
        "it learns from prompts that come again, and no two rounds of the arm share a phase; give "
        "several rounds one phase",
        prompts_come_once,
    ),
    Rule(
        "H7",
        Severity.WARN,
        "no round of the arm starts from the base, whose rollouts the profile holds; drop it",
        reuse_without_base,
    ),
    Rule(
        "H8",
        Severity.WARN,
        "groups larger than profile.rollouts_per_prompt are cut to it in the first round; raise it",
        reuse_of_small_groups,
    ),
    Rule(
        "H9",
        Severity.INFO,
        "the outcomes that choose the prompts are trained on: the gradient of a prompt keeps its "
        "direction, its scale is biased",
        reuse_after_choice(is_shaped=False),
    ),
    Rule(
        "H9",
        Severity.WARN,
        "the outcomes that choose the prompts are trained on, and the reward is not binary: the "
        "direction of a prompt's gradient is biased; drop reuse_profile_rollouts",
        reuse_after_choice(is_shaped=True),
    ),
    Rule(
        "H10",
        Severity.ERROR,
        "only denoising steps have a noise level and exact divergences, and only they and chunks "
        "of actions have dimensions; drop it",
        noise_without_denoising,
    ),
    Rule(
        "H11",
        Severity.WARN,
        "the ratio of a denoising step is over all dimensions of a sample and leaves every "
        "published range; put scale_log_ratio in front",
        ratio_of_all_dimensions,
    ),
    Rule(
        "H12",
        Severity.ERROR,
        "the log ratio of a denoising step is over all dimensions, where estimators of the "
        "divergence overflow; set estimator: exact",
        kl_of_denoising,
    ),
    Rule(
        "H13",
        Severity.ERROR,
        "it follows and mirrors velocities that match an image; set sampling.density: matched",
        contrast_without_matching,
    ),
    Rule(
        "H1",
        Severity.ERROR,
        "an objective needs exactly one average, or its scale is undefined",
        unless_one("average"),
    ),
    Rule(
        "H2",
        Severity.ERROR,
        "an objective needs exactly one baseline",
        unless_one("baseline"),
    ),
    *CHUNK_RULES,
)
