"""A chain of rounds of one arm, through the stages in this process, with a tiny policy."""

import shutil
from pathlib import Path
from typing import Any

from grpo.params.recorded import PLUGIN_MANIFESTS
from grpo.params.yaml import dump_yaml, parse_yaml
from grpo.runtime.artifacts.usage import Usage
from grpo.wiring.iterations import RoundInputs
from stages import check, curriculum, profile, rollout, score, train
from tests.pipeline.test_selection import BASE, JUDGE, NEEDED, PROFILE, TRAIN, write_inputs
from tests.pipeline.workspaces import ROOT, write_two_arms

ARM = "uniform"
CURRICULUM = Path(f"artifacts/curricula/{ARM}.parquet")


def write_chain(rounds: int, objective: list[Any], **training: object) -> list[str]:
    """Writes params.yaml with one arm of 16 prompts of 4 rollouts, and returns its rounds."""
    path, names = Path("params.yaml"), [f"{ARM}-{index + 1}" for index in range(rounds)]
    write_two_arms(path)
    params = parse_yaml(path.read_text())
    arm = params["arms"][ARM]
    arm["training"] |= training
    arm["sampling"]["rollouts_per_batch"] = 8
    arm["curriculum"] = [
        {"split_at_random": {"phases": 1, "prompts_per_phase": 16}},
        {"fix_group_size": {"rollouts": 4}},
    ]
    arm["objective"] = objective
    params["reward"] |= {"answer_pattern": "^(.)", "unfinished_penalty": 0.5}
    params["arms"] = {ARM: arm}
    params["rounds"] = {
        name: {"arm": ARM, "start": start, "phase": 1}
        for name, start in zip(names, ["base", *names])
    }
    path.write_text(dump_yaml(params))
    return names


def prepare_chain() -> None:
    """Makes all that rounds read; params.yaml must exist."""
    for folder in ("grpo", "plugins", "stages"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, folder, ignore=ignored)
    write_inputs()
    check.main(Usage(), Path("params.yaml"), Path("data"), NEEDED, JUDGE.parent, PLUGIN_MANIFESTS)
    profile.main(Usage(), NEEDED, JUDGE, BASE, TRAIN, PROFILE)
    profiled = PROFILE / "prompts.parquet", PROFILE / "rollouts"
    curriculum.main(Usage(), TRAIN, *profiled, CURRICULUM, CURRICULUM.with_suffix(".json"))


def inputs_of(name: str, start: str) -> RoundInputs:
    """Returns the paths of the inputs of train@."""
    return RoundInputs(
        judge=JUDGE,
        base=BASE,
        start=Path(f"artifacts/policies/{start}"),
        prompts=TRAIN,
        curriculum=CURRICULUM,
        rollouts=Path(f"artifacts/rollouts/{name}"),
        rewards=Path(f"artifacts/rewards/{name}.parquet"),
    )


def outputs_of(name: str) -> tuple[Path, Path]:
    """Returns the paths of the policy and of the training of a round."""
    return Path(f"artifacts/policies/{name}"), Path(f"artifacts/training/{name}")


def draw_round(name: str, start: str) -> None:
    """Makes the rollouts and rewards of a round's first iteration."""
    each = inputs_of(name, start)
    paths = (each.judge, each.base, each.start, each.prompts, each.curriculum)
    rollout.main(Usage(), *paths, PROFILE / "rollouts", each.rollouts)
    score.main(Usage(), JUDGE, TRAIN, each.rollouts, each.rewards)


def train_round(name: str, start: str) -> None:
    """Trains a round."""
    train.main(Usage(), *inputs_of(name, start), *outputs_of(name))
