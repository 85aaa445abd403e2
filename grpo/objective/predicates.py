"""What composition rules look for: the plan of an arm, and predicates that name what breaks one."""

from collections.abc import Callable
from dataclasses import dataclass

from grpo.objective.divergence import CONTRAST
from grpo.objective.link import Kind, Link, Setting

TOO_FEW = 4  # rollouts of a group to choose from (rule U22)
TOO_STALE = 4  # updates per round for the trainer's own routing (rule U33)
ROUTING = "policy.routing"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a rule may know of an arm."""

    links: tuple[Link, ...]
    curriculum: tuple[Link, ...]
    group_sizes: frozenset[int]
    updates_per_round: int
    has_binary_reward: bool
    dropouts: frozenset[str]  # parameter paths of dropouts that are on
    top_p: float = 1.0
    selection: tuple[Link, ...] = ()
    phases: tuple[int, ...] = ()  # that the arm's rounds ask for
    starts_from_base: bool = True  # some round of the arm does
    reads_profile: bool = False  # some step of the curriculum looks at outcome rates
    profile_rollouts: int | None = None  # per prompt
    routing: str = "live"  # policy.routing
    has_routers: bool | None = None  # None: only the loaded model knows
    denoises: bool = False  # steps are denoising steps
    acts: bool = False  # steps are chunks of a robot's actions
    density: str | None = None  # of denoising steps
    stochastic: str | None = None  # which denoising steps have noise
    owners: tuple[str, ...] = ()  # paths of what chooses the window of steps with noise
    has_variants: bool = False  # some rollouts are drawn under another condition than the prompt

    def named(self, *names: str) -> list[str]:
        """Returns which of `names` stand in the objective, once per occurrence."""
        return [link.name for link in self.links if link.name in names]

    def of(self, *kinds: Kind) -> list[str]:
        """Returns the links of the objective that are of one of the kinds."""
        return [link.name for link in self.links if link.kinds & {*kinds}]

    def steps(self, kind: Kind) -> list[str]:
        """Returns the steps of the curriculum that are of a kind."""
        return [link.name for link in self.curriculum if kind in link.kinds]

    def spends(self, *names: str) -> list[str]:
        """Returns which of `names` stand in the selection."""
        return [link.name for link in self.selection if link.name in names]


def unless_one(kind: Kind) -> Callable[[Plan], list[str]]:
    """Returns a predicate: exactly one link of a kind must stand in the objective."""

    def find(plan: Plan) -> list[str]:
        found = plan.of(kind)
        return [] if len(found) == 1 else (found[1:] or ["objective"])

    return find


def beside(kind: Kind, *names: str) -> Callable[[Plan], list[str]]:
    """Returns a predicate that finds `names` beside a link of a kind."""
    return lambda plan: plan.named(*names) if plan.of(kind) else []


def rollout_ratio_on_policy(plan: Plan) -> list[str]:
    return plan.of("rollout ratio") if plan.updates_per_round == 1 else []


def _is_shaped(plan: Plan) -> bool:
    """Returns whether the reward takes more than two values."""
    return not plan.has_binary_reward or bool(_active(plan, "reward penalty"))


def _active(plan: Plan, kind: Kind = "penalty") -> list[str]:
    """Returns which penalties stand in the objective with a weight above 0."""
    return [link.name for link in plan.links if kind in link.kinds and link.settings["beta"]]


def pair_z_score(plan: Plan) -> list[str]:
    if not _is_shaped(plan):
        return []
    whole = plan.named("scale_by_group_std") if 2 in plan.group_sizes else []
    return whole + _extremes(plan, keep=2, advantage="kept_z_score")


def variable_groups(plan: Plan) -> list[str]:
    scaled = plan.named(
        "scale_by_group_std",
        "average_over_steps",
        "average_over_rollouts",
        "sum_over_steps",
    )
    return scaled if len(plan.group_sizes) > 1 else []


def extremes_of_variable_groups(plan: Plan) -> list[str]:
    return _extremes(plan) if len(plan.group_sizes) > 1 else []


def selection_owners(plan: Plan) -> list[str]:
    triage = plan.steps("triage")
    others = [
        *plan.steps("rate window"),
        *(link.name for link in plan.selection if "prompt selection" in link.kinds),
    ]
    return others if triage else others[1:]


def size_owners(plan: Plan) -> list[str]:
    return plan.steps("group size")[1:]


def phase_owners(plan: Plan) -> list[str]:
    return plan.steps("phases")[1:]


def filter_on_reward(plan: Plan) -> list[str]:
    by_reward = [
        link.name
        for link in plan.links
        if link.name == "drop_uniform_groups" and link.settings["by"] == "reward"
    ]
    return by_reward if _is_shaped(plan) else []


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
    """Returns a predicate: a penalty covers only what `selection` leaves."""
    return lambda plan: _active(plan) if plan.named(selection) else []


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
    """Returns keep_extreme_rollouts where it stands with these settings."""
    return [
        link.name
        for link in plan.links
        if link.name == "keep_extreme_rollouts" and settings.items() <= link.settings.items()
    ]


def early_selection(plan: Plan) -> list[str]:
    deciding: set[Kind] = {"baseline", "scale", "average"}
    decided = [index for index, link in enumerate(plan.links) if link.kinds & deciding]
    early = plan.links[: max(decided, default=0)]
    return [link.name for link in early if "selection" in link.kinds]


def behind_trust_region(plan: Plan) -> list[str]:
    regions = [index for index, link in enumerate(plan.links) if "trust region" in link.kinds]
    late = plan.links[min(regions, default=len(plan.links)) :]
    return [link.name for link in late if "ratio" in link.kinds]


def late_kl(plan: Plan) -> list[str]:
    baselines = [index for index, link in enumerate(plan.links) if "baseline" in link.kinds]
    late = plan.links[min(baselines, default=len(plan.links)) :]
    return [link.name for link in late if "reward penalty" in link.kinds]


def replay_on_policy(plan: Plan) -> list[str]:
    is_replayed = plan.routing == "replay_sampled"
    return [ROUTING] if is_replayed and plan.updates_per_round == 1 else []


def stale_proximal_routing(plan: Plan) -> list[str]:
    is_replayed = plan.routing == "replay_proximal"
    return [ROUTING] if is_replayed and plan.updates_per_round >= TOO_STALE else []


def replay_without_routers(plan: Plan) -> list[str]:
    return [ROUTING] if plan.routing != "live" and plan.has_routers is False else []


def no_floor(plan: Plan) -> list[str]:
    return [
        link.name
        for link in plan.selection
        if link.name == "skip_uniform_prompts" and not link.settings["floor"]
    ]


def prompts_come_once(plan: Plan) -> list[str]:
    comes_again = len(set(plan.phases)) < len(plan.phases)
    return [] if comes_again else plan.spends("skip_uniform_prompts")


def reuse_without_base(plan: Plan) -> list[str]:
    return [] if plan.starts_from_base else plan.spends("reuse_profile_rollouts")


def reuse_of_small_groups(plan: Plan) -> list[str]:
    largest, stored = max(plan.group_sizes, default=0), plan.profile_rollouts
    is_short = stored is not None and largest > stored
    return plan.spends("reuse_profile_rollouts") if is_short else []


def reuse_after_choice(*, is_shaped: bool) -> Callable[[Plan], list[str]]:
    """Returns a predicate: the same outcomes choose prompts and are trained on."""

    def find(plan: Plan) -> list[str]:
        chooses = plan.reads_profile or plan.spends("resample_uniform_groups")
        found = chooses and _is_shaped(plan) is is_shaped
        return plan.spends("reuse_profile_rollouts") if found else []

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
    return [
        link.name
        for link in plan.links
        if link.name == "sample_chunks_by_phase" and link.settings["weights"] == "none"
    ]


def kl_on_steps(plan: Plan) -> list[str]:
    is_part = unweighted_steps(plan) or plan.named("keep_highest_phase")
    return _active(plan) if is_part else []


def steps_never_kept(plan: Plan) -> list[str]:
    no_floor = [
        link.name
        for link in plan.links
        if link.name == "sample_chunks_by_phase" and not link.settings["floor"]
    ]
    return no_floor + plan.named("keep_highest_phase")


def phases_without_chunks(plan: Plan) -> list[str]:
    return [] if plan.acts else plan.of("phase selection")


def chunk_ratio_of_all_tokens(plan: Plan) -> list[str]:
    return plan.of("trust region") if plan.acts and not plan.named("scale_log_ratio") else []
