"""Composition rules: which combinations of links and settings of an arm are unsound."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from grpo.objective.link import Kind, Link, Setting
from grpo.objective.penalty import CONTRAST

TOO_FEW = 4  # rollouts of a group, for a selection of extremes (rule U22)
TOO_STALE = 4  # updates per round, for replay of the trainer's routing (rule U33)
ROUTING = "policy.routing"
# Selections that choose prompts or group sizes by posteriors of earlier outcomes.
ONLINE = ("allocate_by_signal", "sample_prompts_near_rate", "size_groups_by_knapsack")


class Severity(Enum):
    INFO = 0
    WARN = 1
    ERROR = 2


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The facts about an arm that rules read."""

    links: tuple[Link, ...]
    curriculum: tuple[Link, ...]
    group_sizes: frozenset[int]
    optimizer_steps_per_iteration: int  # of all passes
    updates_per_iteration: int  # of one pass
    iterations_per_round: int = 1
    staleness: int = 0  # iterations between the weights that sample and those that train
    refreshes_reference: bool = False  # the reference is the policy that a round starts from
    has_binary_reward: bool
    scores_parts: bool = False  # a judge of the reward scores parts of texts
    normalized: tuple[str, ...] = ()  # paths of judges whose scores are normalized within groups
    dropouts: frozenset[str]  # parameter paths of dropouts above 0
    top_p: float = 1.0
    has_other_density: bool = False  # log-probs are at another temperature than sampling
    follows_reward: bool = False  # the temperature depends on the mean reward
    stops_on_plateau: bool = False  # a round ends when the mean reward does not rise
    selection: tuple[Link, ...] = ()
    phases: tuple[int, ...] = ()  # of the arm's rounds
    starts_from_base: bool = True  # at least one round of the arm starts from the base policy
    reads_profile: bool = False  # at least one step of the curriculum reads outcome rates
    profile_rollouts: int | None = None  # per prompt
    routing: str = "live"  # policy.routing
    has_routers: bool | None = None  # None: unknown until the model is loaded
    denoises: bool = False  # steps are denoising steps
    acts: bool = False  # steps are chunks of a robot's actions
    density: str | None = None  # of denoising steps
    stochastic: str | None = None  # which denoising steps have noise
    owners: tuple[str, ...] = ()  # paths of the settings that choose the window of steps with noise
    has_variants: bool = False  # some rollouts are sampled under a variant of the prompt

    def named(self, *names: str) -> list[str]:
        """Returns the links of the objective that have one of `names`, with repetitions."""
        return [link.name for link in self.links if link.name in names]

    def of(self, *kinds: Kind) -> list[str]:
        """Returns the links of the objective that have one of `kinds`."""
        return [link.name for link in self.links if link.kinds & {*kinds}]

    def steps(self, kind: Kind) -> list[str]:
        """Returns the steps of the curriculum that have a kind."""
        return [link.name for link in self.curriculum if kind in link.kinds]

    def set_to(self, name: str, **settings: Setting) -> list[str]:
        """Returns the links of objective and selection that have a name and these settings."""
        return [
            link.name
            for link in (*self.links, *self.selection)
            if link.name == name and settings.items() <= link.settings.items()
        ]

    def selects_by(self, kind: Kind) -> list[str]:
        """Returns the steps of the selection that have a kind."""
        return [link.name for link in self.selection if kind in link.kinds]

    def selects_with(self, *names: str) -> list[str]:
        """Returns the links of the selection that have one of `names`."""
        return [link.name for link in self.selection if link.name in names]


class Rule(NamedTuple):
    """A rule; `find` returns the violating link names or parameter paths, or an empty list."""

    id: str
    severity: Severity
    sentence: str
    find: Callable[[Plan], list[str]]


def require_one(kind: Kind) -> Callable[[Plan], list[str]]:
    """Returns a `find` that reports missing or extra links of a kind that must occur once."""

    def find(plan: Plan) -> list[str]:
        found = plan.of(kind)
        return [] if len(found) == 1 else (found[1:] or ["objective"])

    return find


def combined_with(kind: Kind, *names: str) -> Callable[[Plan], list[str]]:
    """Returns a `find` that reports `names` in objectives with a link of a kind."""
    return lambda plan: plan.named(*names) if plan.of(kind) else []


def rollout_ratio_on_policy(plan: Plan) -> list[str]:
    is_on_policy = plan.optimizer_steps_per_iteration == 1 and not plan.of("reference ratio")
    return plan.of("rollout ratio") if is_on_policy else []


