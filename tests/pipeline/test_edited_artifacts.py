"""Artifacts that were edited: every contradiction is one line with file, row and column."""

from pathlib import Path

import numpy as np
import pytest

from tests.pipeline.corruptions import (
    Arrays,
    Corruption,
    both,
    edit_table,
    edit_tensors,
    set_cell,
    set_param,
    take,
    write,
)
from tests.pipeline.test_bad_inputs import (
    BASE,
    CURRICULUM,
    NORM,
    PROFILE,
    REWARDS,
    ROLLOUTS,
    Bad,
    refuses,
)

TABLE, TENSORS = f"{ROLLOUTS}/table.parquet", f"{ROLLOUTS}/tensors.safetensors"
EVAL = "artifacts/prompts/eval.parquet"
RERUN = ".*; rerun "
LEARNING_RATE = "arms.uniform.training.learning_rate"
LOWER = rf"; lower {LEARNING_RATE}, which is 1e\+30, in params.yaml"


def set_entry(path: str, name: str, index: int, value: float) -> Corruption:
    def change(tensors: Arrays) -> Arrays:
        changed = tensors[name].copy()
        changed.reshape(-1)[index] = value
        return {**tensors, name: changed}

    return edit_tensors(path, change)


EDITED = [
    Bad("behavior log-prob of nan", "train@uniform-1",
        set_entry(TENSORS, "behavior_logp", 3, np.nan),
        rf"{TENSORS}: tensor 'behavior_logp' must be finite, got nan at \[3\]{RERUN}"),
    Bad("behavior log-prob above 0", "train@uniform-1",
        set_entry(TENSORS, "behavior_logp", 0, 0.5),
        rf"{TENSORS}: behavior_logp of row 0, entry 0, must be a log-prob, at most 0, got 0.5"),
    Bad("token outside the vocabulary", "train@uniform-1", set_entry(TENSORS, "tokens", 0, 99999),
        rf"{TENSORS}: tokens of row 0, entry 0, must be in \[0, 259\), got 99999{RERUN}"),
    Bad("token below the vocabulary", "train@uniform-1",
        set_entry(TENSORS, "prompt_tokens", 1, -1),
        rf"{TENSORS}: prompt_tokens of row 0, entry 1, must be in \[0, 259\), got -1{RERUN}"),
    Bad("steps of the table", "train@uniform-1", set_cell(TABLE, 2, "steps", 77),
        rf"{TABLE}: row 2 .*column 'steps' must be \d+, as in {TENSORS}, got 77{RERUN}"),
    Bad("two prompts in a group", "train@uniform-1", set_cell(TABLE, 4, "prompt_id", "train-no"),
        rf"{TABLE}: row 4 .*column 'group' must be of one prompt, .*{RERUN}"),
    Bad("a prompt in two groups", "train@uniform-1", set_cell(TABLE, 4, "group", 1000),
        rf"{TABLE}: row 4 .*column 'group' must be of one prompt, .*, got 1000{RERUN}"),
    Bad("negative cost of rollouts", "train@uniform-1",
        write(f"{ROLLOUTS}/cost.json", '{"flops": -5}'),
        rf"{ROLLOUTS}/cost.json: cost.flops must be a whole number >= 0, got -5{RERUN}"),
    Bad("negative cost of a policy", "train@uniform-1",
        write(f"{BASE}/state.json", '{"name": "base", "cost": {"flops": -1}}'),
        rf"{BASE}/state.json: cost.flops must be a whole number >= 0, got -1{RERUN}"),
    Bad("reward beside another outcome", "train@uniform-1",
        both(set_cell(REWARDS, 6, "outcome", 1.0), set_cell(REWARDS, 6, "reward", 0.0)),
        rf"{REWARDS}: row 6 .*'reward' must be 1.0, as its outcome .*, got 0.0; rerun its score"),
    Bad("reward of another prompt", "train@uniform-1",
        set_cell(REWARDS, 6, "prompt_id", "train-no"),
        rf"{REWARDS}: row 6 .*'prompt_id' must be .*, as it was drawn, got train-no{RERUN}"),
    Bad("reward that float32 cannot hold", "train@uniform-1", set_cell(REWARDS, 5, "reward", 1e39),
        rf"{REWARDS}: row 5 .*column 'reward' must be finite in float32, got 1e\+39{RERUN}"),
    Bad("more successes than rollouts", "curriculum@sgpo", set_cell(PROFILE, 1, "successes", 20),
        rf".*{PROFILE}: row 1 .*column 'successes' must be at most rollouts, got 20{RERUN}"),
    Bad("rate of other counts", "curriculum@sgpo",
        both(set_cell(PROFILE, 1, "successes", 2), set_cell(PROFILE, 1, "outcome_rate", 0.9)),
        rf".*{PROFILE}: row 1 .*'outcome_rate' must be successes / rollouts, got 0.9{RERUN}"),
    Bad("a million rollouts", "rollout@uniform-1", set_cell(CURRICULUM, 3, "rollouts", 10**6),
        rf"{CURRICULUM}: row \d+ .*'rollouts' must be at most 8, .*, got 1000000{RERUN}"),
    Bad("two prompts at one position", "rollout@uniform-1",
        edit_table(CURRICULUM, lambda frame: frame.assign(position=0)),
        rf"{CURRICULUM}: row 1 .*column 'position' must be another one .*, got 0{RERUN}"),
    Bad("training prompts to evaluate on", "evaluate@uniform-1",
        take(EVAL, "artifacts/prompts/train.parquet"),
        rf"{EVAL}: row 0 .*column 'prompt_id' must be eval-..., got train-.*{RERUN}"),
    Bad("nan weight", "rollout@uniform-1", set_entry(f"{BASE}/model.safetensors", NORM, 3, np.nan),
        rf"{BASE}: tensor '{NORM}' must be finite, got nan at \[3\]{RERUN}"),
]  # fmt: skip
DIVERGING = [
    Bad("learning rate of an arm", "train@uniform-1", set_param(LEARNING_RATE, 1e30),
        rf"training of uniform-1 diverged at update 0: norm of the weights is inf{LOWER}"),
    Bad("learning rate of an arm in two ranks", "train@uniform-1",
        both(set_param(LEARNING_RATE, 1e30), set_param("arms.uniform.training.ranks", 2)),
        rf"training of uniform-1 diverged at update 0: norm of the weights is inf{LOWER}"),
    Bad("learning rate of the warm-up", "base",
        set_param("policy.base.warmup.learning_rate", 1e30),
        r"warm-up of the base diverged at update 0: .*; lower policy.base.warmup.learning_rate"),
]  # fmt: skip


@pytest.mark.parametrize("bad", EDITED, ids=lambda bad: bad.name)
def test_an_edited_artifact_is_refused_with_row_and_column(workspace: Path, bad: Bad):
    bad.corrupt(workspace)
    refuses(workspace, bad)


@pytest.mark.parametrize("bad", DIVERGING, ids=lambda bad: bad.name)
def test_training_that_diverges_is_one_line_and_leaves_its_curves(workspace: Path, bad: Bad):
    bad.corrupt(workspace)
    refuses(workspace, bad)
    reason = (workspace / ".runs/diverged" / bad.stage / "reason.json").read_text()
    assert "diverged at update 0" in reason
    assert (workspace / ".runs/diverged" / bad.stage / "updates.csv").is_file()
