"""Composition rules of links that train some steps of a rollout, by phase or by chance."""

from grpo.objective.predicates import (
    chunk_ratio_of_all_tokens,
    kl_on_part,
    kl_on_steps,
    phases_without_chunks,
    steps_never_kept,
    unweighted_steps,
)
from grpo.objective.rule import Rule, Severity

CHUNK_RULES: tuple[Rule, ...] = (
    Rule(
        "U1",
        Severity.WARN,
        "without weights the gradient is that of what is likely to be kept, not of all steps; set "
        "weights: ht",
        unweighted_steps,
    ),
    Rule(
        "U9",
        Severity.WARN,
        "a rollout ratio over the steps that are kept deviates sqrt(N / B) times as much as over "
        "all; widen the clip by that",
        lambda plan: plan.of("rollout level") if plan.of("step selection") else [],
    ),
    Rule(
        "U24",
        Severity.WARN,
        "the penalty covers what is likely to be kept, not all steps; set weights: ht",
        kl_on_steps,
    ),
    Rule(
        "U24",
        Severity.WARN,
        "steps without an advantage are never kept, and those with little are divided by small "
        "chances, so that the penalty misses the one and has large variance by the other; use "
        "sample_steps_uniformly",
        kl_on_part("sample_steps_by_advantage"),
    ),
    Rule(
        "U30",
        Severity.ERROR,
        "the steps that are trained must be chosen by one owner; keep one",
        lambda plan: plan.of("step selection")[1:],
    ),
    Rule(
        "U34",
        Severity.WARN,
        "some phases are never trained, which no weight repairs; use sample_chunks_by_phase with a "
        "floor above 0",
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
        "the ratio of a chunk is over all of its tokens and leaves every published range; put "
        "scale_log_ratio in front",
        chunk_ratio_of_all_tokens,
    ),
)