def ratio_before_reference_ratio(plan: Plan) -> list[str]:
    """Reports links whose ratio `take_ratio_to_reference` replaces."""
    of_ratio = [link for link in plan.links if "ratio" in link.kinds]
    last = max(
        (index for index, link in enumerate(of_ratio) if "reference ratio" in link.kinds),
        default=0,
    )
    return [link.name for link in of_ratio[:last] if "correction" not in link.kinds]


def other_scoring_temperature(*, has_reference_ratio: bool) -> Callable[[Plan], list[str]]:
    """Returns a `find` that reports log-probs at another temperature than that of sampling."""

    def find(plan: Plan) -> list[str]:
        found = plan.has_other_density and bool(plan.of("reference ratio")) is has_reference_ratio
        return ["sampling.temperature.scored_at"] if found else []

    return find


def _is_shaped(plan: Plan) -> bool:
    """Returns whether the reward takes more than two values."""
    return (
        not plan.has_binary_reward
        or bool(_active(plan, "reward penalty"))
        or bool(plan.of("reward part"))
    )


def _active(plan: Plan, kind: Kind = "penalty") -> list[str]:
    """Returns the penalties of the objective with a weight above 0."""
    return [link.name for link in plan.links if kind in link.kinds and link.settings["beta"]]


def _per_step(plan: Plan) -> list[str]:
    """Returns the penalties and bonuses with a weight above 0, which are a sum over steps."""
    bonuses = [
        link.name
        for link in plan.links
        if "entropy bonus" in link.kinds and link.settings["weight"]
    ]
    return _active(plan) + bonuses


def pair_z_score(plan: Plan) -> list[str]:
    if not _is_shaped(plan):
        return []
    # A group of two has more than two parts.
    of_parts = plan.of("part scores")
    whole = [each for each in plan.of("group scale") if each not in of_parts]
    whole = whole if 2 in plan.group_sizes else []
    return whole + _extremes(plan, keep=2, advantage="kept_z_score")


def normalized_pairs(plan: Plan) -> list[str]:
    return list(plan.normalized) if 2 in plan.group_sizes else []


def normalized_mean(plan: Plan) -> list[str]:
    return list(plan.normalized) if plan.follows_reward else []


def normalized_plateau(plan: Plan) -> list[str]:
    return list(plan.normalized) if plan.stops_on_plateau else []


def variable_groups(plan: Plan) -> list[str]:
    averages = (
        "average_over_steps",
        "average_over_rollouts",
        "average_over_horizon",
        "sum_over_steps",
    )
    scaled = [
        link.name for link in plan.links if "group scale" in link.kinds or link.name in averages
    ]
    return scaled if len(plan.group_sizes) > 1 else []


def extremes_of_variable_groups(plan: Plan) -> list[str]:
    return _extremes(plan) if len(plan.group_sizes) > 1 else []


def selection_owners(plan: Plan) -> list[str]:
    triage = plan.steps("triage")
    others = plan.steps("rate window") + plan.selects_by("prompt selection")
    return others if triage else others[1:]


def visit_owners(plan: Plan) -> list[str]:
    visits = plan.selects_by("visits")
    return visits if plan.selects_by("prompt selection") else visits[1:]


def draws_of_unsolved(plan: Plan) -> list[str]:
    drawing = [
        link.name
        for link in plan.curriculum
        if link.name == "sample_unsolved" or link.settings.get("unsolved")
    ]
    return drawing[1:]


def size_owners(plan: Plan) -> list[str]:
    return [*plan.steps("group size"), *plan.selects_by("group size")][1:]


def phase_owners(plan: Plan) -> list[str]:
    return plan.steps("phases")[1:]


def filter_on_reward(plan: Plan) -> list[str]:
    return plan.set_to("drop_uniform_groups", by="reward") if _is_shaped(plan) else []


def filter_by_running_baseline(plan: Plan) -> list[str]:
    dropping = plan.named("drop_uniform_groups")
    return dropping if plan.named("center_by_moving_average") else []


def truncated_sampling(plan: Plan) -> list[str]:
    return ["sampling.top_p"] if plan.top_p < 1 else []


def kl_estimator(estimator: str) -> Callable[[Plan], list[str]]:
    def find(plan: Plan) -> list[str]:
        return [
            link.name
            for link in plan.links
            if link.name == "penalize_kl"
            and link.settings["estimator"] == estimator
            and link.settings["beta"]
        ]

    return find


