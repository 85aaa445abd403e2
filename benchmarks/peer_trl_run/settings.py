"""The runs that are compared: sizes, algorithm, arms of this project and targets."""

import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from grpo.params.recipes import merge, read_content

ROOT = Path(__file__).parents[2]
BETAS, MAX_GRAD_NORM, CLIP = [0.9, 0.99], 1.0, (0.2, 0.28)
# TRL's default algorithm (loss type dapo): its deviation has ddof 1 and adds 1e-4. Groups that are
# dropped here have gradient 0 there.
OBJECTIVE: list[Any] = [
    "center_by_group_mean",
    {"scale_by_group_std": {"ddof": 1, "epsilon": 0.0001}},
    "average_over_steps",
    {"clip_surrogate": {"low": CLIP[0], "high": CLIP[1]}},
    "drop_uniform_groups",
]
SAME, COMPOSED, NEAR_RATE = "same", "composed", "near_rate"  # the last two allocate
DEFAULT = "default"  # the arm composed, as its recipe has it
ARMS = (SAME, COMPOSED, NEAR_RATE, DEFAULT)
# Written down before this project's side was measured: the largest ratio of CPU seconds, from the
# start of the process, at every size of the arm.
TARGETS = {SAME: 0.5, COMPOSED: 0.25, NEAR_RATE: 0.25, DEFAULT: 0.25}


@dataclass(frozen=True, kw_only=True)
class Size:
    """A run's recipe and amount of training."""

    params: str  # file of the repository: task, base policy, judge, evaluation
    allocated: tuple[str, ...]  # of ARMS: those that should reach TRL's reward for less
    updates: int
    group_size: int
    prompts_per_update: int
    learning_rate: float
    updates_per_save: int  # of TRL's policy, for its curve
    trl: dict[str, Any]  # TRL's settings, the fastest of `tuned`
    tokens_per_microbatch: int  # of this project
    rollouts_per_batch: int  # of this project
    trial_seed: int  # of tune.py, as are trial_updates and the candidates `tuned`
    trial_updates: int  # whole runs take minutes
    tuned: list[dict[str, Any]]
    composed: dict[str, Any] = field(default_factory=dict)  # what that arm changes in the recipe's


STEPS = Size(
    params="benchmarks/peer_trl_run/worked_steps.yaml",
    allocated=(NEAR_RATE,),
    updates=24,
    group_size=8,
    prompts_per_update=16,
    learning_rate=5e-5,
    updates_per_save=8,
    trl={"rows": 16, "cache_implementation": "static"},
    tokens_per_microbatch=1024,
    rollouts_per_batch=128,
    trial_seed=10,
    trial_updates=4,
    tuned=[
        {"rows": 8},
        {"rows": 16},
        {"rows": 32},
        {"rows": 16, "cache_implementation": "static"},
    ],
)
SIZES = {
    "0.2M": Size(
        params="params.yaml",
        allocated=(COMPOSED, DEFAULT),
        updates=48,
        group_size=16,
        prompts_per_update=16,
        learning_rate=3e-4,
        updates_per_save=4,
        trl={"rows": 64, "cache_implementation": "static"},
        tokens_per_microbatch=2048,
        rollouts_per_batch=512,
        trial_seed=0,
        trial_updates=12,
        tuned=[
            {"rows": 256},
            {"rows": 128},
            {"rows": 64},
            {"rows": 32},
            {"rows": 64, "attn_implementation": "eager"},
            {"rows": 256, "cache_implementation": "static"},
            {"rows": 64, "cache_implementation": "static"},
        ],
        composed={  # chosen on seeds 0 to 2: one round of more and smaller iterations
            "selection": [{"allocate_by_signal": {"budget": 1.2e10}}],
            "sampling": {"rollouts_per_batch": 512},
            "training": {"iterations_per_round": 12},
        },
    ),
    "10.4M": STEPS,
    "10.4M-half": replace(
        STEPS,
        params="benchmarks/peer_trl_run/half_unsolved.yaml",
        allocated=(COMPOSED,),
        updates=16,
    ),
}


def params_of(size: Size, seed: int, arm: str) -> dict[str, Any]:
    """Returns the parameters of this project's run: the recipe with one arm.

    `same` is TRL's algorithm on as many prompts; the allocated arms are the recipe's own, but for
    what `size.composed` changes. There is one arm per file: the profile, which is shared by arms,
    must count for those that read it.
    """
    params: dict[str, Any] = copy.deepcopy(read_content(ROOT / size.params))
    params["seed"] = seed
    if arm == SAME:
        params["arms"] = {SAME: _same(size)}
        params["rounds"] = {f"{SAME}-1": {"arm": SAME, "start": "base", "phase": 1}}
    else:
        own = COMPOSED if arm == DEFAULT else arm
        changed = size.composed if arm == COMPOSED else {}
        params["arms"] = {own: merge(params["arms"][own], changed)}
        rounds = params["rounds"]
        params["rounds"] = {name: each for name, each in rounds.items() if each["arm"] == own}
    return params


def _same(size: Size) -> dict[str, Any]:
    """Returns the arm that trains by TRL's algorithm, on as many prompts, each once."""
    prompts = size.updates * size.prompts_per_update
    return {
        "curriculum": [
            {"split_at_random": {"phases": 1, "prompts_per_phase": prompts}},
            {"fix_group_size": {"rollouts": size.group_size}},
        ],
        "selection": [],
        "sampling": {
            "temperature": 1.0,
            "top_p": 1.0,
            "rollouts_per_batch": size.rollouts_per_batch,
        },
        "objective": OBJECTIVE,
        "training": {
            "iterations_per_round": size.updates,
            "updates_per_iteration": 1,
            "staleness": 0,
            "stored_rollouts": "tables",
            "learning_rate": size.learning_rate,
            "betas": BETAS,
            "weight_decay": 0.0,
            "max_grad_norm": MAX_GRAD_NORM,
            "tokens_per_microbatch": size.tokens_per_microbatch,
            "updates_per_checkpoint": size.updates,
            "updates_per_audit": 0,
            "ranks": 1,
        },
    }


def order_of(size: Size, seed: int, **others: Any) -> dict[str, Any]:
    """Returns the fields of `theirs.Order` that the parameters of this project decide.

    Args:
      others: Further fields, or other values of these.
    """
    params = read_content(ROOT / size.params)
    return {
        "seed": seed,
        "updates": size.updates,
        "prompts_per_update": size.prompts_per_update,
        "group_size": size.group_size,
        "learning_rate": size.learning_rate,
        "betas": BETAS,
        "max_grad_norm": MAX_GRAD_NORM,
        "clip": list(CLIP),
        "max_steps": params["policy"]["max_steps"],
        "loss_type": "dapo",
        "answer_pattern": params["reward"]["answer_pattern"],
        "threshold": params["reward"]["threshold"],
        "updates_per_save": size.updates_per_save,
        "settings": size.trl,
        **others,
    }
