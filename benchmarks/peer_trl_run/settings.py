"""The runs that are compared: sizes, algorithm, arms of this project and targets."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from grpo.params.recipes import read_content

ROOT = Path(__file__).parents[2]
GROUP_SIZE = 8
BETAS, MAX_GRAD_NORM, CLIP = [0.9, 0.99], 1.0, (0.2, 0.28)
# Written down before this project's side was measured: the largest ratio of CPU seconds, from the
# start of the process, of `same` at both sizes and of the best of the other arms.
TARGETS = {"same": 0.5, "allocated": 0.25}


@dataclass(frozen=True, kw_only=True)
class Size:
    """A run's recipe and amount of training."""

    params: str  # file of the repository: task, base policy, judge and evaluation
    updates: int
    prompts_per_update: int
    learning_rate: float
    updates_per_save: int  # of TRL's policy, for its curve
    trl: dict[str, Any]  # TRL's settings; tune.py measures the candidates `tuned`
    tokens_per_microbatch: int  # of this project
    rollouts_per_batch: int  # of this project
    tuned: list[dict[str, Any]] = field(default_factory=list)  # candidates of tune.py

    @property
    def train_prompts(self) -> int:
        """Number of prompts: both sides see each exactly once."""
        return self.updates * self.prompts_per_update


@dataclass(frozen=True, kw_only=True)
class ArmOfOurs:
    """What an arm trains on. It is evaluated after each round."""

    curriculum: Callable[[Size], list[Any]]
    objective: list[Any]
    rounds: int


def _every_prompt(size: Size, *, phases: int, group_size: int) -> list[Any]:
    """Returns a curriculum that trains on every prompt once."""
    per_phase = size.train_prompts // phases
    return [
        {"split_at_random": {"phases": phases, "prompts_per_phase": per_phase}},
        {"fix_group_size": {"rollouts": group_size}},
    ]


def _sgpo(size: Size) -> list[Any]:
    """Returns the curriculum of the arm sgpo of the recipe, with a phase per round."""
    return [
        {"drop_trivial": {"above": 0.75}},
        {"sample_unsolved": {"fraction": 0.1}},
        {"size_groups_by_inverse_rate": {"smallest": 2, "largest": GROUP_SIZE}},
        {"split_easy_to_hard": {"phases": 4}},
    ]


ARMS = {
    # TRL's default algorithm (loss type dapo): its deviation has ddof 1 and adds 1e-4. Groups that
    # are dropped here have gradient 0 there.
    "same": ArmOfOurs(
        curriculum=partial(_every_prompt, phases=1, group_size=GROUP_SIZE),
        objective=[
            "center_by_group_mean",
            {"scale_by_group_std": {"ddof": 1, "epsilon": 0.0001}},
            "average_over_steps",
            {"clip_surrogate": {"low": CLIP[0], "high": CLIP[1]}},
            "drop_uniform_groups",
        ],
        rounds=1,
    ),
    "sgpo": ArmOfOurs(curriculum=_sgpo, objective=[{"rloo": {"low": 0.2, "high": 0.28}}], rounds=4),
    "pairs": ArmOfOurs(
        curriculum=partial(_every_prompt, phases=4, group_size=2),
        objective=["two_grpo"],
        rounds=4,
    ),
}
SIZES = {
    "0.4M": Size(
        params="recipes/reasoning-short.yaml",
        updates=32,
        prompts_per_update=48,
        learning_rate=2e-4,
        updates_per_save=4,
        trl={"rows": 96, "attn_implementation": "eager"},
        tokens_per_microbatch=8192,
        rollouts_per_batch=512,
        tuned=[
            {"rows": 384},
            {"rows": 192},
            {"rows": 96},
            {"rows": 48},
            {"rows": 384, "cache_implementation": "static"},
            {"rows": 96, "attn_implementation": "eager"},
            {"rows": 48, "attn_implementation": "eager"},
            {"rows": 384, "pad_to_multiple_of": None},
            {"rows": 384, "torch_compile": True},
            {"rows": 48, "cache_implementation": "static"},
            {"rows": 384, "optim": "adamw_torch"},
        ],
    ),
    "11.6M": Size(
        params="benchmarks/peer_trl_run/ten_million.yaml",
        updates=24,
        prompts_per_update=16,
        learning_rate=1e-4,
        updates_per_save=8,
        trl={"rows": 16},
        tokens_per_microbatch=1024,
        rollouts_per_batch=128,
        tuned=[
            {"rows": 8},
            {"rows": 16},
            {"rows": 32},
            {"rows": 64},
            {"rows": 128},
            {"rows": 16, "attn_implementation": "eager"},
            {"rows": 16, "cache_implementation": "static"},
        ],
    ),
}


def params_of(size: Size, seed: int, arm: str) -> dict[str, Any]:
    """Returns the parameters of this project's run: the recipe with one arm of this benchmark.

    One arm per file: the profile, which is shared by arms, must count for those that read it only.
    """
    rounds = ARMS[arm].rounds
    params: dict[str, Any] = copy.deepcopy(read_content(ROOT / size.params))
    params["seed"] = seed
    params["task"]["train_prompts"] = size.train_prompts
    params["arms"] = {
        arm: {
            "curriculum": ARMS[arm].curriculum(size),
            "selection": [],
            "sampling": {
                "temperature": 1.0,
                "top_p": 1.0,
                "rollouts_per_batch": size.rollouts_per_batch,
            },
            "objective": ARMS[arm].objective,
            "training": {
                "iterations_per_round": size.updates // rounds,
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
    }
    names = ["base", *round_names(arm)]
    params["rounds"] = {
        name: {"arm": arm, "start": start, "phase": phase}
        for phase, (start, name) in enumerate(pairwise(names), start=1)
    }
    return params


def round_names(arm: str) -> list[str]:
    """Returns the names of an arm's rounds."""
    return [f"{arm}-{phase}" for phase in range(1, ARMS[arm].rounds + 1)]


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
        "group_size": GROUP_SIZE,
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