def kl_on_part(selection: str) -> Callable[[Plan], list[str]]:
    """Returns a `find` that reports penalties on only the steps that `selection` keeps."""
    return lambda plan: _per_step(plan) if plan.named(selection) else []


def nothing_to_choose(plan: Plan) -> list[str]:
    largest = max(plan.group_sizes, default=None)
    return [
        link.name
        for link in plan.links
        if link.name == "keep_extreme_rollouts"
        and largest is not None
        and largest <= max(TOO_FEW, int(link.settings["keep"] or 0))
    ]


def extreme_pair(plan: Plan) -> list[str]:
    return _extremes(plan, keep=2)


def extremes_of_shaped_reward(plan: Plan) -> list[str]:
    return _extremes(plan) if _is_shaped(plan) else []


def extremes_of_full_group(plan: Plan) -> list[str]:
    return _extremes(plan, advantage="full_group")


def _extremes(plan: Plan, **settings: Setting) -> list[str]:
    """Returns the occurrences of keep_extreme_rollouts with these settings."""
    return plan.set_to("keep_extreme_rollouts", **settings)


def early_selection(plan: Plan) -> list[str]:
    deciding: set[Kind] = {"baseline", "scale", "average"}
    decided = [index for index, link in enumerate(plan.links) if link.kinds & deciding]
    early = plan.links[: max(decided, default=0)]
    return [link.name for link in early if "selection" in link.kinds]


def behind_trust_region(plan: Plan) -> list[str]:
    regions = [index for index, link in enumerate(plan.links) if "trust region" in link.kinds]
    late = plan.links[min(regions, default=len(plan.links)) :]
    return [link.name for link in late if "ratio" in link.kinds]


def undivided_penalty(plan: Plan) -> list[str]:
    scales = [index for index, link in enumerate(plan.links) if link.name == "scale_log_ratio"]
    early = plan.links[: max(scales, default=0)]
    return [link.name for link in early if "exact divergence" in link.kinds]


def late_reward(plan: Plan) -> list[str]:
    baselines = [index for index, link in enumerate(plan.links) if "baseline" in link.kinds]
    late = plan.links[min(baselines, default=len(plan.links)) :]
    return [link.name for link in late if link.kinds & {"reward penalty", "reward part"}]


def replay_on_policy(plan: Plan) -> list[str]:
    is_replayed = plan.routing == "replay_sampled"
    return [ROUTING] if is_replayed and plan.optimizer_steps_per_iteration == 1 else []


def stale_proximal_routing(plan: Plan) -> list[str]:
    is_replayed = plan.routing == "replay_proximal"
    return [ROUTING] if is_replayed and plan.optimizer_steps_per_iteration >= TOO_STALE else []


def uncorrected_staleness(plan: Plan) -> list[str]:
    is_stale = plan.staleness and plan.iterations_per_round > 1
    return ["training.staleness"] if is_stale and not plan.of("correction") else []


def unmoved_reference(plan: Plan) -> list[str]:
    """Reports penalties that compare the policy that a round starts from with itself."""
    if not plan.refreshes_reference or plan.iterations_per_round > 1:
        return []
    # A penalty in the reward is computed under the policy that has sampled.
    return (
        _active(plan)
        if plan.optimizer_steps_per_iteration == 1
        else _active(plan, "reward penalty")
    )


def unread_reference(plan: Plan) -> list[str]:
    is_read = plan.of("reference ratio") or _active(plan)
    return ["training.reference"] if plan.refreshes_reference and not is_read else []


def replay_without_routers(plan: Plan) -> list[str]:
    return [ROUTING] if plan.routing != "live" and plan.has_routers is False else []


def no_floor(plan: Plan) -> list[str]:
    return plan.set_to("skip_uniform_prompts", floor=0)


def prompts_come_once(plan: Plan) -> list[str]:
    comes_again = len(set(plan.phases)) < len(plan.phases) or plan.iterations_per_round > 1
    return [] if comes_again else plan.selects_with("skip_uniform_prompts", *ONLINE)


def reuse_without_base(plan: Plan) -> list[str]:
    return [] if plan.starts_from_base else plan.selects_with("reuse_profile_rollouts")


def reuse_of_small_groups(plan: Plan) -> list[str]:
    largest, stored = max(plan.group_sizes, default=0), plan.profile_rollouts
    # allocate_by_signal knows how many there are.
    fits = stored is None or largest <= stored or plan.selects_with("allocate_by_signal")
    return [] if fits else plan.selects_with("reuse_profile_rollouts")


def reuse_after_choice(*, is_shaped: bool) -> Callable[[Plan], list[str]]:
    """Returns a `find` that reports profile outcomes which select prompts and are trained on."""

    def find(plan: Plan) -> list[str]:
        chooses = plan.reads_profile or plan.selects_with("resample_uniform_groups", *ONLINE)
        found = chooses and _is_shaped(plan) is is_shaped
        return plan.selects_with("reuse_profile_rollouts") if found else []

    return find


def noise_without_denoising(plan: Plan) -> list[str]:
    exact = plan.of("exact divergence")
    scaled = [] if plan.acts else plan.named("scale_log_ratio")
    weights = [each for each in plan.of("noise weight") if each not in exact]
    return [] if plan.denoises else scaled + weights + exact


def noise_weight_owners(plan: Plan) -> list[str]:
    return plan.of("noise weight")[1:]


def kl_of_denoising(plan: Plan) -> list[str]:
    exact = plan.of("exact divergence")
    return [each for each in _active(plan) if each not in exact] * plan.denoises


def entropy_of_denoising(plan: Plan) -> list[str]:
    return plan.of("entropy bonus") if plan.denoises else []


def ratio_across_conditions(plan: Plan) -> list[str]:
    return ["sampling.variants"] if plan.has_variants and plan.density != "matched" else []


def contrast_without_matching(plan: Plan) -> list[str]:
    return plan.named(CONTRAST) if plan.denoises and plan.density != "matched" else []


def unequal_chances_of_steps(plan: Plan) -> list[str]:
    is_single = plan.stochastic == "one_per_prompt"
    return ["sampling.scope"] if is_single and "sampling.scope" in plan.owners else []


def window_owners(plan: Plan) -> list[str]:
    return list(plan.owners[1:])


def batch_std_of_single_steps(plan: Plan) -> list[str]:
    return plan.named("scale_by_batch_std") if plan.stochastic == "one_per_prompt" else []


def ratio_of_all_dimensions(plan: Plan) -> list[str]:
    return plan.of("trust region") if plan.denoises and not plan.named("scale_log_ratio") else []


def unweighted_steps(plan: Plan) -> list[str]:
    return plan.set_to("sample_chunks_by_phase", weights="none")


def revises(plan: Plan) -> list[str]:
    """Returns the steps of the selection that sample groups from a first answer."""
    return plan.selects_with("revise_first_answers")


def improvement_without_revision(plan: Plan) -> list[str]:
    return [] if revises(plan) else plan.of("improvement")


def uncentered_improvement(plan: Plan) -> list[str]:
    return plan.set_to("scale_by_improvement", center="none")


def improvement_twice(plan: Plan) -> list[str]:
    both = plan.named("add_improvement") and plan.named("scale_by_improvement")
    return plan.named("scale_by_improvement") if both else []


def only_revisions(plan: Plan) -> list[str]:
    return plan.set_to("revise_first_answers", share=1)


def streaks_of_revisions(plan: Plan) -> list[str]:
    return plan.selects_with("skip_uniform_prompts", *ONLINE) if revises(plan) else []


def signal_of_other_rewards(plan: Plan) -> list[str]:
    return plan.selects_with("allocate_by_signal") if _is_shaped(plan) else []


def unread_chances(plan: Plan) -> list[str]:
    weighted = plan.set_to("allocate_by_signal", weights="ht")
    return [] if plan.named("average_over_prompts") else weighted


def chances_of_several_updates(plan: Plan) -> list[str]:
    weighted = plan.set_to("allocate_by_signal", weights="ht")
    return weighted if plan.updates_per_iteration > 1 else []


def prompts_without_chance(plan: Plan) -> list[str]:
    return plan.set_to("allocate_by_signal", draws="optimism", weights="none")


def reuse_without_first_answers(plan: Plan) -> list[str]:
    return plan.selects_with("reuse_profile_rollouts") if revises(plan) else []


def parts_without_judge(plan: Plan) -> list[str]:
    return [] if plan.scores_parts else plan.of("part scores")


def one_ratio_for_parts(plan: Plan) -> list[str]:
    ratios = ("average_ratio_over_rollout", "average_clipped_log_ratio")
    return plan.named(*ratios) if plan.of("part scores") else []


def one_advantage_for_parts(plan: Plan) -> list[str]:
    kinds: tuple[Kind, ...] = ("scale", "improvement", "reward penalty")
    found = plan.of(*kinds) + plan.named("keep_extreme_rollouts")
    return found if plan.of("part scores") else []


def uniform_groups_with_parts(plan: Plan) -> list[str]:
    found = plan.named("drop_uniform_groups")
    found += plan.selects_with("skip_uniform_prompts", "resample_uniform_groups", *ONLINE)
    return found if plan.of("part scores") else []


def kl_on_steps(plan: Plan) -> list[str]:
    is_part = unweighted_steps(plan) or plan.named("keep_highest_phase")
    return _per_step(plan) if is_part else []


def steps_never_kept(plan: Plan) -> list[str]:
    return plan.set_to("sample_chunks_by_phase", floor=0) + plan.named("keep_highest_phase")


def phases_without_chunks(plan: Plan) -> list[str]:
    return [] if plan.acts else plan.of("phase selection")


def chunk_ratio_of_all_tokens(plan: Plan) -> list[str]:
    return plan.of("trust region") if plan.acts and not plan.named("scale_log_ratio") else []


CHUNK_RULES: tuple[Rule, ...] = (
    Rule(
        "U1",
        Severity.WARN,
        "with weights: none the gradient is biased towards steps that are often kept; set "
        "weights: ht",
        unweighted_steps,
    ),
    Rule(
        "U9",
        Severity.WARN,
        "the std of a rollout ratio over the kept steps is sqrt(N / B) times that over all steps;"
        " widen the clip by this factor",
        lambda plan: plan.of("rollout level") if plan.of("step selection") else [],
    ),
    Rule(
        "U24",
        Severity.WARN,
        "the penalty or bonus is biased towards steps that are often kept; set weights: ht",
        kl_on_steps,
    ),
    Rule(
        "U24",
        Severity.WARN,
        "steps with advantage 0 are never kept, so that the penalty or bonus misses them, and "
        "small advantages give large weights, so that its variance is large; use "
        "sample_steps_uniformly",
        kl_on_part("sample_steps_by_advantage"),
    ),
    Rule(
        "U30",
        Severity.ERROR,
        "at most one link may select steps; keep one",
        lambda plan: plan.of("step selection")[1:],
    ),
    Rule(
        "U34",
        Severity.WARN,
        "some phases are never trained, which no weight corrects; use sample_chunks_by_phase with"
        " a floor above 0",
        steps_never_kept,
    ),
    Rule(
        "H14",
        Severity.ERROR,
        "only chunks of actions have phases; use sample_steps_uniformly",
        phases_without_chunks,
    ),
    Rule(
        "H15",
        Severity.WARN,
        "the ratio of a chunk is a product over all of its tokens and exceeds every published "
        "clip range; put scale_log_ratio before the trust region",
        chunk_ratio_of_all_tokens,
    ),
)


REVISION_RULES: tuple[Rule, ...] = (
    Rule(
        "U17",
        Severity.WARN,
        "advantages times 1 + improvement do not sum to 0 over a group, so that the whole group "
        "becomes more likely; set center: group",
        uncentered_improvement,
    ),
    Rule(
        "U17",
        Severity.WARN,
        "add_improvement and scale_by_improvement reward the same improvement twice; keep one",
        improvement_twice,
    ),
    Rule(
        "U32",
        Severity.WARN,
        "evaluation and users ask the prompt itself, on which no group is trained; set share below"
        " 1",
        only_revisions,
    ),
    Rule(
        "H17",
        Severity.ERROR,
        "only rollouts that revise a first answer have an improvement; put revise_first_answers "
        "into the selection",
        improvement_without_revision,
    ),
    Rule(
        "H18",
        Severity.ERROR,
        "at most one step may revise first answers; keep one",
        lambda plan: revises(plan)[1:],
    ),
    Rule(
        "H19",
        Severity.ERROR,
        "the profile's rollouts were not sampled from a first answer; drop one of "
        "reuse_profile_rollouts and revise_first_answers",
        reuse_without_first_answers,
    ),
    Rule(
        "H20",
        Severity.WARN,
        "it counts outcomes of revisions, which are not those of the prompt itself; use "
        "resample_uniform_groups, which looks at the groups that are trained",
        streaks_of_revisions,
    ),
)


PART_RULES: tuple[Rule, ...] = (
    Rule(
        "H28",
        Severity.ERROR,
        "no judge scores parts; put one into reward.judges, such as worked_solution",
        parts_without_judge,
    ),
    Rule(
        "H29",
        Severity.ERROR,
        "one ratio per rollout gives all of its steps the mean of their advantages, which "
        "sum_later_part_scores makes differ; use average_ratio_keeping_token_gradient",
        one_ratio_for_parts,
    ),
    Rule(
        "H30",
        Severity.ERROR,
        "it reads or sets one advantage per rollout, and sum_later_part_scores one per step; keep "
        "one of them",
        one_advantage_for_parts,
    ),
    Rule(
        "H31",
        Severity.WARN,
        "it selects groups by their outcomes, although the scores of parts may differ where "
        "outcomes are equal; remove it to train on all",
        uniform_groups_with_parts,
    ),
)


RULES: tuple[Rule, ...] = (
    Rule(
        "U5",
        Severity.ERROR,
        "at most one link may weigh denoising steps by their noise; keep one of "
        "rectify_noise_level, weigh_by_noise_std and normalize_log_ratio",
        noise_weight_owners,
    ),
    Rule(
        "U8",
        Severity.ERROR,
        "rollouts sampled under a variant of the prompt have no importance ratio under the prompt"
        " itself; set sampling.density: matched",
        ratio_across_conditions,
    ),
    Rule(
        "U10",
        Severity.INFO,
        "a rollout ratio has no effect with one update per iteration (s = 1); raise "
        "training.updates_per_iteration or drop it",
        rollout_ratio_on_policy,
    ),
    Rule(
        "U11",
        Severity.ERROR,
        "an objective needs exactly one trust region, such as clip_surrogate",
        require_one("trust region"),
    ),
    Rule(
        "U11",
        Severity.ERROR,
        "at most one link may form a rollout ratio, and average_clipped_log_ratio is one of them;"
        " keep one",
        lambda plan: plan.of("rollout level")[1:],
    ),
    Rule(
        "U12",
        Severity.WARN,
        "with a rollout ratio this average weighs rollouts by their length, unlike GSPO; use "
        "average_over_rollouts or average_over_prompts, or sum_over_steps if that is intended "
        "(LUSPO)",
        combined_with("rollout level", "average_over_steps", "average_over_horizon"),
    ),
    Rule(
        "U15",
        Severity.WARN,
        "a ratio per rollout and a correction per step are different estimators; use "
        "mask_mismatched_rollouts",
        combined_with("rollout level", "truncate_mismatch"),
    ),
    Rule(
        "U16",
        Severity.ERROR,
        "the z-score of two continuous rewards depends only on their order, not on their "
        "difference; drop scale_by_group_std, keep more than two, or make the reward binary",
        pair_z_score,
    ),
    Rule(
        "U16",
        Severity.WARN,
        "a score that is normalized in a group of two depends only on the order of the two; set "
        "normalize: none or sample larger groups",
        normalized_pairs,
    ),
    Rule(
        "U18",
        Severity.WARN,
        "the scale or the weight of a group depends on its size, and group sizes differ; use "
        "leave_one_out and average_over_prompts",
        variable_groups,
    ),
    Rule(
        "U18",
        Severity.WARN,
        "the kept fraction of a group, and so its scale, depends on its size, and group sizes "
        "differ; sample groups of one size",
        extremes_of_variable_groups,
    ),
    Rule(
        "U19",
        Severity.ERROR,
        "at most one component may select prompts; keep one of sGPO's triage, keep_rate_window, "
        "skip_uniform_prompts, resample_uniform_groups, allocate_by_signal, "
        "sample_prompts_near_rate and size_groups_by_knapsack",
        selection_owners,
    ),
    Rule(
        "U19",
        Severity.ERROR,
        "at most one component may set group sizes; keep one of fix_group_size, "
        "size_groups_by_inverse_rate, allocate_by_signal and size_groups_by_knapsack",
        size_owners,
    ),
    Rule(
        "U19",
        Severity.ERROR,
        "at most one step may set phases; keep one of split_at_random, split_by_group_size, "
        "split_easy_to_hard and stage_by_family",
        phase_owners,
    ),
    Rule(
        "U19",
        Severity.ERROR,
        "at most one step may draw unsolved prompts; drop sample_unsolved or set "
        "split_by_group_size.unsolved to 0",
        draws_of_unsolved,
    ),
    Rule(
        "U19",
        Severity.ERROR,
        "at most one step may set the prompts of an iteration; keep visit_prompts or the step that "
        "chooses prompts by their outcomes",
        visit_owners,
    ),
    Rule(
        "U20",
        Severity.ERROR,
        "a filter on a shaped reward keeps groups whose outcomes are all equal; set by: outcome",
        filter_on_reward,
    ),
    Rule(
        "U21",
        Severity.ERROR,
        "baseline, scale and average must be computed on all rollouts, before any selection; move"
        " the selection after them",
        early_selection,
    ),
    Rule(
        "U22",
        Severity.ERROR,
        "groups must have more than 4 rollouts, and more than it keeps; sample larger groups or "
        "drop keep_extreme_rollouts",
        nothing_to_choose,
    ),
    Rule(
        "U22",
        Severity.WARN,
        "training on two extreme rollouts is measurably worse than on four; set keep: 4 or more",
        extreme_pair,
    ),
    Rule(
        "U24",
        Severity.WARN,
        "the penalty or bonus covers only the kept groups, so that its weight decreases with their"
        " fraction; remove drop_uniform_groups to cover all",
        kl_on_part("drop_uniform_groups"),
    ),
    Rule(
        "U24",
        Severity.WARN,
        "the penalty or bonus covers only the kept rollouts, which were chosen by reward; remove "
        "keep_extreme_rollouts to cover all",
        kl_on_part("keep_extreme_rollouts"),
    ),
    Rule(
        "U25",
        Severity.ERROR,
        "top_p < 1 samples from a density other than that of the log-probs; set it to 1",
        truncated_sampling,
    ),
    Rule(
        "U25",
        Severity.ERROR,
        "log-probs at another temperature than that of sampling are not those of the sampled "
        "density; set it to null",
        other_scoring_temperature(has_reference_ratio=False),
    ),
    Rule(
        "U25",
        Severity.WARN,
        "rollouts are sampled from another density than that of the log-probs, and no weight "
        "corrects the gradient; set it to null",
        other_scoring_temperature(has_reference_ratio=True),
    ),
    Rule(
        "U26",
        Severity.ERROR,
        "dropout makes the ratio differ from 1 before any update; set it to 0",
        lambda plan: sorted(plan.dropouts),
    ),
    Rule(
        "U28",
        Severity.WARN,
        "the trust region is around the reference policy: it does not bound an update, and what "
        "has moved beyond it is not trained further; drop it for a ratio to the policy before the "
        "iteration",
        lambda plan: plan.of("reference ratio"),
    ),
    Rule(
        "U28",
        Severity.ERROR,
        "take_ratio_to_reference replaces the ratio that it has formed; move it behind it",
        ratio_before_reference_ratio,
    ),
    Rule(
        "U29",
        Severity.WARN,
        "one step per prompt from windows that differ by prompt samples steps with unequal "
        "probabilities and changes the objective; set stochastic: all to train on whole windows",
        unequal_chances_of_steps,
    ),
    Rule(
        "U30",
        Severity.ERROR,
        "at most one setting may choose the steps with noise; keep one of scope and window_stride",
        window_owners,
    ),
    Rule(
        "U31",
        Severity.WARN,
        "the std of rewards differs between prompts with noise at different steps; use "
        "scale_by_group_std",
        batch_std_of_single_steps,
    ),
    Rule(
        "U33",
        Severity.INFO,
        "with one update per round, replaying the sampler's routing had no benefit in its paper; "
        "set it to live",
        replay_on_policy,
    ),
    Rule(
        "U33",
        Severity.WARN,
        "with 4 or more updates per round, training with replay_proximal collapsed in its paper; "
        "use replay_sampled",
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
        "rollouts with a medium reward are never kept, which no weight corrects: the gradient "
        "direction is unbiased only if the reward is binary",
        extremes_of_shaped_reward,
    ),
    Rule(
        "U34",
        Severity.WARN,
        "with floor 0 the probability of a prompt can approach 0, and no weight corrects prompts "
        "that are never drawn; set it to 0.01",
        no_floor,
    ),
    Rule(
        "U34",
        Severity.WARN,
        "with optimism the probability of a prompt can be 0, and no weight corrects prompts that "
        "are never drawn; set draws: thompson or weights: ht",
        prompts_without_chance,
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
        "the gradient of k3 as a loss is that of KL(ref || pi), the forward KL; that of k2 is the"
        " gradient of KL(pi || ref)",
        kl_estimator("k3"),
    ),
    Rule(
        "H3",
        Severity.ERROR,
        "what changes the reward must come before the baseline; move it to the front",
        late_reward,
    ),
    Rule(
        "H4",
        Severity.ERROR,
        "a ratio link has no effect after the trust region; move it before the trust region",
        behind_trust_region,
    ),
    Rule(
        "H5",
        Severity.WARN,
        "advantages of the full group do not sum to 0 over the kept rollouts, which reinforces or"
        " penalizes all of them; set advantage: kept_mean or kept_z_score",
        extremes_of_full_group,
    ),
    Rule(
        "H6",
        Severity.WARN,
        "it uses earlier outcomes of the same prompts, but no prompt comes again; give several "
        "rounds one phase, or rounds several iterations",
        prompts_come_once,
    ),
    Rule(
        "H7",
        Severity.WARN,
        "no round of the arm starts from the base policy, which sampled the profile; drop it",
        reuse_without_base,
    ),
    Rule(
        "H8",
        Severity.WARN,
        "groups larger than profile.rollouts_per_prompt are truncated to it in the first round; "
        "raise it",
        reuse_of_small_groups,
    ),
    Rule(
        "H9",
        Severity.INFO,
        "the outcomes that select the prompts are also trained on: the gradient of a prompt keeps"
        " its direction, but its scale is biased",
        reuse_after_choice(is_shaped=False),
    ),
    Rule(
        "H9",
        Severity.WARN,
        "the outcomes that select the prompts are also trained on, and the reward is not binary: "
        "the direction of a prompt's gradient is biased; drop reuse_profile_rollouts",
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
        "the ratio of a denoising step is a product over all dimensions of a sample and exceeds "
        "every published clip range; put scale_log_ratio before the trust region",
        ratio_of_all_dimensions,
    ),
    Rule(
        "H12",
        Severity.ERROR,
        "the log ratio of a denoising step is a sum over all dimensions, too large for estimators "
        "of KL; set estimator: exact",
        kl_of_denoising,
    ),
    Rule(
        "H13",
        Severity.ERROR,
        "contrast_implicit_policies needs the matching loss of velocities; set sampling.density: "
        "matched",
        contrast_without_matching,
    ),
    Rule(
        "H23",
        Severity.WARN,
        "the penalty compares the reference with itself, so that it and its gradient are 0; set "
        "training.reference: base, or more iterations_per_round",
        unmoved_reference,
    ),
    Rule(
        "H24",
        Severity.WARN,
        "no link reads log-probs of a reference policy; remove the key",
        unread_reference,
    ),
    Rule(
        "H22",
        Severity.ERROR,
        "the entropy of a Gaussian denoising step does not depend on the weights; drop it",
        entropy_of_denoising,
    ),
    Rule(
        "H21",
        Severity.WARN,
        "a score that is normalized within groups has a constant mean, so that a temperature that "
        "follows the mean reward never sees it rise; set normalize: none",
        normalized_mean,
    ),
    Rule(
        "H25",
        Severity.WARN,
        "a score that is normalized within groups has a constant mean, so that a round with "
        "stop_on_plateau ends as soon as it can; set normalize: none",
        normalized_plateau,
    ),
    Rule(
        "H1",
        Severity.ERROR,
        "an objective needs exactly one average, or its scale is undefined",
        require_one("average"),
    ),
    Rule(
        "H2",
        Severity.ERROR,
        "an objective needs exactly one baseline",
        require_one("baseline"),
    ),
    Rule(
        "H16",
        Severity.ERROR,
        "with staleness 1, rollouts come from older weights than those that are trained; put a "
        "correction such as truncate_mismatch in front of the objective, or set staleness to 0",
        uncorrected_staleness,
    ),
    Rule(
        "H26",
        Severity.ERROR,
        "its signal p (1 - p) is the variance of a binary outcome within a group, not that of this"
        " reward; set reward.maximize: outcome and remove what else adds to the reward: penalties,"
        " weights of other judges, improvement",
        signal_of_other_rewards,
    ),
    Rule(
        "H27",
        Severity.ERROR,
        "with weights: ht prompts are drawn with unequal probabilities, which only "
        "average_over_prompts corrects; use it (rloo has it) or set weights: none",
        unread_chances,
    ),
    Rule(
        "H32",
        Severity.WARN,
        "with center_by_moving_average the advantages of a group of equal rewards are not 0; remove"
        " drop_uniform_groups to train on all groups, or set center_by_group_mean",
        filter_by_running_baseline,
    ),
    Rule(
        "H34",
        Severity.ERROR,
        "an exact divergence is divided by the dimensions that scale_log_ratio states before it, "
        "also in an algorithm such as flow_grpo; put it behind",
        undivided_penalty,
    ),
    Rule(
        "H33",
        Severity.WARN,
        "with several updates per iteration an average is over the prompts of one update, and a "
        "prompt with a large group weighs more; set training.updates_per_iteration to 1",
        chances_of_several_updates,
    ),
    *CHUNK_RULES,
    *REVISION_RULES,
    *PART_RULES,
)
